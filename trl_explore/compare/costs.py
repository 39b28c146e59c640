"""Comparison of arms at equal cost: generated tokens, seconds or optimizer steps."""

import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from scipy.special import stdtrit

Points = Sequence[Mapping[str, float]]
FEWEST_SEEDS = 3  # needed for an interval: with two seeds it is ± 12.7 standard errors, too wide to be useful


def t_95(count: int) -> float:
    """Return the two-sided 95 % quantile of Student's t for `count` values, to four significant digits."""
    return float(f"{stdtrit(count - 1, 0.975):.4g}")


def value_at(points: Points, cost: str, reading: float, metric: str) -> float | None:
    """
    Return a learning curve's value at a cost, interpolated linearly between the two nearest points.

    Args:
        points (`Sequence[Mapping[str, float]]`):
            Points of the curve, with rising cost.
        cost (`str`):
            Name of the cost, such as `"tokens"`.
        reading (`float`):
            Amount of the cost at which to read the curve.
        metric (`str`):
            Name of the metric.

    Returns:
        `float` or `None`: The value, or None if `reading` is before the first point or after the last.
    """
    for before, after in zip(points, points[1:], strict=False):
        if before[cost] <= reading <= after[cost]:
            # Two points have equal costs if the model trained on no token between them. Avoid a division by zero.
            share = (reading - before[cost]) / max(after[cost] - before[cost], 1e-9)
            return before[metric] + share * (after[metric] - before[metric])
    return None


def mean_along(points: Points, cost: str, reading: float, metric: str) -> float:
    """
    Return the mean height of a learning curve up to a cost.

    The mean is the area under the curve, divided by the difference between that cost and the first point's cost.

    If two curves end at the same value, the curve that rose earlier has the larger mean.

    Args:
        points (`Sequence[Mapping[str, float]]`):
            Points of the curve, joined by straight lines.
        cost (`str`):
            Name of the cost, such as `"tokens"`.
        reading (`float`):
            Cost up to which to average. It must be positive, and at most the last point's cost.
        metric (`str`):
            Name of the metric.

    Raises:
        ValueError: If the curve ends before `reading`.
    """
    end = value_at(points, cost, reading, metric)
    if end is None:
        raise ValueError(f"`reading` is {reading}, but the curve is known up to {points[-1][cost]} {cost}.")
    known = [(point[cost], point[metric]) for point in points if point[cost] < reading] + [(reading, end)]
    area = 0.0
    for (cost_before, value_before), (cost_after, value_after) in pairwise(known):
        area += (cost_after - cost_before) * (value_before + value_after) / 2
    return area / (reading - known[0][0])


def other_starts(runs: Sequence[Mapping[str, Any]], base: str, metrics: Sequence[str]) -> dict[str, list[int]]:
    """
    Find runs whose first evaluation differed from the first arm's.

    If the models differed before training, the results of the two arms differ for that reason too, not only because of
    the training.

    Args:
        runs (`Sequence[Mapping]`):
            Runs with `arm`, `seed` and `points`. The first point of a run was measured before training.
        base (`str`):
            Name of the first arm.
        metrics (`Sequence[str]`):
            Metrics to compare at the first points.

    Returns:
        `dict[str, list[int]]`: By arm, the seeds whose first point differs from the first arm's first point. Arms
        without differences are left out.
    """
    starts = {}
    for run in runs:
        first = run["points"][0]
        starts[run["arm"], run["seed"]] = [first.get(metric) for metric in metrics]
    found: dict[str, list[int]] = {}
    for (arm, seed), start in starts.items():
        if (base, seed) in starts and start != starts[base, seed]:
            found.setdefault(arm, []).append(seed)
    return found


def interval(values: Sequence[float], *, fewest: int = FEWEST_SEEDS) -> tuple[float, float | None]:
    """Return the mean over seeds, and half the length of its 95 % t-interval (None for fewer than `fewest` seeds)."""
    mean = statistics.mean(values)
    if len(values) < fewest:
        return mean, None
    return mean, t_95(len(values)) * statistics.stdev(values) / len(values) ** 0.5


