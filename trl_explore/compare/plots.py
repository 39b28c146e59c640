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
MORE_STYLES = (("#E69F00", "X"), ("#999999", "*"))  # for arms if the styles of `METHODS` are used up


def metric_label(metric: str) -> tuple[str, int]:
    """Return the label of a metric such as `eval/pass_at_8`, and the factor of its shown values: 1 for rewards, 100
    for shares."""
    label = LABELS.get(metric, metric.removeprefix("eval/").replace("_at_", "@"))
    if metric.endswith("reward"):
        return label, 1
    return label, 100


def arm_styles(arms: Iterable[str]) -> dict[str, tuple[str, str]]:
    """
    Return colour and marker of each arm, by name.

    The style of a method goes to the arm whose name is the method's title. If there is no such arm, it goes to the
    first arm whose name begins with the title. The other arms get the unused styles, but never the style of GRPO.
    """
    names = list(dict.fromkeys(arms))
    styles: dict[str, tuple[str, str]] = {}
    method_styles = {row.title: row.style for row in METHODS.values() if row.style is not None}
    for title, style in method_styles.items():
        matching = [name for name in names if name.startswith(title)]
        if title in matching:
            styles[title] = style
        elif matching:
            styles[matching[0]] = style
    used = {*styles.values(), method_styles["GRPO"]}
    unused = [style for style in (*method_styles.values(), *MORE_STYLES) if style not in used]
    others = cycle(unused or MORE_STYLES)
    found = {}
    for name in names:
        found[name] = styles[name] if name in styles else next(others)
    return found


def _draw_panel(panel: Any, runs: Sequence[dict[str, Any]], cost: str, metric: str) -> None:
    """Draw the mean curve and the band of every arm, for one metric and one cost."""
    scale = metric_label(metric)[1]
    curves: dict[str, list[list[dict[str, Any]]]] = {}
    for run in runs:
        measured = [point for point in run["points"] if metric in point]
        curves.setdefault(run["arm"], []).append(measured)
    for arm, (colour, marker) in arm_styles(curves).items():
        curves_of_seeds = curves[arm]
        readings, mean, low, high = [], [], [], []
        averages = mean_curve(curves_of_seeds, cost, metric, t_interval=len(curves_of_seeds) >= FEWEST_SEEDS)
        for reading, middle, lowest, highest in averages:
            if scale == 100:  # a share cannot leave 0 to 1, but its t-interval can
                lowest, highest = max(lowest, 0), min(highest, 1)
            readings.append(reading)
            mean.append(scale * middle)
            low.append(scale * lowest)
            high.append(scale * highest)
        every = max(1, len(mean) // 10)  # about ten markers per line
        style = dict(color=colour, marker=marker, markersize=4, markevery=every)
        panel.plot(readings, mean, label=arm, linewidth=1.5, **style)
        if len(curves_of_seeds) > 1:
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
    """
    Draw a panel per cost and metric. Each panel has a line per arm, the mean over the arm's seeds.

    A band shows the mean's 95 % t-interval. With two seeds, it reaches from the lower to the higher value. With one
    seed, there is no band.

    Args:
        runs (`Sequence[dict[str, Any]]`):
            Runs with `arm`, `seed` and `points`.
        path (`str` or `Path`):
            File to write. Its suffix decides the format.
        metrics (`Sequence[str]`, *optional*):
            Metrics of the points, one row of panels each.
        costs (`Sequence[str]`, *optional*):
            Costs of the points, one column of panels each.
        title (`str`, *optional*, defaults to `""`):
            Title of the picture.
        suffixes (`Sequence[str]`, *optional*, defaults to `()`):
            Suffixes, such as `".svg"`, of further files to write.

    Returns:
        `Path`: `path`.
    """
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
    num_seeds = len({run["seed"] for run in runs})
    kind = "95 % interval" if num_seeds >= FEWEST_SEEDS else "lowest to highest"
    band = f"mean of {num_seeds} seeds, band: {kind}" if num_seeds > 1 else "one seed"
    figure.suptitle(f"{title} ({band})" if title else band)
    files = [Path(path), *(Path(path).with_suffix(suffix) for suffix in suffixes)]
    for file in files:
        figure.savefig(file, dpi=110)
    plt.close(figure)
    return Path(path)
