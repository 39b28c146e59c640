"""Report of a comparison: a table at equal cost, and the learning curves as CSV, PNG and SVG."""

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
from trl_explore.compare.ends import ends_table, successes_at_start, summarize_ends
from trl_explore.compare.plots import LABELS, learning_curves, metric_label
from trl_explore.compare.run import TRAINING
from trl_explore.compare.settings import Comparison
from trl_explore.fitting_table import FittingTable
from trl_explore.rewards.threshold import threshold_note

SUCCESSES = ("pass_at_", "greedy_accuracy")  # metrics that count samples whose reward reaches the threshold
CURVES, TABLE = "curves", "table.md"
ROW_COSTS = ("tokens", "seconds", "cpu_seconds", "step")  # in the order of the fields of `Row`
# Columns of the CSV file, and of the table of means along the curves.
COSTS = ("step", "tokens", "trained_tokens", "seconds", "cpu_seconds")


@dataclass(frozen=True)
class Cell:
    """
    Metric of one arm at equal cost.

    Args:
        value (`tuple[float, float | None]`):
            Mean over seeds, and half the length of its 95 % interval (None with fewer than three seeds).
        difference (`tuple[float, float | None]` or `None`):
            Mean difference to the first arm, paired by seed, and half the length of its interval. None for the first
            arm.
        scale (`int`):
            Factor of the shown numbers: 100 for shares, 1 for rewards.
    """

    value: tuple[float, float | None]
    difference: tuple[float, float | None] | None
    scale: int

    def texts(self) -> list[str]:
        """Return the value as text, and the difference if there is one."""
        shown = [self._text(self.value, "")]
        if self.difference is not None:
            shown.append(self._text(self.difference, "+"))
        return shown

    def text(self) -> str:
        """Return the value, with the difference in parentheses if there is one."""
        value, *rest = self.texts()
        return value + "".join(f" ({difference})" for difference in rest)

    def _text(self, pair: tuple[float, float | None], sign: str) -> str:
        digits = 1 if self.scale == 100 else 3
        mean, half = pair
        text = f"{self.scale * mean:{sign}.{digits}f}"
        if half is None:
            return text
        return f"{text} ± {self.scale * half:.{digits}f}"


@dataclass(frozen=True)
class Row:
    """Row of the table: an arm, a cell per metric, and the arm's mean costs over seeds."""

    arm: str
    cells: list[Cell]
    tokens: float
    seconds: float  # wall time
    cpu_seconds: float
    steps: float

    def texts(self) -> list[str]:
        """Return the texts of the cost columns, in the order of `headers`."""
        per_step = self.seconds / max(self.steps, 1e-9)
        return [f"{self.tokens:,.0f}", f"{self.seconds:,.1f}", f"{self.cpu_seconds:,.1f}", f"{per_step:.2f}"]


def summarize(runs: Sequence[Mapping[str, Any]], comparison: Comparison) -> list[Row]:
    """Return a row per arm at equal cost, in the comparison's order; every arm needs the same seeds."""
    cost, reading = comparison.cost, equal_cost(runs, comparison)
    base = comparison.arms[0].name
    rows = []
    for arm in comparison.arms:
        cells = []
        for metric in _eval_metrics(comparison):
            pairs = paired_values(runs, arm.name, base, cost=cost, reading=reading, metric=metric)
            difference = None
            if arm.name != base:
                difference = interval([ours - theirs for ours, theirs in pairs])
            cells.append(Cell(interval([ours for ours, _ in pairs]), difference, metric_label(metric)[1]))
        mean_costs = []  # mean of each cost that the arm had spent at `reading`
        for row_cost in ROW_COSTS:
            pairs = paired_values(runs, arm.name, base, cost=cost, reading=reading, metric=row_cost)
            mean_costs.append(interval([ours for ours, _ in pairs])[0])
        rows.append(Row(arm.name, cells, *mean_costs))
    return rows


def _eval_metrics(comparison: Comparison) -> list[str]:
    """Return the comparison's metrics by their names in the points of a run, such as `eval/reward`."""
    return [f"eval/{metric}" for metric in comparison.metrics]


def equal_cost(runs: Sequence[Mapping[str, Any]], comparison: Comparison) -> float:
    """Return the cost at which to read all arms: the budget, or less if a run ended earlier at `max_steps`."""
    return min(comparison.amount, common_reading(runs, comparison.cost))


