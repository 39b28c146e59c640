"""
Pictures of all regimes: differences to GRPO, arms in the plane of pass@1 and pass@k, and problems that training newly
solves and loses.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from regimes_effects import Results, label
from regimes_plan import tuning_stages
from regimes_results import to_runs

from trl_explore.compare.costs import interval

COLORS = {"rival": "#7f7f7f", "method": "#1f5fa8"}  # by role of the arm
SOLVED, LOST = "#1f5fa8", "#c44e52"
COLUMNS = 2  # with more columns, the documentation site shrinks the text of a picture below 9 pixels


def _panels(count: int, height: float) -> tuple[Any, list[Any]]:
    """Return a figure with `count` panels in rows of `COLUMNS`, and the panels."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(COLUMNS, count)
    rows = math.ceil(count / columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(5.2 * columns, height * rows), squeeze=False)
    for axis in axes.flat[count:]:
        axis.remove()
    return figure, list(axes.flat[:count])


def _save(figure: Any, path: Path) -> Path:
    """Write a figure to a file, close it, and return the path."""
    from matplotlib import pyplot

    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def _name_rows(axis: Any, names: Sequence[str], title: str) -> None:
    """Label a row per arm, the first on top, and draw a line at 0."""
    axis.axvline(0, color="black", linewidth=0.8)
    axis.set_yticks(range(len(names)), list(reversed(names)), fontsize=10)
    axis.tick_params(axis="x", labelsize=10)
    axis.set_title(title, fontsize=11)
    axis.grid(axis="x", alpha=0.3)
    axis.set_axisbelow(True)


def draw_forest(all_results: Sequence[Results], path: Path) -> Path | None:
    """
    Draw the difference to GRPO along the learning curve for each rival and method, with one panel per regime.

    Args:
        all_results (`Sequence[Results]`):
            Regimes with their results.
        path (`Path`):
            The PNG file.

    Returns:
        `Path` or `None`: `path`, or None if no rival or method was measured. Then nothing is drawn.
    """
    shown = [results for results in all_results if results.measured_arms("rival", "method")]
    if not shown:
        return None
    most = max(len(results.measured_arms("rival", "method")) for results in shown)
    figure, axes = _panels(len(shown), 0.32 * most + 1.9)
    for axis, results in zip(axes, shown, strict=True):
        names = results.measured_arms("rival", "method")
        for height, name in enumerate(reversed(names)):
            _draw_difference(axis, results, name, height + 0.14, cost="tokens", filled=True)
            _draw_difference(axis, results, name, height - 0.14, cost=results.seconds, filled=False)
        limits = f"limited by {' and '.join(results.limits)}" if results.limits else "not admitted"
        _name_rows(axis, names, f"{results.regime.name}: {label(results.regime.metric)},\n{limits}")
    figure.supxlabel(
        f"points above GRPO along the curve, 95 % intervals\nfilled: equal generated tokens, hollow: equal "
        f"{shown[0].costs[shown[0].seconds]}\ngrey: rivals, blue: methods",
        fontsize=11,
    )
    return _save(figure, path)


def _draw_difference(axis: Any, results: Results, name: str, height: float, *, cost: str, filled: bool) -> None:
    """Draw the difference of an arm to GRPO at equal cost as a dot with its interval. Without a difference, draw
    nothing."""
    effect = results.effect(name, results.base, metric=results.regime.metric, cost=cost)
    if effect is None:
        return
    role = next(arm["role"] for arm in results.regime.arms if arm["name"] == name)
    low, high = (effect.low, effect.high) if effect.has_interval else (effect.mean, effect.mean)
    axis.errorbar(
        effect.mean,
        height,
        xerr=[[effect.mean - low], [high - effect.mean]],
        fmt="o",
        color=COLORS[role],
        markerfacecolor=COLORS[role] if filled else "white",
        markersize=5,
        elinewidth=1.2,
    )


def draw_frontiers(all_results: Sequence[Results], path: Path) -> Path | None:
    """
    Draw pass@1 and pass@k (or the regime's two other frontier metrics) of arms at the end of training, with one panel
    per regime.

    Args:
        all_results (`Sequence[Results]`):
            Regimes with their results.
        path (`Path`):
            The PNG file.

    Returns:
        `Path` or `None`: `path`, or None if no regime has two frontier metrics and measured rivals. Then nothing is
        drawn.
    """
    shown = [results for results in all_results if results.places()]
    if not shown:
        return None
    figure, axes = _panels(len(shown), 5.2)
    for axis, results in zip(axes, shown, strict=True):
        metrics = results.frontier_metrics
        assert metrics is not None  # because the regime has places
        places = results.places()
        for name in [results.base, *results.measured_arms("rival", "method")]:
            _draw_arm(axis, results, name, metrics, places[name][0].verdict if name in places else None)
        axis.set_xlabel(f"{label(metrics[0])} at the end (%)", fontsize=10)
        axis.set_ylabel(f"{label(metrics[1])} at the end (%)", fontsize=10)
        axis.tick_params(labelsize=10)
        axis.set_title(results.regime.name, fontsize=11)
        axis.grid(alpha=0.3)
    figure.supxlabel(
        "large: fresh seeds with 95 % intervals; black GRPO,\n"
        "grey rivals, blue methods (ringed: outside, pale: inside);\n"
        "small, joined: settings tried on development seeds",
        fontsize=10,
    )
    return _save(figure, path)


