"""What training changed at many samples: pass@k at large k before and after it, and problems newly solved or lost."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scipy.stats import binomtest

from trl_explore.compare.costs import interval
from trl_explore.evaluation.metrics import pass_at_k

LEVEL = 0.05


@dataclass(frozen=True)
class Ends:
    """
    What one arm's training changed, over seeds.

    Args:
        arm (`str`):
            The arm, or how all of a seed start.
        pass_at (`dict[int, tuple[float, float | None]]`):
            Mean pass@k and half its 95 % interval, by k.
        solved (`tuple[float, float | None]`, *optional*):
            Problems newly solved per seed, and half the interval. None for the start.
        lost (`tuple[float, float | None]`, *optional*):
            Problems newly lost.
    """

    arm: str
    pass_at: dict[int, tuple[float, float | None]]
    solved: tuple[float, float | None] | None = None
    lost: tuple[float, float | None] | None = None


def powers_up_to(most: int) -> list[int]:
    """1, 4, 16 and so on, and `most` itself."""
    values = [4**power for power in range(most.bit_length()) if 4**power < most]
    return [*values, most]


def newly(before: Sequence[int], after: Sequence[int]) -> tuple[int, int]:
    """
    Problems newly solved, and newly lost.

    Args:
        before (`Sequence[int]`):
            Successes per problem before training.
        after (`Sequence[int]`):
            Successes of as many samples after it.

    Returns:
        `tuple[int, int]`: Problems without a success on one side and clearly some on the other: so many that a fair
        coin would put all of them there in less than 5 % (binomial test), which are 5.
    """
    solved = sum(not was and appeared(now) for was, now in zip(before, after, strict=True))
    lost = sum(not now and appeared(was) for was, now in zip(before, after, strict=True))
    return solved, lost


def appeared(count: int) -> bool:
    """Whether so many successes against none are more than chance."""
    return count > 0 and float(binomtest(count, count, alternative="greater").pvalue) < LEVEL


def summarize_ends(runs: Sequence[Mapping[str, Any]], arms: Sequence[str], num_samples: int) -> list[Ends]:
    """
    What training changed, per arm.

    Args:
        runs (`Sequence[Mapping]`):
            Runs of the same seeds; the first arm's have `end_correct` at their first point, all at their last.
        arms (`Sequence[str]`):
            Their arms.
        num_samples (`int`):
            Samples per problem.

    Returns:
        `list[Ends]`: The start, and one entry per arm.
    """
    by_run = {(run["arm"], run["seed"]): run["points"] for run in runs}
    seeds = sorted({run["seed"] for run in runs})
    starts = [by_run[arms[0], seed][0]["end_correct"] for seed in seeds]

    def at_k(counts: Sequence[Sequence[int]]) -> dict[int, tuple[float, float | None]]:
        values = {
            k: [statistics.fmean(pass_at_k(num_samples, count, k) for count in of_seed) for of_seed in counts]
            for k in powers_up_to(num_samples)
        }
        return {k: interval(of_seeds) for k, of_seeds in values.items()}

    found = [Ends("before training", at_k(starts))]
    for arm in arms:
        ends = [by_run[arm, seed][-1]["end_correct"] for seed in seeds]
        solved, lost = zip(*map(newly, starts, ends), strict=True)
        found.append(Ends(arm, at_k(ends), interval(solved), interval(lost)))
    return found


def ends_table(found: Sequence[Ends]) -> list[str]:
    """The same as lines of Markdown."""

    def shown(pair: tuple[float, float | None] | None, scale: int) -> str:
        if pair is None:
            return ""
        mean, half = pair
        return f"{scale * mean:.1f}" if half is None else f"{scale * mean:.1f} ± {scale * half:.1f}"

    ks = list(found[0].pass_at)
    titles = ["arm", *(f"pass@{k} (%)" for k in ks), "newly solved", "newly lost"]
    lines = [f"| {' | '.join(titles)} |", f"| --- |{' ---: |' * (len(titles) - 1)}"]
    for entry in found:
        cells = [*(shown(entry.pass_at[k], 100) for k in ks), shown(entry.solved, 1), shown(entry.lost, 1)]
        lines.append(f"| {entry.arm} | {' | '.join(cells)} |")
    return lines
