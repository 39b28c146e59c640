"""What a comparison shows: a table at equal cost, the curves behind it as CSV, PNG and SVG."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trl_explore.compare.costs import (
    FEWEST_SEEDS,
    common_reading,
    interval,
    mean_along,
    other_starts,
    paired_values,
)
from trl_explore.compare.ends import ends_table, summarize_ends
from trl_explore.compare.plots import LABELS, learning_curves, metric_label
from trl_explore.compare.run import TRAINING
from trl_explore.compare.settings import Comparison
from trl_explore.fitting_table import FittingTable
from trl_explore.rewards.threshold import threshold_note

SUCCESSES = ("pass_at_", "greedy_accuracy")  # metrics that count samples whose reward reaches the threshold
CURVES, TABLE = "curves", "table.md"
ROW_COSTS = ("tokens", "seconds", "cpu_seconds", "step")  # of a row of the table, in the order of `Row`
COSTS = ("step", "tokens", "trained_tokens", "seconds", "cpu_seconds")


@dataclass(frozen=True)
class Cell:
    """A metric of one arm at equal cost, as mean and half its interval."""

    value: tuple[float, float | None]
    difference: tuple[float, float | None] | None  # to the first arm seed by seed; `None` for that one
    scale: int  # to show both with: 100 for shares

    def texts(self) -> list[str]:
        """The value, and the difference where there is one."""
        shown = [self._text(self.value, "")]
        return shown if self.difference is None else [*shown, self._text(self.difference, "+")]

    def text(self) -> str:
        """Both in one line."""
        value, *rest = self.texts()
        return value + "".join(f" ({difference})" for difference in rest)

    def _text(self, pair: tuple[float, float | None], sign: str) -> str:
        digits = 1 if self.scale == 100 else 3
        mean, half = pair
        text = f"{self.scale * mean:{sign}.{digits}f}"
        return text if half is None else f"{text} ± {self.scale * half:.{digits}f}"


@dataclass(frozen=True)
class Row:
    """One arm of the table: its cells, one per metric, and mean costs over seeds."""

    arm: str
    cells: list[Cell]
    tokens: float
    seconds: float  # wall time
    cpu_seconds: float
    steps: float

    def texts(self) -> list[str]:
        """Return the costs, as `headers` names them."""
        per_step = self.seconds / max(self.steps, 1e-9)
        return [f"{self.tokens:,.0f}", f"{self.seconds:,.1f}", f"{self.cpu_seconds:,.1f}", f"{per_step:.2f}"]


def summarize(runs: Sequence[Mapping[str, Any]], comparison: Comparison) -> list[Row]:
    """All arms of runs with the same seeds at the same cost, in order."""
    cost, reading = comparison.cost, equal_cost(runs, comparison)
    base = comparison.arms[0].name
    rows = []
    for name in (arm.name for arm in comparison.arms):
        pairs = {
            metric: paired_values(runs, name, base, cost=cost, reading=reading, metric=metric)
            for metric in (*ROW_COSTS, *(f"eval/{metric}" for metric in comparison.metrics))
        }
        values = {metric: interval([ours for ours, _ in known]) for metric, known in pairs.items()}
        cells = []
        for metric in comparison.metrics:
            known = pairs[f"eval/{metric}"]
            gap = None if name == base else interval([ours - theirs for ours, theirs in known])
            cells.append(Cell(values[f"eval/{metric}"], gap, metric_label(f"eval/{metric}")[1]))
        rows.append(Row(name, cells, *(values[metric][0] for metric in ROW_COSTS)))
    return rows


def equal_cost(runs: Sequence[Mapping[str, Any]], comparison: Comparison) -> float:
    """The budget; less where a run ended before it, at `max_steps`."""
    return min(comparison.amount, common_reading(runs, comparison.cost))


def explanation(runs: Sequence[Mapping[str, Any]], comparison: Comparison) -> str:
    """Describe the numbers of the table."""
    count, base = len({run["seed"] for run in runs}), comparison.arms[0].name
    if count < FEWEST_SEEDS:
        seeds = {1: "One seed", 2: "Two seeds"}[count]
        interval_says = (
            f"{seeds}: there is no interval, which needs {FEWEST_SEEDS} seeds, and a difference may be chance."
        )
    else:
        interval_says = f"± is the 95 % t-interval over {count} seeds."
    return (
        f"At {equal_cost(runs, comparison):,.0f} {LABELS[comparison.cost]}, read between evaluations; with a sign: "
        f"the difference to {base}, paired by seed. {interval_says}"
    )


def notes(runs: Sequence[Mapping[str, Any]], comparison: Comparison) -> list[str]:
    """Return notes on single arms, which are printed under the table."""
    return [*_other_starts(runs, comparison), *_thresholds(runs, comparison)]


def _thresholds(runs: Sequence[Mapping[str, Any]], comparison: Comparison) -> list[str]:
    """Return notes on success thresholds that no completion reached, or all of them, in training or evaluation."""
    found = []
    for arm in comparison.arms:
        steps = [step for run in runs if run["arm"] == arm.name for step in run["steps"]]
        note = threshold_note(steps)
        if note is not None:
            found.append(f"{arm.name}: {note}")
    successes = [f"eval/{metric}" for metric in comparison.metrics if metric.startswith(SUCCESSES)]
    values = [point[metric] for run in runs for point in run["points"] for metric in successes if metric in point]
    differ = any(step.get("reward_std", 0.0) > 0 for run in runs for step in run["steps"])
    if values and max(values) == 0 and differ:
        found.append(
            "No sample of any evaluation succeeded, although rewards differ. If a smaller reward is a success, lower "
            "`success_threshold` of the comparison, or compare `reward`."
        )
    return found


def _other_starts(runs: Sequence[Mapping[str, Any]], comparison: Comparison) -> list[str]:
    """Return a note on the arms that began at other values than the first arm."""
    base = comparison.arms[0].name
    others = other_starts(runs, base, [f"eval/{metric}" for metric in comparison.metrics])
    if not others:
        return []
    named = "; ".join(f"{arm} (seed {', '.join(map(str, sorted(seeds)))})" for arm, seeds in others.items())
    return [
        f"Began at other values than {base}: {named}. A tiny model that is trained first is another on another "
        "machine, by rounding. For a comparison from the same start, train all arms on one machine."
    ]


def headers(comparison: Comparison) -> list[str]:
    """Titles of the table's columns."""
    labels = [metric_label(f"eval/{metric}") for metric in comparison.metrics]
    shown = [f"{label} (%)" if scale == 100 else label for label, scale in labels]
    return ["arm", *shown, "tokens", "wall seconds", "CPU seconds", "wall s/step"]


