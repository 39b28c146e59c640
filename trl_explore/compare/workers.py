"""Execution of a comparison: one run after the other, or several at a time in worker processes."""

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

SECONDS_BETWEEN_LINES = 60  # per run, if the output is not a terminal


class HangUpCallback(InterruptCallback):
    """
    Save and stop a run when the parent process has closed its connection.

    Args:
        connection (`Connection`):
            Connection to the parent process.
    """

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self.connection = connection

    def on_train_begin(self, args, state, control, **kwargs):
        """Install no signal handler, because the parent process handles Ctrl-C."""

    def on_step_end(self, args, state, control, **kwargs):
        # The parent sends nothing during a run, so the connection is readable only if the parent has closed it.
        self.interrupted = self.connection.poll()
        super().on_step_end(args, state, control, **kwargs)


class Teller:
    """
    Stand-in for a `tqdm` bar that sends a run's progress to the parent process.

    Args:
        connection (`Connection`):
            Connection to the parent process.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.n = self.initial = 0
        self.reward = ""

    def set_postfix(self, *, reward: str, **_: object) -> None:
        """Store the reward of the current step, for the next update."""
        self.reward = reward

    def update(self, more: int) -> None:
        """Send the spent part of the run's budget, and the reward."""
        self.n += more
        with suppress(ConnectionError):  # the parent is gone, so `HangUpCallback` saves and stops the run
            self.connection.send((AT_WORK, (self.n, self.reward)))


def teach_job(connection: Connection, comparison: Comparison, seed: int) -> str:
    """Call [`~trl_explore.compare.folder.teach`] in a worker process."""
    quiet()
    if comparison.builds_model:  # there is a warm start per seed, and several are trained at the same time
        torch.set_num_threads(1)
        return teach(comparison, seed, progress=False)
    datasets.disable_progress_bars()
    return teach(comparison, seed, progress=True)  # one warm start for all seeds, which takes minutes


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
    """
    Train one run in a worker process, and write its result into the comparison's folder.

    Args:
        connection (`Connection`):
            Connection to the parent process.
        comparison ([`~trl_explore.compare.settings.Comparison`]):
            The comparison.
        path (`Path`):
            The comparison's folder.
        arm ([`~trl_explore.compare.settings.Arm`]):
            The arm.
        seed (`int`):
            Seed of the run.
        start (`str`, *optional*):
            Folder of the warm start. None if the run begins without a warm start.
        threads (`int`):
            Number of threads that PyTorch uses.
        row ([`~trl_explore.methods.Method`]):
            The arm's method, which may have been registered in the parent process only.

    Returns:
        `dict[str, Any]`: Last point of the run's curve.
    """
    quiet()
    datasets.disable_progress_bars()
    torch.set_num_threads(threads)
    METHODS.setdefault(row.name, row)  # a method that the parent registered at run time is missing here
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
    """
    Progress of a comparison: a live line per arm, if the output is a terminal.

    If it is not, each finished run prints a line of text, and a long run prints one per minute at most.

    Args:
        folder ([`~trl_explore.compare.folder.ComparisonFolder`]):
            Folder of the comparison.
        console (`rich.console.Console`):
            The output.
    """

    def __init__(self, folder: ComparisonFolder, console: Console) -> None:
        self.folder, self.console, self.comparison = folder, console, folder.comparison
        self.spent: dict[tuple[str, int], float] = {}
        for arm in self.comparison.arms:
            self.spent |= {(arm.name, seed): 0.0 for seed in self.comparison.seeds}
        missing = {(arm.name, seed) for arm, seed in folder.missing()}
        self.finished = self.spent.keys() - missing
        self.spent |= dict.fromkeys(self.finished, self.comparison.amount)
        self.printed_at = dict.fromkeys(missing, time.monotonic())  # time of a run's last line of text
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
        """Show how many warm starts are finished."""
        self.progress.update(self.warm_starts, completed=count, total=total, visible=count < total)
        if total and not self.console.is_terminal:
            self.print(f"{count}/{total} warm starts")

    def at_work(self, arm: Arm, seed: int, spent: float, reward: str) -> None:
        """Show the progress of a run: the spent part of its budget, and the reward of its newest step."""
        self.spent[arm.name, seed] = spent
        self._draw(arm.name, f", reward {reward}")
        now = time.monotonic()
        if not self.console.is_terminal and now - self.printed_at[arm.name, seed] >= SECONDS_BETWEEN_LINES:
            self.printed_at[arm.name, seed] = now
            share = 100 * spent / self.comparison.amount
            self.print(f"{arm.name}, seed {seed}: {share:.0f} % of its budget, reward {reward}")

    def done(self, arm: Arm, seed: int, point: dict[str, Any]) -> None:
        """Show that a run is finished; `point` is the last point of its curve."""
        self.finished.add((arm.name, seed))
        self.spent[arm.name, seed] = self.comparison.amount
        self._draw(arm.name, "")
        if not self.console.is_terminal:
            metric = f"eval/{self.comparison.metrics[0]}"
            label, scale = metric_label(metric)
            shown = f"{point[metric]:.3f}"
            if scale == 100:
                shown = f"{100 * point[metric]:.1f} %"
            self.print(
                f"{len(self.finished)}/{self.folder.num_runs} {arm.name}, seed {seed}: {label} {shown}, "
                f"{point['seconds']:.0f} wall seconds of training"
            )

    def print(self, text: str) -> None:
        """Print a line of text."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _draw(self, name: str, more: str) -> None:
        seeds = self.comparison.seeds
        count = sum((name, seed) in self.finished for seed in seeds)
        state = f"{count}/{len(seeds)} seeds{more}"
        self.progress.update(self.lines[name], completed=sum(self.spent[name, seed] for seed in seeds), state=state)


def _teach_side_by_side(jobs: list[Job], workers: Workers, lines: ArmLines, starts: dict[int, str]) -> None:
    """Train the warm starts, and put the models' folders into `starts`, by seed."""
    try:
        lines.taught(0, len(jobs))
        for job, _, value in workers.do(jobs):
            starts[job.arguments[1]] = value
            lines.taught(len(starts), len(jobs))
    except KeyboardInterrupt:
        workers.kill()  # safe, because a warm start is in the cache only when it is complete
        raise


