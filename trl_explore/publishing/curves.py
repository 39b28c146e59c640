"""Training curves of a run, for its model card. Needs the extra `plots`."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def training_curves(history: Sequence[Mapping[str, Any]], path: str | Path, *, metrics: Sequence[str]) -> Path:
    """
    Draw one panel per metric over the training steps, into a PNG file.

    Args:
        history (`Sequence[Mapping]`):
            The trainer's `state.log_history`.
        path (`str` or `Path`):
            The PNG file.
        metrics (`Sequence[str]`):
            Names of metrics in the log.

    Returns:
        `Path`: The file.
    """
    from matplotlib.figure import Figure  # without pyplot, which would change the backend of a notebook

    columns = min(3, len(metrics))
    rows = math.ceil(len(metrics) / columns)
    figure = Figure(figsize=(3.6 * columns, 2.4 * rows))
    # The margins are fixed, because fitting them to the labels takes longer than drawing the figure.
    margins = dict(left=0.07, right=0.98, top=1 - 0.12 / rows, bottom=0.18 / rows, hspace=0.6, wspace=0.3)
    panels = figure.subplots(rows, columns, squeeze=False, gridspec_kw=margins).flat
    for name, panel in zip(metrics, panels, strict=False):
        points = [(entry["step"], entry[name]) for entry in history if name in entry]
        panel.plot(*zip(*points, strict=True), marker="o", markersize=2, linewidth=1)
        panel.set_title(name, fontsize=9, parse_math=False)
        panel.set_xlabel("step", fontsize=8)
        panel.tick_params(labelsize=8)
        panel.grid(alpha=0.3)
    for panel in panels:  # the iterator continues after the panel of the last metric
        panel.set_axis_off()
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    return path
