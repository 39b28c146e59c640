"""Learning curves as a picture (needs the extra `plots`)."""

from collections.abc import Iterable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from trl_explore.compare.costs import FEWEST_SEEDS, mean_curve
from trl_explore.methods import METHODS

LABELS = {
    "eval/greedy_accuracy": "greedy accuracy",
    "eval/reward": "reward",
    "eval/success": "success",
    "tokens": "generated tokens",
    "trained_tokens": "tokens in the loss",
    "seconds": "wall seconds of training",
    "cpu_seconds": "CPU seconds of training",
    "step": "optimiser steps",
}
MORE_STYLES = (("#E69F00", "X"), ("#999999", "*"))  # beside those of `METHODS`


def metric_label(metric: str) -> tuple[str, int]:
    """A label for a metric such as `eval/pass_at_8`, and what to multiply it with: 100 for shares, 1 for rewards."""
    label = LABELS.get(metric, metric.removeprefix("eval/").replace("_at_", "@"))
    return label, 1 if metric.endswith("reward") else 100


def arm_styles(arms: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Colours and markers of arms, by name. An arm that is called as a method, or else the first whose name begins so,
    has the method's; the others have what is left, but never GRPO's."""
    names = list(dict.fromkeys(arms))
    styles: dict[str, tuple[str, str]] = {}
    of_methods = {row.title: row.style for row in METHODS.values() if row.style is not None}
    for method, style in of_methods.items():
        found = [name for name in names if name == method] or [name for name in names if name.startswith(method)]
        styles |= dict.fromkeys(found[:1], style)
    rest = [style for style in (*of_methods.values(), *MORE_STYLES) if style not in styles.values()]
    others = cycle([style for style in rest if style != of_methods["GRPO"]] or MORE_STYLES)
    return {name: styles[name] if name in styles else next(others) for name in names}


def _draw_panel(panel: Any, runs: Sequence[dict[str, Any]], cost: str, metric: str) -> None:
    scale = metric_label(metric)[1]
    for arm, (colour, marker) in arm_styles(run["arm"] for run in runs).items():
        curves = [[p for p in run["points"] if metric in p] for run in runs if run["arm"] == arm]
        band = len(curves) >= FEWEST_SEEDS
        readings, *values = zip(*mean_curve(curves, cost, metric, t_interval=band), strict=True)
        mean, low, high = ([scale * value for value in column] for column in values)
        if scale == 100:  # a share is none or all at most, whatever the interval says
            low, high = [max(value, 0) for value in low], [min(value, 100) for value in high]
        every = max(1, len(mean) // 10)
        style = dict(color=colour, marker=marker, markersize=4, markevery=every)
        panel.plot(readings, mean, label=arm, linewidth=1.5, **style)
        if len(curves) > 1:
            panel.fill_between(readings, low, high, color=colour, alpha=0.12, linewidth=0)
    panel.grid(alpha=0.3)


def learning_curves(
    runs: Sequence[dict[str, Any]],
    path: str | Path,
    *,
    metrics: Sequence[str] = ("eval/greedy_accuracy", "eval/pass_at_1", "eval/pass_at_8"),
    costs: Sequence[str] = ("tokens", "seconds"),
    title: str = "",
    suffixes: Sequence[str] = (),
) -> Path:
    """Draw a panel per cost and metric, a line per arm: the mean over its seeds, in its 95 % t-interval; with two
    seeds, from the lower to the higher. The suffix of `path` decides the format; `suffixes` are written beside it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import EngFormatter

    size = (5.2 * len(costs), 2.7 * len(metrics) + 0.9)
    figure, axes = plt.subplots(
        len(metrics), len(costs), figsize=size, squeeze=False, sharex="col", sharey="row", layout="constrained"
    )
    for row, metric in zip(axes, metrics, strict=True):
        for panel, cost in zip(row, costs, strict=True):
            _draw_panel(panel, runs, cost, metric)
        label, scale = metric_label(metric)
        row[0].set_ylabel(f"{label} (%)" if scale == 100 else label)
    for panel, cost in zip(axes[-1], costs, strict=True):
        panel.set_xlabel(LABELS.get(cost, cost))
        panel.xaxis.set_major_formatter(EngFormatter(sep=""))  # 20k, not 20000
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(6, len(labels)), frameon=False)
    figure.align_ylabels()
    seeds = len({run["seed"] for run in runs})
    kind = "95 % interval" if seeds >= FEWEST_SEEDS else "lowest to highest"
    band = f"mean of {seeds} seeds, band: {kind}" if seeds > 1 else "one seed"
    figure.suptitle(f"{title} ({band})" if title else band)
    for name in (Path(path), *(Path(path).with_suffix(suffix) for suffix in suffixes)):
        figure.savefig(name, dpi=110)
    plt.close(figure)
    return Path(path)