def explanation(runs: Sequence[Mapping[str, Any]], comparison: Comparison) -> str:
    """Return the sentences under the table that describe its numbers."""
    count, base = len({run["seed"] for run in runs}), comparison.arms[0].name
    if count < FEWEST_SEEDS:
        seeds = {1: "One seed", 2: "Two seeds"}[count]
        interval_says = (
            f"{seeds}: there is no interval, which needs {FEWEST_SEEDS} seeds, and a difference may be chance."
        )
    else:
        interval_says = f"± is the 95 % t-interval over {count} seeds."
    return (
        f"At {equal_cost(runs, comparison):,.0f} {LABELS[comparison.cost]}, interpolated between evaluations. With a "
        f"sign: the difference to {base}, paired by seed. {interval_says}"
    )


def notes(runs: Sequence[Mapping[str, Any]], comparison: Comparison) -> list[str]:
    """Return notes on single arms, which are printed under the table."""
    return [*_other_starts(runs, comparison), *_thresholds(runs, comparison)]


def _thresholds(runs: Sequence[Mapping[str, Any]], comparison: Comparison) -> list[str]:
    """Return notes on success thresholds that separate no completions: in training, no completion or every completion
    reached the threshold, or in evaluation, no sample did."""
    found = []
    for arm in comparison.arms:
        steps = []
        for run in runs:
            if run["arm"] == arm.name:
                steps += run["steps"]
        note = threshold_note(steps)
        if note is not None:
            found.append(f"{arm.name}: {note}")
    successes = [f"eval/{metric}" for metric in comparison.metrics if metric.startswith(SUCCESSES)]
    values, rewards_differ = [], False
    for run in runs:
        for point in run["points"]:
            values += [point[metric] for metric in successes if metric in point]
        rewards_differ |= any(step.get("reward_std", 0.0) > 0 for step in run["steps"])
    if values and max(values) == 0 and rewards_differ:
        found.append(
            "No sample of any evaluation succeeded, although rewards differ. If a smaller reward is a success, lower "
            "`success_threshold` of the comparison, or compare `reward`."
        )
    return found


def _other_starts(runs: Sequence[Mapping[str, Any]], comparison: Comparison) -> list[str]:
    """Return a list with a note on the arms whose first evaluation differed from the first arm's, or an empty list."""
    base = comparison.arms[0].name
    others = other_starts(runs, base, _eval_metrics(comparison))
    if not others:
        return []
    named = "; ".join(f"{arm} (seed {', '.join(map(str, sorted(seeds)))})" for arm, seeds in others.items())
    return [
        f"Began at other values than {base}: {named}. So something differed before the training, and the difference "
        "to the first arm is not due to the training alone. Possible reasons: an option of the arm also changes the "
        "evaluation, such as `temperature` or `max_completion_length`; the arms ran on different machines, which "
        "round differently; or the same seed gives other samples, as with vLLM. For a comparison from the same "
        "start, train all arms on one machine with the same sampling options."
    ]


def headers(comparison: Comparison) -> list[str]:
    """Return the titles of the table's columns."""
    shown = [_title(metric) for metric in _eval_metrics(comparison)]
    return ["arm", *shown, "tokens", "wall seconds", "CPU seconds", "wall s/step"]


def _title(metric: str) -> str:
    label, scale = metric_label(metric)
    if scale == 100:
        return f"{label} (%)"
    return label


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
    """Return lines of cells as a Markdown table. Escape characters of an arm's name that would change the table."""
    rows = []
    for line in lines:
        cells = " | ".join(text.replace("|", "\\|").replace("<", "&lt;") for text in line)
        rows.append(f"| {cells} |")
    return "\n".join(rows)


def _along_curves(runs: Sequence[Mapping[str, Any]], comparison: Comparison) -> str:
    """Return a Markdown table of the first metric's mean along the curve, with a column per kind of cost."""
    metric = _eval_metrics(comparison)[0]
    scale = metric_label(metric)[1]
    readings = {}
    for cost in COSTS:
        reading = common_reading(runs, cost)
        # If the rewards of each group are equal, a run trains on no token. There is no mean up to 0 trained tokens.
        if reading > 0:
            readings[cost] = reading
    curves = {(run["arm"], run["seed"]): run["points"] for run in runs}
    seeds = sorted({run["seed"] for run in runs})
    base = comparison.arms[0].name
    titles = ["arm", *(f"up to {reading:,.0f} {LABELS[cost]}" for cost, reading in readings.items())]
    lines = [titles, ["---", *["---:"] * len(readings)]]
    for arm in comparison.arms:
        texts = []
        for cost, reading in readings.items():
            means, differences = [], []
            for seed in seeds:
                mean = mean_along(curves[arm.name, seed], cost, reading, metric)
                means.append(mean)
                differences.append(mean - mean_along(curves[base, seed], cost, reading, metric))
            difference = None if arm.name == base else interval(differences)
            texts.append(Cell(interval(means), difference, scale).text())
        lines.append([arm.name, *texts])
    head = (
        f"Mean along the curve of {_title(metric)}, up to the largest cost that every run reached. If two curves end "
        "at the same value, the curve that rose earlier has the larger mean.\n\n"
    )
    return f"{head}{_markdown(lines)}\n"


