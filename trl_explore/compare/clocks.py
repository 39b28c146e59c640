"""Arms of a comparison read at the same cost: by generated tokens, by seconds or by optimiser steps."""

import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

Points = Sequence[Mapping[str, float]]

# Two-sided 95 % quantile of Student's t, by number of values (one more than the degrees of freedom).
T_95 = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}


def t_95(count: int) -> float:
    """
    Two-sided 95 % quantile of Student's t.

    Args:
        count (`int`):
            Number of values, at least 2.

    Returns:
        `float`: The quantile with one degree of freedom less, to three decimals.
    """
    if count in T_95:
        return T_95[count]
    normal, freedom = 1.959964, count - 1  # Cornish and Fisher's expansion around the normal quantile
    first = (normal**3 + normal) / 4
    second = (5 * normal**5 + 16 * normal**3 + 3 * normal) / 96
    third = (3 * normal**7 + 19 * normal**5 + 17 * normal**3 - 15 * normal) / 384
    return normal + first / freedom + second / freedom**2 + third / freedom**3


def value_at(points: Points, clock: str, reading: float, metric: str) -> float | None:
    """
    Read a learning curve, linearly between its two nearest points.

    Args:
        points (`Sequence[Mapping[str, float]]`):
            The curve, in order of cost (see [`~trl_explore.compare.arms.Run`]).
        clock (`str`):
            Name of the cost.
        reading (`float`):
            Where to read the curve.
        metric (`str`):
            What to read.

    Returns:
        `float` or `None`: The metric; `None` before the first point and after the last.
    """
    for before, after in zip(points, points[1:], strict=False):
        if before[clock] <= reading <= after[clock]:
            share = (reading - before[clock]) / max(after[clock] - before[clock], 1e-9)
            return before[metric] + share * (after[metric] - before[metric])
    return None


def mean_along(points: Points, clock: str, reading: float, metric: str) -> float:
    """
    Mean height of a learning curve up to a cost: of two that end alike, the one that rose earlier has more.

    Args:
        points (`Sequence[Mapping[str, float]]`):
            The curve, in order of cost, from 0 on.
        clock (`str`):
            Name of the cost.
        reading (`float`):
            Where to stop; positive, and not beyond the curve's end.
        metric (`str`):
            What to read.

    Returns:
        `float`: The mean of the metric, with straight lines between the points.
    """
    end = value_at(points, clock, reading, metric)
    if end is None:
        raise ValueError(f"`reading` is {reading}, but the curve is known up to {points[-1][clock]} {clock}.")
    known = [(point[clock], point[metric]) for point in points if point[clock] < reading] + [(reading, end)]
    parts = [(after - before) * (low + high) / 2 for (before, low), (after, high) in pairwise(known)]
    return sum(parts) / (reading - known[0][0])


def interval(values: Sequence[float]) -> tuple[float, float | None]:
    """
    Mean and 95 % t-interval.

    Args:
        values (`Sequence[float]`):
            One value per seed.

    Returns:
        `tuple[float, float | None]`: The mean, and half the length of the interval: `None` for a single value.
    """
    mean = statistics.mean(values)
    if len(values) < 2:
        return mean, None
    return mean, t_95(len(values)) * statistics.stdev(values) / len(values) ** 0.5


def mean_with_interval(values: Sequence[float]) -> str:
    """
    Mean and 95 % t-interval of shares, in percent.

    Args:
        values (`Sequence[float]`):
            One value per seed.

    Returns:
        `str`: For example `" 48.4 ±  5.8"`; the mean alone for a single value.
    """
    mean, half = interval(values)
    return f"{100 * mean:5.1f}" if half is None else f"{100 * mean:5.1f} ± {100 * half:4.1f}"


def mean_curve(
    curves: Sequence[Points], clock: str, metric: str, *, t_interval: bool = False
) -> list[tuple[float, float, float, float]]:
    """
    The mean of several seeds' learning curves, wherever one of them was measured and all of them can be read.

    Args:
        curves (`Sequence[Sequence[Mapping[str, float]]]`):
            One curve per seed, in order of cost.
        clock (`str`):
            Name of the cost.
        metric (`str`):
            What to read.
        t_interval (`bool`, *optional*, defaults to `False`):
            Whether the ends of the mean's 95 % t-interval stand in place of lowest and highest; needs two curves.

    Returns:
        `list[tuple[float, float, float, float]]`: Cost, mean, lowest and highest, in order of cost.
    """
    mean = []
    for reading in sorted({point[clock] for points in curves for point in points}):
        values = [value_at(points, clock, reading, metric) for points in curves]
        known = [value for value in values if value is not None]
        if len(known) == len(curves):
            middle, half = interval(known)
            ends = (middle - half, middle + half) if t_interval and half is not None else (min(known), max(known))
            mean.append((reading, middle, *ends))
    return mean


def common_reading(runs: Sequence[Mapping[str, Any]], clock: str) -> float:
    """
    Where the run that got least far on the clock stopped: the last cost at which all can be read.

    Args:
        runs (`Sequence[Mapping]`):
            Runs with `points`.
        clock (`str`):
            Name of the cost.

    Returns:
        `float`: The cost.
    """
    return min(run["points"][-1][clock] for run in runs)


def paired_values(
    runs: Sequence[Mapping[str, Any]], arm: str, base: str, *, clock: str, reading: float, metric: str
) -> list[tuple[float, float]]:
    """
    A metric of two arms at the same cost, seed by seed.

    Args:
        runs (`Sequence[Mapping]`):
            Runs with `arm`, `seed` and `points`; the same seeds for every arm.
        arm (`str`):
            One arm.
        base (`str`):
            The arm it is compared with.
        clock (`str`):
            Name of the cost.
        reading (`float`):
            The cost.
        metric (`str`):
            What to read.

    Returns:
        `list[tuple[float, float]]`: Values of `arm` and `base`, for the seeds on which both can be read.
    """
    points = {(run["arm"], run["seed"]): run["points"] for run in runs}
    seeds = sorted({run["seed"] for run in runs})
    pairs = [[value_at(points[name, seed], clock, reading, metric) for name in (arm, base)] for seed in seeds]
    return [(ours, theirs) for ours, theirs in pairs if ours is not None and theirs is not None]


def comparison_table(runs: Sequence[Mapping[str, Any]], clock: str, metrics: Mapping[str, str]) -> str:
    """
    All arms where the one that got least far on the clock stopped, and their paired differences to the first arm.

    Args:
        runs (`Sequence[Mapping]`):
            Runs with `arm`, `seed` and `points`; the same seeds for every arm.
        clock (`str`):
            Name of the cost.
        metrics (`Mapping[str, str]`):
            Metrics of the points, by label.

    Returns:
        `str`: Lines of text.
    """
    names = list(dict.fromkeys(run["arm"] for run in runs))
    num_seeds, reading = len({run["seed"] for run in runs}), common_reading(runs, clock)
    lines = [f"at equal {clock}: {reading:,.0f}      (mean ± 95 % interval over {num_seeds} seeds; per seed)"]
    for name in names:
        cells = []
        for label, metric in metrics.items():
            known = paired_values(runs, name, names[0], clock=clock, reading=reading, metric=metric)
            gap = mean_with_interval([ours - base for ours, base in known]) if name != names[0] else ""
            each = "/".join(f"{100 * ours:.0f}" for ours, _ in known)
            against = f"[vs {names[0]} {gap}]" if gap else ""
            cells.append(f"{label} {mean_with_interval([ours for ours, _ in known])} ({each}) {against:24s}")
        lines.append(f"  {name:22s} " + "  ".join(cells))
    return "\n".join(lines)
