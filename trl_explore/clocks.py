"""Arms of a comparison read at the same cost: by generated tokens, by seconds or by optimiser steps."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

# Two-sided 95 % quantile of Student's t, by number of values (one more than the degrees of freedom).
T_95 = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}


def value_at(points: Sequence[Mapping[str, float]], clock: str, reading: float, metric: str) -> float | None:
    """
    Read a learning curve, linearly between its two nearest points.

    Args:
        points (`Sequence[Mapping[str, float]]`):
            The curve, in order of cost (see [`~trl_explore.comparison.Run`]).
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


def mean_with_interval(values: Sequence[float]) -> str:
    """
    Mean and 95 % t-interval of shares, in percent.

    Args:
        values (`Sequence[float]`):
            One value per seed, at most 10.

    Returns:
        `str`: For example `" 48.4 ±  5.8"`; the mean alone for a single value.
    """
    mean = statistics.mean(values)
    if len(values) < 2:
        return f"{100 * mean:5.1f}"
    half = T_95[len(values)] * statistics.stdev(values) / len(values) ** 0.5
    return f"{100 * mean:5.1f} ± {100 * half:4.1f}"


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
    seeds = sorted({run["seed"] for run in runs})
    names = list(dict.fromkeys(run["arm"] for run in runs))
    points = {(run["arm"], run["seed"]): run["points"] for run in runs}
    reading = min(p[-1][clock] for p in points.values())
    lines = [f"at equal {clock}: {reading:,.0f}      (mean ± 95 % interval over {len(seeds)} seeds; per seed)"]
    for name in names:
        cells = []
        for label, metric in metrics.items():
            pairs = [
                (
                    value_at(points[name, seed], clock, reading, metric),
                    value_at(points[names[0], seed], clock, reading, metric),
                )
                for seed in seeds
            ]
            known = [(ours, base) for ours, base in pairs if ours is not None and base is not None]
            gap = mean_with_interval([ours - base for ours, base in known]) if name != names[0] else ""
            each = "/".join(f"{100 * ours:.0f}" for ours, _ in known)
            against = f"[vs {names[0]} {gap}]" if gap else ""
            cells.append(f"{label} {mean_with_interval([ours for ours, _ in known])} ({each}) {against:24s}")
        lines.append(f"  {name:22s} " + "  ".join(cells))
    return "\n".join(lines)