def train_side_by_side(folder: ComparisonFolder, workers: Workers, lines: ArmLines) -> Iterator[int]:
    """
    Train the missing runs in worker processes, and yield each seed when all its runs are finished.

    Args:
        folder ([`~trl_explore.compare.folder.ComparisonFolder`]):
            Folder of the comparison.
        workers ([`~trl_explore.runs.workers.Workers`]):
            Worker processes.
        lines ([`~trl_explore.compare.workers.ArmLines`]):
            Shows the progress.
    """
    comparison = folder.comparison
    teaching = [Job(f"the warm start of seed {n}", teach_job, (comparison, n)) for n in folder.warm_start_seeds()]
    starts: dict[int, str] = {}
    if comparison.builds_model or not teaching:
        _teach_side_by_side(teaching, workers, lines, starts)
    else:
        # This process ends after the warm start, because a large model leaves gigabytes allocated.
        with Workers(1) as teacher:
            _teach_side_by_side(teaching, teacher, lines, starts)
    threads = 1  # a second thread makes a tiny model hardly faster, and slower if the machine is busy
    if not comparison.builds_model:
        threads = max(1, count_cores() // len(workers.processes))
    runs = []
    for arm, seed in folder.missing():
        # `options` may be a function that pickle refuses. The arm's options are filled in, so a run does not need it.
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
    """
    Train the missing runs of a comparison, and show and write its results.

    Args:
        folder ([`~trl_explore.compare.folder.ComparisonFolder`]):
            Folder of the comparison.
        command (`list[str]`):
            Command that continues the comparison, shown if it stops early.
        processes (`int`, *optional*):
            Number of worker processes, which train a run each at the same time. By default all runs are trained in
            this process, one after the other.
        check_arms (`bool`, *optional*, defaults to `False`):
            If `True`, construct every arm's trainer before the first run starts.

    Returns:
        `int`: Exit code: 0, 130 if Ctrl-C stopped the comparison, or 1 if a worker process failed.
    """
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
        details = error.details
        if SAID.search(str(error)):
            details = ""  # the message about a full disk needs no traceback
        text = f"{details}trl-explore: error: {error}; what is done is kept. Continue with:"
        print(f"{text}\n  {shlex.join(command)}", file=sys.stderr)
        return 1
    return 0


def _train(folder: ComparisonFolder, processes: int | None) -> None:
    comparison, left = folder.comparison, len(folder.missing())
    done = folder.num_runs - left
    unit = {"tokens": "tok", "seconds": "s", "steps": "step"}[comparison.unit]
    budget = {"seconds": "wall seconds"}.get(comparison.unit, comparison.unit)
    already = f", {done} of them done" if done else ""
    print(
        f"{folder.num_runs} runs of {comparison.amount:,.0f} {budget} each{already}: "
        f"{', '.join(arm.name for arm in comparison.arms)}; seeds {', '.join(map(str, comparison.seeds))}"
    )
    if not left:
        return
    datasets.disable_progress_bars()  # they would disturb the progress bar of the comparison
    if processes is not None:
        lines = ArmLines(folder, Console())
        with Workers(min(processes, left)) as workers, lines.progress:
            for _ in train_side_by_side(folder, workers, lines):
                _report_so_far(folder)
        return
    starts = folder.warm_starts()
    total, initial = int(folder.num_runs * comparison.amount), int(done * comparison.amount)
    # With smoothing=0, tqdm estimates the remaining time from the mean speed; the arms differ in speed.
    with tqdm(total=total, initial=initial, unit=unit, unit_scale=True, smoothing=0) as bar:
        for _ in folder.train(starts, bar):
            _report_so_far(folder)


def _report_so_far(folder: ComparisonFolder) -> None:
    if folder.missing():  # `_show` writes the report of the complete comparison
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
