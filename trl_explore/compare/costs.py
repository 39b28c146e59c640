"""Arms of a comparison read at the same cost: by generated tokens, by seconds or by optimiser steps."""

import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from scipy.special import stdtrit

Points = Sequence[Mapping[str, float]]
FEWEST_SEEDS = 3  # of an interval: with two seeds it is ± 12.7 standard errors, which says nothing


def t_95(count: int) -> float:
    """Two-sided 95 % quantile of Student's t for a number of values, to the four digits that tables print."""
    return float(f"{stdtrit(count - 1, 0.975):.4g}")


def value_at(points: Points, cost: str, reading: float, metric: str) -> float | None:
    """A learning curve read linearly between its two nearest points; `None` before the first and after the last."""
    for before, after in zip(points, points[1:], strict=False):
        if before[cost] <= reading <= after[cost]:
            share = (reading - before[cost]) / max(after[cost] - before[cost], 1e-9)
            return before[metric] + share * (after[metric] - before[metric])
    return None


def mean_along(points: Points, cost: str, reading: float, metric: str) -> float:
    """Mean height of a learning curve, with straight lines between its points, up to a cost that is positive and not
    beyond its end: of two that end alike, the one that rose earlier has more."""
    end = value_at(points, cost, reading, metric)
    if end is None:
        raise ValueError(f"`reading` is {reading}, but the curve is known up to {points[-1][cost]} {cost}.")
    known = [(point[cost], point[metric]) for point in points if point[cost] < reading] + [(reading, end)]
    parts = [(after - before) * (low + high) / 2 for (before, low), (after, high) in pairwise(known)]
    return sum(parts) / (reading - known[0][0])


def other_starts(runs: Sequence[Mapping[str, Any]], base: str, metrics: Sequence[str]) -> dict[str, list[int]]:
    """
    Arms that did not begin where the first arm did: their difference to it is one of models, too, not of training
    alone.

    Args:
        runs (`Sequence[Mapping]`):
            Runs with `arm`, `seed` and `points`, of which the first is before training.
        base (`str`):
            The first arm.
        metrics (`Sequence[str]`):
            What the first points tell of a model.

    Returns:
        `dict[str, list[int]]`: Seeds at which an arm's first point differs from the first arm's, by arm. Arms that
        began alike everywhere are left out.
    """
    starts = {(run["arm"], run["seed"]): [run["points"][0].get(metric) for metric in metrics] for run in runs}
    found: dict[str, list[int]] = {}
    for (arm, seed), start in starts.items():
        if start != starts.get((base, seed), start):
            found.setdefault(arm, []).append(seed)
    return found


def interval(values: Sequence[float], *, fewest: int = FEWEST_SEEDS) -> tuple[float, float | None]:
    """Return the mean over seeds, and half the length of its 95 % t-interval: None for fewer than `fewest` seeds."""
    mean = statistics.mean(values)
    if len(values) < fewest:
        return mean, None
    return mean, t_95(len(values)) * statistics.stdev(values) / len(values) ** 0.5


def mean_with_interval(values: Sequence[float]) -> str:
    """Return mean and 95 % t-interval of shares in percent, such as `" 48.4 ±  5.8"`; fewer than three values have
    no interval."""
    mean, half = interval(values)
    return f"{100 * mean:5.1f}" if half is None else f"{100 * mean:5.1f} ± {100 * half:4.1f}"


def mean_curve(
    curves: Sequence[Points], cost: str, metric: str, *, t_interval: bool = False
) -> list[tuple[float, float, float, float]]:
    """The mean of several seeds' curves, wherever one was measured and all can be read: cost, mean, and lowest and
    highest, or with `t_interval` the ends of the mean's 95 % interval, which needs three curves."""
    mean = []
    for reading in sorted({point[cost] for points in curves for point in points}):
        values = [value_at(points, cost, reading, metric) for points in curves]
        known = [value for value in values if value is not None]
        if len(known) == len(curves):
            middle, half = interval(known)
            ends = (middle - half, middle + half) if t_interval and half is not None else (min(known), max(known))
            mean.append((reading, middle, *ends))
    return mean


def common_reading(runs: Sequence[Mapping[str, Any]], cost: str) -> float:
    """Where the run that got least far stopped: the last cost at which all can be read."""
    return min(run["points"][-1][cost] for run in runs)


def paired_values(
    runs: Sequence[Mapping[str, Any]], arm: str, base: str, *, cost: str, reading: float, metric: str
) -> list[tuple[float, float]]:
    """A metric of `arm` and `base` at the same cost, for the seeds on which both can be read."""
    points = {(run["arm"], run["seed"]): run["points"] for run in runs}
    seeds = sorted({run["seed"] for run in runs})
    pairs = [[value_at(points[name, seed], cost, reading, metric) for name in (arm, base)] for seed in seeds]
    return [(ours, theirs) for ours, theirs in pairs if ours is not None and theirs is not None]


def comparison_table(runs: Sequence[Mapping[str, Any]], cost: str, metrics: Mapping[str, str]) -> str:
    """All arms where the one that got least far stopped, and their paired differences to the first arm,
    as text; `metrics` of the points by label, and the same seeds for every arm."""
    names = list(dict.fromkeys(run["arm"] for run in runs))
    num_seeds, reading = len({run["seed"] for run in runs}), common_reading(runs, cost)
    about = f"mean ± 95 % interval over {num_seeds} seeds"
    if num_seeds < FEWEST_SEEDS:
        about = f"mean; an interval needs {FEWEST_SEEDS} seeds"
    lines = [f"at equal {cost}: {reading:,.0f}      ({about}; per seed)"]
    for name in names:
        cells = []
        for label, metric in metrics.items():
            known = paired_values(runs, name, names[0], cost=cost, reading=reading, metric=metric)
            gap = mean_with_interval([ours - base for ours, base in known]) if name != names[0] else ""
            each = "/".join(f"{100 * ours:.0f}" for ours, _ in known)
            against = f"[vs {names[0]} {gap}]" if gap else ""
            cells.append(f"{label} {mean_with_interval([ours for ours, _ in known])} ({each}) {against:24s}")
        lines.append(f"  {name:22s} " + "  ".join(cells))
    return "\n".join(lines)
