"""Results that need many samples per problem: pass@k at large k, and the numbers of problems newly solved and lost."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scipy.stats import binomtest

from trl_explore.compare.costs import interval
from trl_explore.evaluation.metrics import pass_at_k

LEVEL = 0.05  # level of significance


@dataclass(frozen=True)
class Ends:
    """
    Results of one arm at the end of training, or of the common model before training, as means over seeds.

    Args:
        arm (`str`):
            Name of the arm, or `"before training"`.
        pass_at (`dict[int, tuple[float, float | None]]`):
            By k, mean pass@k (0 to 1) and half the length of its 95 % interval (None with fewer than three seeds).
        solved (`tuple[float, float | None]`, *optional*):
            Mean number of problems newly solved, and half the length of its interval. None before training.
        lost (`tuple[float, float | None]`, *optional*):
            Mean number of problems newly lost, and half the length of its interval. None before training.
    """

    arm: str
    pass_at: dict[int, tuple[float, float | None]]
    solved: tuple[float, float | None] | None = None
    lost: tuple[float, float | None] | None = None


def powers_up_to(most: int) -> list[int]:
    """Return the powers of 4 below `most` (1, 4, 16, ...), followed by `most`."""
    values = [4**power for power in range(most.bit_length()) if 4**power < most]
    return [*values, most]


def newly(before: Sequence[int], after: Sequence[int]) -> tuple[int, int]:
    """
    Count the problems that training newly solved, and the problems that it newly lost.

    A problem is newly solved if it had no success before training and at least 5 after it. It is newly lost if it had
    at least 5 successes before training and none after it. With 5 successes against none, a binomial test is
    significant at 5 %: a fair coin shows heads five times in a row in 1 of 32 cases.

    Args:
        before (`Sequence[int]`):
            Successes per problem before training.
        after (`Sequence[int]`):
            Successes per problem after training, out of the same number of samples.

    Returns:
        `tuple[int, int]`: Number of problems newly solved, and number of problems newly lost.
    """
    solved = lost = 0
    for was, now in zip(before, after, strict=True):
        if was == 0 and appeared(now):
            solved += 1
        if now == 0 and appeared(was):
            lost += 1
    return solved, lost


def appeared(count: int) -> bool:
    """Return whether the difference between no success and `count` successes is significant at `LEVEL`."""
    return count > 0 and float(binomtest(count, count, alternative="greater").pvalue) < LEVEL


def successes_at_start(runs: Sequence[Mapping[str, Any]]) -> dict[int, Sequence[int]]:
    """
    Return the successes per problem before training, by seed.

    All arms of a seed start from the same model, so only one arm is measured before training: the arm that was first
    in the list when its run began. Its first point has `end_correct`. Seeds without such a run are left out. This
    happens if the user changes the order of the arms after runs of other arms have begun.
    """
    starts: dict[int, Sequence[int]] = {}
    for run in runs:
        first_point = run["points"][0]
        if "end_correct" in first_point:
            starts.setdefault(run["seed"], first_point["end_correct"])
    return starts


def summarize_ends(runs: Sequence[Mapping[str, Any]], arms: Sequence[str], num_samples: int) -> list[Ends]:
    """
    Average pass@k and the problems newly solved and lost over the seeds of each arm.

    Args:
        runs (`Sequence[Mapping]`):
            Runs; every arm has the same seeds. The last point of each run has `end_correct`, the number of successes
            per problem. Seeds that [`successes_at_start`] leaves out do not count.
        arms (`Sequence[str]`):
            Names of the arms.
        num_samples (`int`):
            Samples per problem.

    Returns:
        `list[Ends]`: An entry for the model before training, then one entry per arm. Empty if no seed counts.
    """
    by_run = {(run["arm"], run["seed"]): run["points"] for run in runs}
    starts_by_seed = successes_at_start(runs)
    seeds = sorted(starts_by_seed)
    if not seeds:
        return []

    def at_k(counts: Sequence[Sequence[int]]) -> dict[int, tuple[float, float | None]]:
        pass_at = {}
        for k in powers_up_to(num_samples):
            per_seed = []
            for successes in counts:
                per_seed.append(statistics.fmean(pass_at_k(num_samples, count, k) for count in successes))
            pass_at[k] = interval(per_seed)
        return pass_at

    starts = [starts_by_seed[seed] for seed in seeds]
    entries = [Ends("before training", at_k(starts))]
    for arm in arms:
        ends = [by_run[arm, seed][-1]["end_correct"] for seed in seeds]
        changes = [newly(before, after) for before, after in zip(starts, ends, strict=True)]
        solved, lost = [change[0] for change in changes], [change[1] for change in changes]
        entries.append(Ends(arm, at_k(ends), interval(solved), interval(lost)))
    return entries


def ends_table(found: Sequence[Ends]) -> list[str]:
    """Return the entries as lines of a Markdown table."""

    def shown(pair: tuple[float, float | None] | None, scale: int) -> str:
        if pair is None:
            return ""
        mean, half = pair
        if half is None:
            return f"{scale * mean:.1f}"
        return f"{scale * mean:.1f} ± {scale * half:.1f}"

    ks = list(found[0].pass_at)
    titles = ["arm", *(f"pass@{k} (%)" for k in ks), "newly solved", "newly lost"]
    lines = [f"| {' | '.join(titles)} |", f"| --- |{' ---: |' * (len(titles) - 1)}"]
    for entry in found:
        cells = [*(shown(entry.pass_at[k], 100) for k in ks), shown(entry.solved, 1), shown(entry.lost, 1)]
        lines.append(f"| {entry.arm} | {' | '.join(cells)} |")
    return lines
