"""
Pictures of all regimes: how much more than GRPO, where arms lie in pass@1 and pass@k, what training gains and loses.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from regimes_effects import Results, label
from regimes_plan import tuning
from regimes_results import to_runs

from trl_explore.compare.costs import interval

COLORS = {"rival": "#7f7f7f", "method": "#1f5fa8"}
SOLVED, LOST = "#1f5fa8", "#c44e52"
COLUMNS = 2  # wider than that, the site shrinks the text below 9 pixels


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


def draw_forest(results: Sequence[Results], path: Path) -> Path | None:
    """
    Draws, for every regime, how much more than GRPO each rival and method has along its curve.

    Args:
        results (`Sequence`):
            Regimes with their results.
        path (`Path`):
            The PNG file.

    Returns:
        `Path` or `None`: `path`; nothing is drawn where only admissions were measured.
    """
    shown = [found for found in results if found.named("rival", "method")]
    if not shown:
        return None
    most = max(len(found.named("rival", "method")) for found in shown)
    figure, axes = _panels(len(shown), 0.32 * most + 1.9)
    for axis, found in zip(axes, shown, strict=True):
        names = found.named("rival", "method")
        for height, name in enumerate(reversed(names)):
            role = next(arm["role"] for arm in found.regime.arms if arm["name"] == name)
            for shift, cost, filled in ((0.14, "tokens", True), (-0.14, found.seconds, False)):
                effect = found.effect(name, found.base, metric=found.regime.metric, cost=cost)
                if effect is None:
                    continue
                low, high = (effect.low, effect.high) if effect.has_interval else (effect.mean, effect.mean)
                error = [[effect.mean - low], [high - effect.mean]]
                style = {"markerfacecolor": COLORS[role] if filled else "white", "markersize": 5, "elinewidth": 1.2}
                axis.errorbar(
                    effect.mean, height + shift, xerr=error, fmt="o", color=COLORS[role], label=None, **style
                )
        limits = f"limited by {' and '.join(found.limits)}" if found.limits else "not admitted"
        _name_rows(axis, names, f"{found.regime.name}: {label(found.regime.metric)},\n{limits}")
    figure.supxlabel(
        f"points above GRPO along the curve, 95 % intervals\nfilled: equal generated tokens, hollow: equal "
        f"{shown[0].costs[shown[0].seconds]}\ngrey: rivals, blue: methods",
        fontsize=11,
    )
    return _save(figure, path)


def draw_frontiers(results: Sequence[Results], path: Path) -> Path | None:
    """
    Draws, for every regime, where arms end in pass@1 and pass@k.

    Args:
        results (`Sequence`):
            Regimes with their results.
        path (`Path`):
            The PNG file.

    Returns:
        `Path` or `None`: `path`; nothing is drawn where no regime has both metrics and rivals.
    """
    shown = [found for found in results if found.places()]
    if not shown:
        return None
    figure, axes = _panels(len(shown), 5.2)
    for axis, found in zip(axes, shown, strict=True):
        first, second = found.axes or ("", "")
        places = found.places()
        for name in [found.base, *found.named("rival", "method")]:
            _draw_arm(axis, found, name, places[name][0].verdict if name in places else None)
        axis.set_xlabel(f"{label(first)} at the end (%)", fontsize=10)
        axis.set_ylabel(f"{label(second)} at the end (%)", fontsize=10)
        axis.tick_params(labelsize=10)
        axis.set_title(found.regime.name, fontsize=11)
        axis.grid(alpha=0.3)
    figure.supxlabel(
        "large: fresh seeds with 95 % intervals; black GRPO,\n"
        "grey rivals, blue methods (ringed: outside, pale: inside);\n"
        "small, joined: settings tried on development seeds",
        fontsize=10,
    )
    return _save(figure, path)


def draw_changes(results: Sequence[Results], path: Path) -> Path | None:
    """
    Draws, for every regime, how many problems each arm newly solves and newly loses.

    Args:
        results (`Sequence`):
            Regimes with their results.
        path (`Path`):
            The PNG file.

    Returns:
        `Path` or `None`: `path`; nothing is drawn where no regime has samples enough to tell.
    """
    shown = [found for found in results if found.ends]
    if not shown:
        return None
    names = [found.named("baseline", "more samples", "rival", "method") for found in shown]
    figure, axes = _panels(len(shown), 0.26 * max(map(len, names)) + 1.9)
    for axis, found, arms in zip(axes, shown, names, strict=True):
        start, ends = found.ends[0], {entry.arm: entry for entry in found.ends}
        for height, name in enumerate(reversed(arms)):
            for pair, sign, color in ((ends[name].solved, 1, SOLVED), (ends[name].lost, -1, LOST)):
                mean, half = pair or (0.0, None)
                axis.barh(height, sign * mean, 0.7, xerr=half, color=color, error_kw={"linewidth": 0.8})
        most, (solves, _) = max(start.pass_at.items())
        before = f"{100 * solves:.0f} % of {found.comparison.num_eval} solved by {most} samples before"
        _name_rows(axis, arms, f"{found.regime.name}:\n{before}")
    figure.supxlabel(
        "problems newly solved (blue, to the right) and\nnewly lost (red, to the left) by training,\n"
        "in as many samples as before; 95 % intervals",
        fontsize=11,
    )
    return _save(figure, path)


def _draw_arm(axis: Any, found: Results, name: str, verdict: str | None) -> None:
    arm = next(arm for arm in found.regime.arms if arm["name"] == name)
    color = {"baseline": "black", **COLORS}[arm["role"]]
    axes = found.axes or ()

    def ends(points: Sequence[dict[str, Any]]) -> np.ndarray:
        return 100 * np.array([[point[f"eval/{axis}"] for axis in axes] for point in points])

    runs = [run for run in to_runs(found.rows, "verdict") if run.arm == name]
    values = ends([run.points[-1] for run in runs])
    (x, x_half), (y, y_half) = (interval(values[:, column].tolist()) for column in range(2))
    style = {"alpha": 0.35 if verdict == "inside" else 1.0, "markeredgewidth": 1.0}
    axis.errorbar(x, y, xerr=x_half, yerr=y_half, fmt="o", markersize=6, color=color, elinewidth=0.7, **style)
    if verdict == "outside":
        axis.plot(x, y, "o", markersize=12, markerfacecolor="none", markeredgecolor=color)
    axis.annotate(name, (x, y), xytext=(4, 4), textcoords="offset points", fontsize=8.5, color=color)
    if arm["role"] in ("baseline", "rival"):
        tuned: dict[str, list[dict[str, Any]]] = {}
        for stage in tuning(arm["role"]):
            for run in to_runs(found.rows, stage):
                if run.arm.startswith(f"{name}: "):
                    tuned.setdefault(run.arm, []).append(run.points[-1])
        means = np.array(sorted(ends(points).mean(axis=0).tolist() for points in tuned.values()))
        if len(means):
            axis.plot(means[:, 0], means[:, 1], ".-", color=color, alpha=0.3, markersize=4, linewidth=0.8)
