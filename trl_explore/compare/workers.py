"""Execution of the runs of a comparison in worker processes, several at a time."""

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import datasets
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from trl_explore.compare.executors import DueRun, complete_run
from trl_explore.compare.folder import ComparisonFolder, teach
from trl_explore.compare.plots import metric_label
from trl_explore.compare.run import Interrupted
from trl_explore.compare.settings import Arm, Comparison
from trl_explore.methods import METHODS, Method
from trl_explore.runs.methods import find_method
from trl_explore.runs.quiet import quiet
from trl_explore.runs.workers import AT_WORK, Job, Workers, count_cores
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


class ProgressSender:
    """
    Stand-in for a `tqdm` bar that sends a run's progress to the parent process.

    Args:
        connection (`Connection`):
            Connection to the parent process.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.n = self.initial = 0  # `Curve` reads and sets these attributes of a `tqdm` bar
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
    """Call [`~trl_explore.compare.folder.teach`] in a worker process. Every job gets `connection`; this one sends
    nothing."""
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
    run: DueRun,
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
        run ([`~trl_explore.compare.executors.DueRun`]):
            The run.
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
    folder = ComparisonFolder(comparison, path)
    try:
        result = complete_run(folder, run, bar=ProgressSender(connection), interrupt=HangUpCallback(connection))
    except Interrupted:
        raise KeyboardInterrupt from None  # a worker ends quietly on this, and the parent reports the interruption
    return result.points[-1]


class ArmLines:
    """
    Progress of a comparison: a live line per arm, if the output is a terminal.

    Otherwise, each finished run prints a line of text, and a long run prints at most one line per minute.

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
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
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


class WorkerExecutor:
    """
    Executes several runs at a time in worker processes.

    Args:
        folder ([`~trl_explore.compare.folder.ComparisonFolder`]):
            Folder of the comparison.
        workers ([`~trl_explore.runs.workers.Workers`]):
            Worker processes.
        lines ([`~trl_explore.compare.workers.ArmLines`]):
            Shows the progress.
    """

    def __init__(self, folder: ComparisonFolder, workers: Workers, lines: ArmLines) -> None:
        self.folder, self.comparison, self.workers, self.lines = folder, folder.comparison, workers, lines

    def teach(self, seeds: Sequence[int]) -> dict[int, str]:
        """Train the warm starts of these seeds. Return the folders of the models, by seed."""
        jobs = [Job(f"the warm start of seed {seed}", teach_job, (self.comparison, seed)) for seed in seeds]
        if self.comparison.builds_model or not jobs:
            return self._teach(jobs, self.workers)
        # This process ends after the warm start, because a large model leaves gigabytes allocated.
        with Workers(1) as teacher:
            return self._teach(jobs, teacher)

    def _teach(self, jobs: Sequence[Job], workers: Workers) -> dict[int, str]:
        starts: dict[int, str] = {}
        try:
            self.lines.taught(0, len(jobs))
            for job, _, value in workers.do(jobs):
                starts[job.arguments[1]] = value
                self.lines.taught(len(starts), len(jobs))
        except KeyboardInterrupt:
            workers.kill()  # safe, because a warm start is in the cache only when it is complete
            raise
        return starts

    def train(self, runs: Sequence[DueRun]) -> Iterator[DueRun]:
        """Train runs, and yield each run when its result is in the comparison's folder."""
        threads = 1  # a second thread makes a tiny model hardly faster, and slower if the machine is busy
        if not self.comparison.builds_model:
            threads = max(1, count_cores() // len(self.workers.processes))
        jobs = []
        for run in runs:
            # A row's functions may be lambdas, which pickle refuses. A run does not need them, because the options
            # that suit the task are already in the arm.
            row = replace(find_method(run.arm.method), options=Method.options, remarks=Method.remarks)
            arguments = (self.comparison, self.folder.path, run, threads, row)
            jobs.append(Job(f"{run.arm.name}, seed {run.seed}", train_job, arguments))
        for job, kind, value in self.workers.do(jobs):
            run = job.arguments[2]
            if kind == AT_WORK:
                self.lines.at_work(run.arm, run.seed, *value)
            else:
                self.lines.done(run.arm, run.seed, value)
                yield run
