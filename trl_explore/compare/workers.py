"""Carrying a comparison out: one run after the other, or side by side in processes with a line for every arm."""

import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import datasets
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from tqdm.auto import tqdm

from trl_explore.compare.folder import RESULT, ComparisonFolder, free_memory, teach
from trl_explore.compare.plots import metric_label
from trl_explore.compare.report import explanation, notes, rich_table, write_report
from trl_explore.compare.run import Interrupted, train_run
from trl_explore.compare.settings import Arm, Comparison
from trl_explore.methods import METHODS, Method
from trl_explore.runs.methods import find_method
from trl_explore.runs.quiet import quiet
from trl_explore.runs.workers import AT_WORK, Job, WorkerFailed, Workers, count_cores
from trl_explore.saving.full_disk import SAID
from trl_explore.saving.interrupt import InterruptCallback

SECONDS_BETWEEN_LINES = 60  # of a run, where the output is no terminal


class HangUpCallback(InterruptCallback):
    """Saves and stops a run when the parent has hung up, as its parent class does on Ctrl-C."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self.connection = connection

    def on_train_begin(self, args, state, control, **kwargs):
        """No handler: Ctrl-C is for the parent."""

    def on_step_end(self, args, state, control, **kwargs):
        self.interrupted = self.connection.poll()  # the parent says nothing while a run is at work: it is gone
        super().on_step_end(args, state, control, **kwargs)


class Teller:
    """Stands where a run wants a `tqdm` bar, and tells the parent."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.n = self.initial = 0
        self.reward = ""

    def set_postfix(self, *, reward: str, **_: object) -> None:
        """Keeps the reward of the current step."""
        self.reward = reward

    def update(self, more: int) -> None:
        """Tells how much of the run's budget is spent, and the reward."""
        self.n += more
        with suppress(ConnectionError):  # the parent is gone: the run is about to be saved and stopped
            self.connection.send((AT_WORK, (self.n, self.reward)))


def teach_job(connection: Connection, comparison: Comparison, seed: int) -> str:
    """A job: [`~trl_explore.compare.folder.teach`]."""
    quiet()
    if comparison.builds_model:  # one per seed, side by side
        torch.set_num_threads(1)
        return teach(comparison, seed, progress=False)
    datasets.disable_progress_bars()
    return teach(comparison, seed, progress=True)  # one for all seeds, which takes minutes


def train_job(
    connection: Connection,
    comparison: Comparison,
    path: Path,
    arm: Arm,
    seed: int,
    start: str | None,
    threads: int,
    row: Method,
) -> dict[str, Any]:
    """A job: one run, whose result is written to the comparison's folder; the last point of its curve."""
    quiet()
    datasets.disable_progress_bars()
    torch.set_num_threads(threads)
    METHODS.setdefault(row.name, row)  # this process does not know one that was added at run time
    folder = ComparisonFolder(comparison, path).of_run(arm, seed)
    teller, hang_up = Teller(connection), HangUpCallback(connection)
    try:
        run = train_run(comparison, arm, seed=seed, folder=folder, start=start, bar=teller, interrupt=hang_up)
    except Interrupted:
        raise KeyboardInterrupt from None
    run.save(folder / RESULT)
    free_memory()
    return run.points[-1]