def _at_many_samples(runs: Sequence[Mapping[str, Any]], comparison: Comparison) -> str:
    """Return the Markdown table of the results from `samples_at_ends` samples, or "" if none were taken."""
    if comparison.samples_at_ends is None:
        return ""
    names = [arm.name for arm in comparison.arms]
    found = summarize_ends(runs, names, comparison.samples_at_ends)
    if not found:
        return f"\nNo run took {comparison.samples_at_ends} samples per problem before training.\n"
    left_out = sorted({run["seed"] for run in runs} - successes_at_start(runs).keys())
    note = ""
    if left_out:
        note = f" Seeds without such samples before training do not count: {', '.join(map(str, left_out))}."
    num_problems = len(runs[0]["points"][-1]["end_correct"])  # fewer than `num_eval` if the split has fewer rows
    head = (
        f"\n{comparison.samples_at_ends} samples per problem, at the end of training. A problem is newly solved if it "
        "had no success before training and at least 5 after it, a significant difference at 5 % (binomial test). It "
        f"is newly lost if it is the other way round. Mean numbers over seeds, of {num_problems} problems."
        f"{note}\n\n"
    )
    return head + "\n".join(ends_table(found)) + "\n"


def rich_table(runs: Sequence[Mapping[str, Any]], comparison: Comparison) -> FittingTable:
    """Return the table for a terminal, with each difference on a line below its value."""
    from rich.box import SIMPLE_HEAD

    base, rows = comparison.arms[0].name, []
    for row in summarize(runs, comparison):
        name = row.arm
        if name != base:
            name = f"{name}\n  - {base}"
        rows.append([name, *("\n".join(cell.texts()) for cell in row.cells), *row.texts()])
    options = {"box": SIMPLE_HEAD, "pad_edge": False, "padding": (0, 1, 0, 0)}
    return FittingTable(headers(comparison), rows, options)


def write_csv(runs: Sequence[Mapping[str, Any]], comparison: Comparison, path: Path) -> None:
    """Write a CSV file with a line per evaluation of each run."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["arm", "seed", *COSTS, *comparison.metrics, *TRAINING])
        for run in runs:
            for point in run["points"]:
                costs = [round(point[name], 6) for name in COSTS]
                metrics = [point[metric] for metric in _eval_metrics(comparison)]
                training = [point.get(f"train/{name}") for name in TRAINING]  # None before the first training step
                writer.writerow([run["arm"], run["seed"], *costs, *metrics, *training])


def write_report(runs: Sequence[dict[str, Any]], comparison: Comparison, folder: Path) -> list[Path]:
    """
    Write the report: the table, the CSV file, and the pictures if matplotlib is installed.

    Args:
        runs (`Sequence[dict[str, Any]]`):
            Finished runs; every arm has the same seeds.
        comparison ([`~trl_explore.compare.settings.Comparison`]):
            Comparison of the runs.
        folder (`Path`):
            Folder to write the files to.

    Returns:
        `list[Path]`: The files.
    """
    files = [folder / TABLE, folder / f"{CURVES}.csv"]
    files[0].write_text(markdown_table(runs, comparison), encoding="utf-8")
    write_csv(runs, comparison, files[1])
    metrics = _eval_metrics(comparison)
    subject = comparison.subject
    if "task" in subject:
        title = f"task {subject['task']}"
    else:
        title = str(subject["model_name_or_path"])
    time_cost = "seconds"
    if comparison.common.get("use_cpu") and comparison.unit != "seconds":
        time_cost = "cpu_seconds"  # on a CPU, other work and the other runs make wall seconds longer
    costs = ("tokens", time_cost)
    picture = folder / f"{CURVES}.png"
    try:
        learning_curves(runs, picture, metrics=metrics, costs=costs, title=title, suffixes=[".svg"])
    except ModuleNotFoundError:  # matplotlib is an optional dependency
        return files
    return [*files, picture, picture.with_suffix(".svg")]
