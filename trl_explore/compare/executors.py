"""Execution of the runs of a comparison in this process. [`~trl_explore.compare.workers`] uses worker processes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tqdm.auto import tqdm

from trl_explore.compare.folder import RESULT, ComparisonFolder, free_memory, teach
from trl_explore.compare.run import Run, train_run
from trl_explore.compare.settings import Arm
from trl_explore.errors import UsageError
from trl_explore.rewards.checks import RewardError
from trl_explore.saving.interrupt import InterruptCallback

UNITS = {"tokens": "tok", "seconds": "s", "steps": "step"}  # short names of the units of budgets


@dataclass(frozen=True)
class DueRun:
    """A run of a comparison that is still to be trained or continued."""

    arm: Arm
    seed: int
    start: str | None  # folder of the warm start; None if the run begins without a warm start


class Executor(Protocol):
    """Executes the warm starts and the runs of a comparison, and shows their progress."""

    def teach(self, seeds: Sequence[int]) -> dict[int, str]:
        """Train the warm starts of these seeds. Return the folders of the models, by seed."""
        ...

    def train(self, runs: Sequence[DueRun]) -> Iterator[DueRun]:
        """Train runs, and yield each run when its result is in the comparison's folder."""
        ...


def complete_run(
    folder: ComparisonFolder, run: DueRun, *, bar: Any, interrupt: InterruptCallback | None = None
) -> Run:
    """
    Train a run, or resume it from its newest checkpoint, and write its result into the comparison's folder.

    Args:
        folder ([`~trl_explore.compare.folder.ComparisonFolder`]):
            Folder of the comparison.
        run ([`DueRun`]):
            The run.
        bar (`tqdm`):
            Progress bar that shows how much of the budget is spent.
        interrupt ([`~trl_explore.saving.interrupt.InterruptCallback`], *optional*):
            Decides when to save and stop early. By default, Ctrl-C does.

    Raises:
        Interrupted: If `interrupt` stopped the run. The checkpoint has been saved.
        UsageError: If the data or a reward function is wrong. The message begins with the arm and the seed.
    """
    path = folder.of_run(run.arm, run.seed)
    try:
        result = train_run(
            folder.comparison, run.arm, seed=run.seed, folder=path, start=run.start, bar=bar, interrupt=interrupt
        )
    except (UsageError, RewardError) as error:
        raise UsageError(f"{run.arm.name}, seed {run.seed}: {error}") from error
    result.save(path / RESULT)
    free_memory()
    return result


class SequentialExecutor:
    """
    Executes one run after the other in this process, with one progress bar over the budgets of all runs.

    Args:
        folder ([`~trl_explore.compare.folder.ComparisonFolder`]):
            Folder of the comparison.
    """

    def __init__(self, folder: ComparisonFolder) -> None:
        self.folder, self.comparison = folder, folder.comparison

    def teach(self, seeds: Sequence[int]) -> dict[int, str]:
        """Train the warm starts of these seeds. Return the folders of the models, by seed."""
        return {seed: teach(self.comparison, seed) for seed in seeds}

    def train(self, runs: Sequence[DueRun]) -> Iterator[DueRun]:
        """Train runs, and yield each run when its result is in the comparison's folder."""
        amount, num_runs = self.comparison.amount, self.folder.num_runs
        num_done = num_runs - len(runs)
        total, initial = int(num_runs * amount), int(num_done * amount)
        unit = UNITS[self.comparison.unit]
        # The arms differ in speed, so estimate the remaining time from the mean speed (smoothing=0).
        with tqdm(total=total, initial=initial, unit=unit, unit_scale=True, smoothing=0) as bar:
            for number, run in enumerate(runs, start=num_done + 1):
                bar.set_description(f"{number}/{num_runs} {run.arm.name}, seed {run.seed}")
                complete_run(self.folder, run, bar=bar)
                # A run that ends at `max_steps` spends less than its budget. Begin the next run at its own position.
                bar.update(int(number * amount) - bar.n)
                yield run
