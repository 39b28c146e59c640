"""Check the arms of a comparison, let an executor train the missing runs, and show the results."""

import shlex
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import datasets
from rich.console import Console

from trl_explore.compare.executors import DueRun, Executor, SequentialExecutor
from trl_explore.compare.folder import ComparisonFolder, free_memory
from trl_explore.compare.inputs import input_fingerprints
from trl_explore.compare.report import explanation, notes, rich_table, write_report
from trl_explore.compare.run import Interrupted, build_run
from trl_explore.compare.workers import ArmLines, WorkerExecutor
from trl_explore.errors import UsageError
from trl_explore.machine.threads import limit_threads
from trl_explore.runs.workers import WorkerFailed, Workers
from trl_explore.saving.full_disk import DISK_FULL_TEXT
from trl_explore.tasks.tiny_model import build_model
from trl_explore.visible_text import visible_text


def run_comparison(
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
            Number of worker processes. Each trains one run at a time. By default, this process trains all runs, one
            after the other.
        check_arms (`bool`, *optional*, defaults to `False`):
            If `True`, construct every arm's trainer before the first run starts.

    Returns:
        `int`: Exit code: 0, 130 if Ctrl-C stopped the comparison, 2 if a run cannot go on because of its data or its
        reward functions, or 1 if a worker process failed.
    """
    try:
        if check_arms:
            check_trainers(folder)
        if folder.missing():
            folder.check_fingerprints(input_fingerprints(folder.comparison))
        folder.write_settings()
        _announce(folder)
        if folder.missing():
            datasets.disable_progress_bars()  # they would disturb the progress bar of the comparison
            with _executor(folder, processes) as executor:
                problem = _train(folder, executor)
            if problem is not None:
                print(f"trl-explore: error: {problem}; {_continuation(command)}", file=sys.stderr)
                return 2
        _show(folder)
    except (KeyboardInterrupt, Interrupted):
        print(f"\nStopped; {_continuation(command)}", file=sys.stderr)
        return 130
    except WorkerFailed as error:
        details = error.details
        if DISK_FULL_TEXT.search(str(error)):
            details = ""  # the message about a full disk needs no traceback
        print(f"{details}trl-explore: error: {error}; {_continuation(command)}", file=sys.stderr)
        return 1
    return 0


def _train(folder: ComparisonFolder, executor: Executor) -> str | None:
    """Call [`train_missing`]. Return the problem of a run that cannot go on, or None."""
    try:
        train_missing(folder, executor)
    except UsageError as error:
        return visible_text(" ".join(str(error).split())).rstrip(".")
    return None


def _continuation(command: list[str]) -> str:
    """Return a text that says how to continue a comparison that stopped."""
    return f"what is done is kept. Continue with:\n  {shlex.join(command)}"


def train_missing(folder: ComparisonFolder, executor: Executor) -> None:
    """
    Train the missing warm starts and runs. When all runs of a seed are finished, write a report of the finished seeds.

    Args:
        folder ([`~trl_explore.compare.folder.ComparisonFolder`]):
            Folder of the comparison.
        executor ([`~trl_explore.compare.executors.Executor`]):
            Trains in this process or in worker processes.
    """
    starts = executor.teach(folder.warm_start_seeds())
    runs = [DueRun(arm, seed, folder.start_of(seed, starts)) for arm, seed in folder.missing()]
    for run in executor.train(runs):
        unfinished = folder.unfinished_seeds()
        if unfinished and run.seed not in unfinished:  # `run_comparison` writes the report of the complete comparison
            write_report(folder.finished(), folder.comparison, folder.path)


def check_trainers(folder: ComparisonFolder) -> None:
    """
    Construct the trainer of every arm with missing runs, to find errors in any arm before the first run starts.

    For a tiny model on a CPU, this also limits PyTorch to one thread for the rest of the command.

    Raises:
        UsageError: If a trainer refuses its arm's configuration.
    """
    # The runs do not reuse these trainers. Together they could exceed the memory, and they cannot be sent to worker
    # processes. Constructing a trainer also seeds the random generators. So a run is reproducible only if its trainer
    # is constructed directly before the run.
    comparison = folder.comparison
    with tempfile.TemporaryDirectory() as temporary:
        start = None
        if comparison.builds_model:
            # An untrained model is enough for this check; a warm start takes minutes.
            build_model(seed=0, **comparison.model_size).save_pretrained(temporary)
            start = temporary
        arms = {arm.name: arm for arm, _ in folder.missing()}
        for name, arm in arms.items():
            try:
                trainer = build_run(comparison, arm, seed=0, folder=Path(temporary), start=start)[0]
            except (UsageError, ValueError, NotImplementedError, ImportError) as error:
                # Trainers raise these with a text that explains the problem, so no traceback is needed.
                raise UsageError(f"arm {name}: {error}") from error
            limit_threads(trainer.model, trainer.accelerator.device)
            del trainer
            free_memory()


@contextmanager
def _executor(folder: ComparisonFolder, processes: int | None) -> Iterator[Executor]:
    """Yield the executor of the missing runs. It uses this process if `processes` is None, else worker processes."""
    if processes is None:
        yield SequentialExecutor(folder)
        return
    lines = ArmLines(folder, Console())  # the progress, with a line per arm
    with Workers(min(processes, len(folder.missing()))) as workers, lines.progress:
        yield WorkerExecutor(folder, workers, lines)


def _announce(folder: ComparisonFolder) -> None:
    """Print how many runs the comparison has, their budget, and how many are finished."""
    comparison, num_done = folder.comparison, folder.num_runs - len(folder.missing())
    budget = "wall seconds" if comparison.unit == "seconds" else comparison.unit
    already = f", {num_done} of them done" if num_done else ""
    print(
        f"{folder.num_runs} runs of {comparison.amount:,.0f} {budget} each{already}: "
        f"{', '.join(arm.name for arm in comparison.arms)}; seeds {', '.join(map(str, comparison.seeds))}"
    )


def _show(folder: ComparisonFolder) -> None:
    """Print and write the results of the complete comparison."""
    console, runs, comparison = Console(), folder.finished(), folder.comparison
    files = write_report(runs, comparison, folder.path)
    console.print(rich_table(runs, comparison))
    for text in (explanation(runs, comparison), *notes(runs, comparison)):
        console.print(text, markup=False, highlight=False)
    names = ", ".join(path.name for path in files)
    console.print(f"{Path(folder.path)}: {names}", markup=False, highlight=False, soft_wrap=True)
    if not any(path.suffix == ".png" for path in files):
        console.print("no picture: matplotlib is missing (pip install 'trl-explore[plots]')", markup=False)