def mean_with_interval(values: Sequence[float]) -> str:
    """Return mean and 95 % t-interval of shares in percent, such as `" 48.4 ±  5.8"`. With fewer than three values,
    return only the mean."""
    mean, half = interval(values)
    if half is None:
        return f"{100 * mean:5.1f}"
    return f"{100 * mean:5.1f} ± {100 * half:4.1f}"


def mean_curve(
    curves: Sequence[Points], cost: str, metric: str, *, t_interval: bool = False
) -> list[tuple[float, float, float, float]]:
    """
    Average the curves of several seeds.

    The average has a point at every cost at which at least one curve was measured, if all curves reach that cost.

    Args:
        curves (`Sequence[Points]`):
            Points per seed.
        cost (`str`):
            Name of the cost, such as `"tokens"`.
        metric (`str`):
            Name of the metric.
        t_interval (`bool`, *optional*, defaults to `False`):
            If `True`, return the ends of the mean's 95 % interval instead of the lowest and highest value. This has
            no effect with fewer than three curves, because there is no interval.

    Returns:
        `list[tuple[float, float, float, float]]`: Cost, mean, lower end and upper end.
    """
    readings = set()
    for points in curves:
        readings |= {point[cost] for point in points}
    averages = []
    for reading in sorted(readings):
        values = [value_at(points, cost, reading, metric) for points in curves]
        known = [value for value in values if value is not None]
        if len(known) == len(curves):
            middle, half = interval(known)
            low, high = min(known), max(known)
            if t_interval and half is not None:
                low, high = middle - half, middle + half
            averages.append((reading, middle, low, high))
    return averages


def common_reading(runs: Sequence[Mapping[str, Any]], cost: str) -> float:
    """Return the largest cost up to which every run was measured."""
    return min(run["points"][-1][cost] for run in runs)


def paired_values(
    runs: Sequence[Mapping[str, Any]], arm: str, base: str, *, cost: str, reading: float, metric: str
) -> list[tuple[float, float]]:
    """
    Return a metric of `arm` and of `base` at the same cost, as one pair per seed.

    Seeds at which one of the two has no value at that cost are left out.
    """
    points = {(run["arm"], run["seed"]): run["points"] for run in runs}
    pairs = []
    for seed in sorted({run["seed"] for run in runs}):
        ours = value_at(points[arm, seed], cost, reading, metric)
        theirs = value_at(points[base, seed], cost, reading, metric)
        if ours is not None and theirs is not None:
            pairs.append((ours, theirs))
    return pairs


def comparison_table(runs: Sequence[Mapping[str, Any]], cost: str, metrics: Mapping[str, str]) -> str:
    """
    Return a table as text: all arms at equal cost, and their paired differences to the first arm.

    Args:
        runs (`Sequence[Mapping]`):
            Runs with `arm`, `seed` and `points`; every arm has the same seeds.
        cost (`str`):
            Name of the cost. The arms are read at the largest amount that every run reached.
        metrics (`Mapping[str, str]`):
            Metrics to show, by label.
    """
    names = list(dict.fromkeys(run["arm"] for run in runs))
    num_seeds, reading = len({run["seed"] for run in runs}), common_reading(runs, cost)
    about = f"mean ± 95 % interval over {num_seeds} seeds"
    if num_seeds < FEWEST_SEEDS:
        about = f"mean; an interval needs {FEWEST_SEEDS} seeds"
    lines = [f"at equal {cost}: {reading:,.0f}      ({about}; per seed)"]
    for name in names:
        cells = []
        for label, metric in metrics.items():
            pairs = paired_values(runs, name, names[0], cost=cost, reading=reading, metric=metric)
            values = [ours for ours, _ in pairs]
            differences = [ours - theirs for ours, theirs in pairs]
            each = "/".join(f"{100 * value:.0f}" for value in values)
            against = ""
            if name != names[0]:
                against = f"[vs {names[0]} {mean_with_interval(differences)}]"
            cells.append(f"{label} {mean_with_interval(values)} ({each}) {against:24s}")
        lines.append(f"  {name:22s} " + "  ".join(cells))
    return "\n".join(lines)
