"""A comparison whose runs are trained side by side, in processes, with a line for every arm."""

from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import datasets
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from trl_explore.compare.arms import Arm
from trl_explore.compare.folder import RESULT, ComparisonFolder, free_memory, teach
from trl_explore.compare.plots import metric_label
from trl_explore.compare.run import Interrupted, train_run
from trl_explore.compare.settings import Comparison
from trl_explore.runs.quiet import quiet
from trl_explore.runs.workers import AT_WORK, Job, Workers, count_cores
from trl_explore.saving.interrupt import InterruptCallback


class HangUpCallback(InterruptCallback):
    """
    Saves and stops a run when the parent has hung up, as [`~trl_explore.saving.interrupt.InterruptCallback`] does on
    Ctrl-C.

    Args:
        connection (`Connection`):
            To the parent.
    """

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self.connection = connection

    def on_train_begin(self, args, state, control, **kwargs):
        """No handler: Ctrl-C is for the parent."""

    def on_step_end(self, args, state, control, **kwargs):
        self.interrupted = self.connection.poll()  # the parent says nothing while a run is at work: it is gone
        super().on_step_end(args, state, control, **kwargs)


class Teller:
    """
    Stands where a run wants a `tqdm` bar, and tells the parent.

    Args:
        connection (`Connection`):
            To the parent.
    """

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
    """
    A job: [`~trl_explore.compare.folder.teach`].

    Args:
        connection (`Connection`):
            To the parent.
        comparison ([`~trl_explore.compare.settings.Comparison`]):
            The comparison.
        seed (`int`):
            The seed.

    Returns:
        `str`: Folder of the model.
    """
    quiet()
    torch.set_num_threads(1)
    return teach(comparison, seed, progress=False)


def train_job(
    connection: Connection, comparison: Comparison, path: Path, arm: Arm, seed: int, start: str | None, threads: int
) -> dict[str, Any]:
    """
    A job: one run, whose result is written to the comparison's folder.

    Args:
        connection (`Connection`):
            To the parent.
        comparison ([`~trl_explore.compare.settings.Comparison`]):
            The comparison.
        path (`Path`):
            Its folder.
        arm ([`~trl_explore.compare.arms.Arm`]):
            The arm.
        seed (`int`):
            The seed.
        start (`str` or `None`):
            Folder of an embedded task's model.
        threads (`int`):
            Threads of torch.

    Returns:
        `dict`: The last point of the curve.
    """
    quiet()
    datasets.disable_progress_bars()
    torch.set_num_threads(threads)
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
    A live line per arm; where the output is no terminal, a line of text for every finished run.

    Args:
        folder ([`~trl_explore.compare.folder.ComparisonFolder`]):
            The comparison and what is finished of it.
        console (`rich.console.Console`):
            Where to show it.
    """

    def __init__(self, folder: ComparisonFolder, console: Console) -> None:
        self.folder, self.console, self.comparison = folder, console, folder.comparison
        self.spent = {(arm.name, seed): 0.0 for arm in self.comparison.arms for seed in self.comparison.seeds}
        missing = {(arm.name, seed) for arm, seed in folder.missing()}
        self.finished = self.spent.keys() - missing
        self.spent |= dict.fromkeys(self.finished, self.comparison.amount)
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn())
        self.progress = Progress(
            *columns,
            TextColumn("{task.fields[state]}", markup=False),
            console=console,
            disable=not console.is_terminal,
            refresh_per_second=4,
        )
        self.lessons = self.progress.add_task("warm starts", visible=False, state="")
        total = self.comparison.amount * len(self.comparison.seeds)
        self.lines = {
            arm.name: self.progress.add_task(arm.name, total=total, state="") for arm in self.comparison.arms
        }
        for name in self.lines:
            self._draw(name, "")

    def taught(self, count: int, total: int) -> None:
        """Shows how many models have been taught an embedded task."""
        self.progress.update(self.lessons, completed=count, total=total, visible=count < total)

    def at_work(self, arm: Arm, seed: int, spent: float, reward: str) -> None:
        """Shows a step of a run."""
        self.spent[arm.name, seed] = spent
        self._draw(arm.name, f", reward {reward}")

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
                f"{point['seconds']:.0f} s of training"
            )

    def print(self, text: str) -> None:
        """Prints a line."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _draw(self, name: str, more: str) -> None:
        seeds = self.comparison.seeds
        count = sum((name, seed) in self.finished for seed in seeds)
        state = f"{count}/{len(seeds)} seeds{more}"
        self.progress.update(self.lines[name], completed=sum(self.spent[name, seed] for seed in seeds), state=state)


def train_side_by_side(folder: ComparisonFolder, workers: Workers, lines: ArmLines) -> Iterator[int]:
    """
    Trains what is missing of a comparison, several runs at a time.

    Args:
        folder ([`~trl_explore.compare.folder.ComparisonFolder`]):
            The comparison.
        workers ([`~trl_explore.runs.workers.Workers`]):
            The processes.
        lines ([`ArmLines`]):
            What shows how far they are.

    Yields:
        `int`: A seed, when all its runs are finished.

    Raises:
        WorkerFailed: When a run raised, or a process died.
    """
    comparison = folder.comparison
    lessons = [Job(f"the warm start of seed {n}", teach_job, (comparison, n)) for n in folder.seeds_to_teach()]
    starts: dict[int, str] = {}
    try:
        lines.taught(0, len(lessons))
        for job, _, value in workers.do(lessons):
            starts[job.arguments[1]] = value
            lines.taught(len(starts), len(lessons))
    except KeyboardInterrupt:
        workers.kill()  # half a lesson is not kept
        raise
    # A 100k-parameter model gains little from a second thread on an idle machine, and on a busy one it waits.
    threads = max(1, count_cores() // len(workers.processes)) if comparison.task is None else 1
    runs = [
        Job(f"{arm.name}, seed {seed}", train_job, (comparison, folder.path, arm, seed, starts.get(seed), threads))
        for arm, seed in folder.missing()
    ]
    for job, kind, value in workers.do(runs):
        arm, seed = job.arguments[2:4]
        if kind == AT_WORK:
            lines.at_work(arm, seed, *value)
        else:
            lines.done(arm, seed, value)
            if seed not in {left for _, left in folder.missing()}:
                yield seed