def markdown_table(runs: Sequence[Mapping[str, Any]], comparison: Comparison) -> str:
    """Return the table as Markdown, with the explanation and the notes below it."""
    titles = headers(comparison)
    lines = [titles, ["---", *["---:"] * (len(titles) - 1)]]
    for row in summarize(runs, comparison):
        lines.append([row.arm, *(cell.text() for cell in row.cells), *row.texts()])
    parts = [_markdown(lines), explanation(runs, comparison)]
    parts += [f"- {note}" for note in notes(runs, comparison)]
    parts.append(_along_curves(runs, comparison))
    return "\n\n".join(parts) + _at_many_samples(runs, comparison)


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    escaped = [[text.replace("|", "\\|").replace("<", "&lt;") for text in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)


def _along_curves(runs: Sequence[Mapping[str, Any]], comparison: Comparison) -> str:
    """A table of the first metric's mean along the curve, for each kind of cost."""
    metric = f"eval/{comparison.metrics[0]}"
    label, scale = metric_label(metric)
    # A run whose groups never had contrast may have no token in the loss.
    readings = {cost: reading for cost in COSTS if (reading := common_reading(runs, cost)) > 0}
    curves = {(run["arm"], run["seed"]): run["points"] for run in runs}
    seeds = sorted({run["seed"] for run in runs})
    base = comparison.arms[0].name
    titles = ["arm", *(f"up to {reading:,.0f} {LABELS[cost]}" for cost, reading in readings.items())]
    lines = [titles, ["---", *["---:"] * len(readings)]]
    for name in (arm.name for arm in comparison.arms):
        texts = []
        for cost, reading in readings.items():
            ours, theirs = (
                [mean_along(curves[arm, seed], cost, reading, metric) for seed in seeds] for arm in (name, base)
            )
            gap = None if name == base else interval([a - b for a, b in zip(ours, theirs, strict=True)])
            texts.append(Cell(interval(ours), gap, scale).text())
        lines.append([name, *texts])
    unit = " (%)" if scale == 100 else ""
    head = (
        f"Mean along the curve of {label}{unit}, up to where the run that got least far stopped: of two arms that end "
        "alike, the one that rose earlier has more.\n\n"
    )
    return f"{head}{_markdown(lines)}\n"


def _at_many_samples(runs: Sequence[Mapping[str, Any]], comparison: Comparison) -> str:
    if comparison.samples_at_ends is None:
        return ""
    names = [arm.name for arm in comparison.arms]
    found = summarize_ends(runs, names, comparison.samples_at_ends)
    head = (
        f"\nAt the end of training, {comparison.samples_at_ends} samples per problem. Newly solved: no success before "
        "training and at least 5 after it, more than chance at 95 % (binomial test); newly lost: the reverse; "
        f"problems of {comparison.num_eval}, mean over seeds.\n\n"
    )
    return head + "\n".join(ends_table(found)) + "\n"


def rich_table(runs: Sequence[Mapping[str, Any]], comparison: Comparison) -> FittingTable:
    """Return the table for a terminal; differences stand below the values."""
    from rich.box import SIMPLE_HEAD

    base, rows = comparison.arms[0].name, []
    for row in summarize(runs, comparison):
        name = row.arm if row.arm == base else f"{row.arm}\n  - {base}"
        rows.append([name, *("\n".join(cell.texts()) for cell in row.cells), *row.texts()])
    options = {"box": SIMPLE_HEAD, "pad_edge": False, "padding": (0, 1, 0, 0)}
    return FittingTable(headers(comparison), rows, options)


def write_csv(runs: Sequence[Mapping[str, Any]], comparison: Comparison, path: Path) -> None:
    """Writes every evaluation of every run, one per line."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["arm", "seed", *COSTS, *comparison.metrics, *TRAINING])
        for run in runs:
            for point in run["points"]:
                costs = [round(point[name], 6) for name in COSTS]
                metrics = [point[f"eval/{metric}"] for metric in comparison.metrics]
                training = [point.get(f"train/{name}") for name in TRAINING]  # nothing before the first step
                writer.writerow([run["arm"], run["seed"], *costs, *metrics, *training])


def write_report(runs: Sequence[dict[str, Any]], comparison: Comparison, folder: Path) -> list[Path]:
    """Writes table, CSV and, where matplotlib is installed, the picture of finished runs with the same seeds."""
    files = [folder / TABLE, folder / f"{CURVES}.csv"]
    files[0].write_text(markdown_table(runs, comparison), encoding="utf-8")
    write_csv(runs, comparison, files[1])
    metrics = [f"eval/{metric}" for metric in comparison.metrics]
    subject = comparison.subject
    title = f"task {subject['task']}" if "task" in subject else str(subject["model_name_or_path"])
    # On a CPU other work, and other runs of this comparison, make wall seconds longer.
    on_cpu = comparison.common.get("use_cpu") and comparison.unit != "seconds"
    costs = ("tokens", "cpu_seconds" if on_cpu else "seconds")
    picture = folder / f"{CURVES}.png"
    try:
        learning_curves(runs, picture, metrics=metrics, costs=costs, title=title, suffixes=[".svg"])
    except ModuleNotFoundError:  # matplotlib
        return files
    return [*files, picture, picture.with_suffix(".svg")]