class ArmLines:
    """A live line per arm. Where the output is no terminal: a line of text for every finished run, and for every run
    that takes long, one in a minute at most."""

    def __init__(self, folder: ComparisonFolder, console: Console) -> None:
        self.folder, self.console, self.comparison = folder, console, folder.comparison
        self.spent = {(arm.name, seed): 0.0 for arm in self.comparison.arms for seed in self.comparison.seeds}
        missing = {(arm.name, seed) for arm, seed in folder.missing()}
        self.finished = self.spent.keys() - missing
        self.spent |= dict.fromkeys(self.finished, self.comparison.amount)
        self.told_at = dict.fromkeys(missing, time.monotonic())  # when a run had its last line of text
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn())
        self.progress = Progress(
            *columns,
            TextColumn("{task.fields[state]}", markup=False),
            console=console,
            disable=not console.is_terminal,
            refresh_per_second=4,
        )
        self.warm_starts = self.progress.add_task("warm starts", visible=False, state="")
        total = self.comparison.amount * len(self.comparison.seeds)
        self.lines = {
            arm.name: self.progress.add_task(arm.name, total=total, state="") for arm in self.comparison.arms
        }
        for name in self.lines:
            self._draw(name, "")

    def taught(self, count: int, total: int) -> None:
        """Shows how many models have been taught the task."""
        self.progress.update(self.warm_starts, completed=count, total=total, visible=count < total)
        if total and not self.console.is_terminal:
            self.print(f"{count}/{total} warm starts")

    def at_work(self, arm: Arm, seed: int, spent: float, reward: str) -> None:
        """Shows a step of a run."""
        self.spent[arm.name, seed] = spent
        self._draw(arm.name, f", reward {reward}")
        now = time.monotonic()
        if not self.console.is_terminal and now - self.told_at[arm.name, seed] >= SECONDS_BETWEEN_LINES:
            self.told_at[arm.name, seed] = now
            share = 100 * spent / self.comparison.amount
            self.print(f"{arm.name}, seed {seed}: {share:.0f} % of its budget, reward {reward}")

    def done(self, arm: Arm, seed: int, point: dict[str, Any]) -> None:
        """Shows the end of a run."""
        self.finished.add((arm.name, seed))
        self.spent[arm.name, seed] = self.comparison.amount
        self._draw(arm.name, "")
        if not self.console.is_terminal:
            metric = f"eval/{self.comparison.metrics[0]}"
            label, scale = metric_label(metric)
            shown = f"{scale * point[metric]:.1f} %" if scale == 100 else f"{point[metric]:.3f}"
            self.print(
                f"{len(self.finished)}/{self.folder.num_runs} {arm.name}, seed {seed}: {label} {shown}, "
                f"{point['seconds']:.0f} wall seconds of training"
            )

    def print(self, text: str) -> None:
        """Prints a line."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _draw(self, name: str, more: str) -> None:
        seeds = self.comparison.seeds
        count = sum((name, seed) in self.finished for seed in seeds)
        state = f"{count}/{len(seeds)} seeds{more}"
        self.progress.update(self.lines[name], completed=sum(self.spent[name, seed] for seed in seeds), state=state)


def _teach_side_by_side(jobs: list[Job], workers: Workers, lines: ArmLines, starts: dict[int, str]) -> None:
    """Carry out the warm starts, and put the folders of the models into `starts` by their seeds."""
    try:
        lines.taught(0, len(jobs))
        for job, _, value in workers.do(jobs):
            starts[job.arguments[1]] = value
            lines.taught(len(starts), len(jobs))
    except KeyboardInterrupt:
        workers.kill()  # an interrupted warm start leaves nothing in the cache
        raise


def train_side_by_side(folder: ComparisonFolder, workers: Workers, lines: ArmLines) -> Iterator[int]:
    """Trains the missing runs, several at a time; yields a seed when all its runs are finished."""
    comparison = folder.comparison
    teaching = [Job(f"the warm start of seed {n}", teach_job, (comparison, n)) for n in folder.warm_start_seeds()]
    starts: dict[int, str] = {}
    if comparison.builds_model or not teaching:
        _teach_side_by_side(teaching, workers, lines, starts)
    else:
        # In a process of its own, because a large model leaves gigabytes behind.
        with Workers(1) as teacher:
            _teach_side_by_side(teaching, teacher, lines, starts)
    # A 100k-parameter model gains little from a second thread on an idle machine, and on a busy one it waits.
    threads = max(1, count_cores() // len(workers.processes)) if not comparison.builds_model else 1
    runs = []
    for arm, seed in folder.missing():
        # What suits a task is known by now, and may be a function that no process can be sent.
        row = replace(find_method(arm.method), options=Method.options)
        arguments = (comparison, folder.path, arm, seed, folder.start_of(seed, starts), threads, row)
        runs.append(Job(f"{arm.name}, seed {seed}", train_job, arguments))
    for job, kind, value in workers.do(runs):
        arm, seed = job.arguments[2:4]
        if kind == AT_WORK:
            lines.at_work(arm, seed, *value)
        else:
            lines.done(arm, seed, value)
            if seed not in folder.unfinished_seeds():
                yield seed


def carry_out(
    folder: ComparisonFolder, *, command: list[str], processes: int | None = None, check_arms: bool = False
) -> int:
    """Trains what is missing of a comparison, `processes` runs at a time or all in this one, and shows its result;
    `command` continues it. Exit code 130 when Ctrl-C stopped it early, 1 when one of the processes ended early."""
    try:
        if check_arms:
            folder.check_arms()
        folder.write_settings()
        _train(folder, processes)
        _show(folder)
    except (KeyboardInterrupt, Interrupted):
        print(f"\nStopped; what is done is kept. Continue with:\n  {shlex.join(command)}", file=sys.stderr)
        return 130
    except WorkerFailed as error:
        details = "" if SAID.search(str(error)) else error.details  # of a full disk, the sentence says all
        text = f"{details}trl-explore: error: {error}; what is done is kept. Continue with:"
        print(f"{text}\n  {shlex.join(command)}", file=sys.stderr)
        return 1
    return 0


def _train(folder: ComparisonFolder, processes: int | None) -> None:
    comparison, left = folder.comparison, len(folder.missing())
    done = folder.num_runs - left
    unit = {"tokens": "tok", "seconds": "s", "steps": "step"}[comparison.unit]
    budget = {"seconds": "wall seconds"}.get(comparison.unit, comparison.unit)
    print(
        f"{folder.num_runs} runs of {comparison.amount:,.0f} {budget} each"
        f"{f', {done} of them done' if done else ''}: "
        f"{', '.join(arm.name for arm in comparison.arms)}; seeds {', '.join(map(str, comparison.seeds))}"
    )
    if not left:
        return
    datasets.disable_progress_bars()  # there is one of ours
    if processes is not None:
        lines = ArmLines(folder, Console())
        with Workers(min(processes, left)) as workers, lines.progress:
            for _ in train_side_by_side(folder, workers, lines):
                _report_so_far(folder)
        return
    starts = folder.warm_starts()
    total, initial = int(folder.num_runs * comparison.amount), int(done * comparison.amount)
    # smoothing 0: arms differ in speed, so the mean of all tells more than the last steps
    with tqdm(total=total, initial=initial, unit=unit, unit_scale=True, smoothing=0) as bar:
        for _ in folder.train(starts, bar):
            _report_so_far(folder)


def _report_so_far(folder: ComparisonFolder) -> None:
    if folder.missing():  # the end has a report of its own
        write_report(folder.finished(), folder.comparison, folder.path)


def _show(folder: ComparisonFolder) -> None:
    console, runs, comparison = Console(), folder.finished(), folder.comparison
    files = write_report(runs, comparison, folder.path)
    console.print(rich_table(runs, comparison))
    for text in (explanation(runs, comparison), *notes(runs, comparison)):
        console.print(text, markup=False, highlight=False)
    names = ", ".join(path.name for path in files)
    console.print(f"{Path(folder.path)}: {names}", markup=False, highlight=False, soft_wrap=True)
    if not any(path.suffix == ".png" for path in files):
        console.print("no picture: matplotlib is missing (pip install 'trl-explore[plots]')", markup=False)
