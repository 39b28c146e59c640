"""Learning curves as a picture (needs the extra `plots`)."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LABELS = {
    "eval/greedy_accuracy": "greedy accuracy",
    "eval/pass_at_1": "pass@1",
    "eval/pass_at_8": "pass@8",
    "tokens": "generated tokens",
    "seconds": "seconds of training",
    "cpu_seconds": "CPU seconds of training",
    "step": "optimiser steps",
}


def learning_curves(
    runs: Sequence[dict[str, Any]],
    path: str | Path,
    *,
    metrics: Sequence[str] = ("eval/greedy_accuracy", "eval/pass_at_1", "eval/pass_at_8"),
    clocks: Sequence[str] = ("tokens", "seconds"),
    title: str = "",
) -> Path:
    """
    Draw one panel per clock and metric, one line per run, one colour per arm.

    Args:
        runs (`Sequence[dict]`):
            Runs with `arm`, `seed` and `points` (see [`~trl_explore.comparison.Run`]).
        path (`str` or `Path`):
            The PNG file.
        metrics (`Sequence[str]`, *optional*):
            Metrics of the points, one row of panels each.
        clocks (`Sequence[str]`, *optional*, defaults to `("tokens", "seconds")`):
            Costs of the points, one column of panels each.
        title (`str`, *optional*):
            Title of the figure.

    Returns:
        `Path`: The file.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colours = {arm: f"C{i}" for i, arm in enumerate(dict.fromkeys(run["arm"] for run in runs))}
    size = (5.2 * len(clocks), 2.7 * len(metrics) + 0.6)
    figure, axes = plt.subplots(len(metrics), len(clocks), figsize=size, squeeze=False, sharey=True)
    for row, metric in zip(axes, metrics, strict=True):
        for panel, clock in zip(row, clocks, strict=True):
            for run in runs:
                points = [p for p in run["points"] if metric in p]
                label = run["arm"] if run is next(r for r in runs if r["arm"] == run["arm"]) else None
                panel.plot(
                    [p[clock] for p in points],
                    [100 * p[metric] for p in points],
                    color=colours[run["arm"]],
                    marker="o",
                    markersize=3,
                    label=label,
                )
            panel.set_xlabel(LABELS.get(clock, clock))
            panel.set_ylabel(f"{LABELS.get(metric, metric)} (%)")
            panel.grid(alpha=0.3)
    axes[0][0].legend()
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return Path(path)


def training_curves(history: Sequence[Mapping[str, Any]], path: str | Path, *, metrics: Sequence[str]) -> Path:
    """
    Draw one panel per metric of a training run, over its steps.

    Args:
        history (`Sequence[Mapping[str, Any]]`):
            A trainer's `state.log_history`: entries with `step` and metrics.
        path (`str` or `Path`):
            The PNG file.
        metrics (`Sequence[str]`):
            Names of the metrics, at least one.

    Returns:
        `Path`: The file.
    """
    from matplotlib.figure import Figure  # without pyplot, which would change the backend of a notebook

    columns = min(3, len(metrics))
    rows = math.ceil(len(metrics) / columns)
    figure = Figure(figsize=(3.6 * columns, 2.4 * rows))
    # Fixed margins: fitting them to the labels takes longer than all the drawing.
    margins = dict(left=0.07, right=0.98, top=1 - 0.12 / rows, bottom=0.18 / rows, hspace=0.6, wspace=0.3)
    panels = figure.subplots(rows, columns, squeeze=False, gridspec_kw=margins).flat
    for name, panel in zip(metrics, panels, strict=False):
        points = [(entry["step"], entry[name]) for entry in history if name in entry]
        panel.plot(*zip(*points, strict=True), marker="o", markersize=2, linewidth=1)
        panel.set_title(name, fontsize=9, parse_math=False)
        panel.set_xlabel("step", fontsize=8)
        panel.tick_params(labelsize=8)
        panel.grid(alpha=0.3)
    for panel in panels:
        panel.set_axis_off()
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    return path