def _draw_arm(axis: Any, results: Results, name: str, metrics: tuple[str, str], verdict: str | None) -> None:
    """
    Draw an arm in the plane of the two frontier metrics.

    A large dot with intervals shows the verdict runs. For GRPO and its rivals, small joined dots show the means of the
    settings that were tried in tuning.

    Args:
        axis (`matplotlib.axes.Axes`):
            Panel of the regime.
        results ([`Results`]):
            The regime with its results.
        name (`str`):
            Name of the arm.
        metrics (`tuple[str, str]`):
            Metrics on the horizontal and on the vertical axis.
        verdict (`str`, *optional*):
            Place of the arm relative to the frontier. None for GRPO and its rivals, which make the frontier.
    """
    role = next(arm["role"] for arm in results.regime.arms if arm["name"] == name)
    color = {"baseline": "black", **COLORS}[role]

    def percentages(points: Sequence[dict[str, Any]]) -> np.ndarray:
        """Return both metrics of evaluations in percent, with shape `(evaluations, 2)`."""
        return 100 * np.array([[point[f"eval/{metric}"] for metric in metrics] for point in points])

    runs = [run for run in to_runs(results.rows, "verdict") if run.arm == name]
    ends = percentages([run.points[-1] for run in runs])
    x, x_half = interval(ends[:, 0].tolist())
    y, y_half = interval(ends[:, 1].tolist())
    style = {"alpha": 0.35 if verdict == "inside" else 1.0, "markeredgewidth": 1.0}
    axis.errorbar(x, y, xerr=x_half, yerr=y_half, fmt="o", markersize=6, color=color, elinewidth=0.7, **style)
    if verdict == "outside":
        axis.plot(x, y, "o", markersize=12, markerfacecolor="none", markeredgecolor=color)
    axis.annotate(name, (x, y), xytext=(4, 4), textcoords="offset points", fontsize=8.5, color=color)
    if role in ("baseline", "rival"):
        tuning_ends: dict[str, list[dict[str, Any]]] = {}  # last evaluation of each run, by tried setting
        for stage in tuning_stages(role):
            for run in to_runs(results.rows, stage):
                if run.arm.startswith(f"{name}: "):
                    tuning_ends.setdefault(run.arm, []).append(run.points[-1])
        means = np.array(sorted(percentages(points).mean(axis=0).tolist() for points in tuning_ends.values()))
        if len(means):
            axis.plot(means[:, 0], means[:, 1], ".-", color=color, alpha=0.3, markersize=4, linewidth=0.8)


def draw_changes(all_results: Sequence[Results], path: Path) -> Path | None:
    """
    Draw the numbers of problems that each arm newly solves and newly loses in training, with one panel per regime.

    Args:
        all_results (`Sequence[Results]`):
            Regimes with their results.
        path (`Path`):
            The PNG file.

    Returns:
        `Path` or `None`: `path`, or None if no regime took many samples per problem before and after training. Then
        nothing is drawn.
    """
    shown = [results for results in all_results if results.ends]
    if not shown:
        return None
    names_by_panel = [results.measured_arms("baseline", "more samples", "rival", "method") for results in shown]
    figure, axes = _panels(len(shown), 0.26 * max(map(len, names_by_panel)) + 1.9)
    for axis, results, names in zip(axes, shown, names_by_panel, strict=True):
        start, ends = results.ends[0], {entry.arm: entry for entry in results.ends}
        for height, name in enumerate(reversed(names)):
            for count, sign, color in ((ends[name].solved, 1, SOLVED), (ends[name].lost, -1, LOST)):
                mean, half = count or (0.0, None)
                axis.barh(height, sign * mean, 0.7, xerr=half, color=color, error_kw={"linewidth": 0.8})
        num_samples, (solved_before, _) = max(start.pass_at.items())
        share = f"{100 * solved_before:.0f} % of {results.comparison.num_eval}"
        _name_rows(axis, names, f"{results.regime.name}:\n{share} solved by {num_samples} samples before")
    figure.supxlabel(
        "problems newly solved (blue, to the right) and\nnewly lost (red, to the left) by training,\n"
        "in as many samples as before; 95 % intervals",
        fontsize=11,
    )
    return _save(figure, path)
