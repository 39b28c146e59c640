"""Results of `regimes.py` as CSV: one line per evaluation, with all that decides what it may be compared with."""

import csv
import hashlib
import json
import os
import statistics
import subprocess
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

import trl_explore
from trl_explore.compare.run import TRAINING, Run
from trl_explore.runs.tasks import find_run_task

SECONDS = ("seconds", "cpu_seconds")
COSTS = ("step", "tokens", "trained_tokens", *SECONDS)
SUCCESSES = ("correct", "greedy_correct")
MANY = "end_correct"  # successes of many samples, as two digits of base 36 each
HEAD = ("stage", "arm", "seed", "settings", "options", "version")
TASKS = "examples.benchmarks.tasks:"
MOST_SAMPLES = 35  # successes of a problem are one digit of base 36

Row = dict[str, Any]


def settings_of(document: Mapping[str, Any], arm: Mapping[str, Any]) -> str:
    """
    What a run's outcome depends on, apart from its seed and the code.

    Args:
        document (`Mapping`):
            The comparison.
        arm (`Mapping`):
            One of its arms.

    Returns:
        `str`: Eight hexadecimal digits.
    """
    common = {name: value for name, value in document.items() if name not in ("seeds", "arms")}
    if str(common.get("task")).startswith(TASKS):
        common["task"] = find_run_task(common["task"]).name  # results are older than the import path of a task
    text = json.dumps([common, arm["method"], arm["options"]], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


@lru_cache
def version() -> str:
    """The package's version, and its commit where it is a checkout; `+` for code that is not committed."""
    place = ["git", "-C", str(Path(trl_explore.__file__).parent)]
    commit = subprocess.run([*place, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    if commit.returncode:
        return trl_explore.__version__
    clean = subprocess.run([*place, "diff", "--quiet", "HEAD", "--", ".", "../trainers"], check=False)
    return f"{trl_explore.__version__} {commit.stdout.strip()}{'+' if clean.returncode else ''}"


def read_results(path: Path) -> list[Row]:
    """
    Reads results.

    Args:
        path (`Path`):
            A CSV file that [`write_results`] wrote; it may be missing.

    Returns:
        `list[dict]`: One entry per evaluation.
    """
    if not path.is_file():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        rows: list[Row] = list(csv.DictReader(file))
    for row in rows:
        for name, text in row.items():
            if name in SUCCESSES:
                row[name] = [int(count, 36) for count in text]
            elif name == MANY:
                row[name] = [int(text[start : start + 2], 36) for start in range(0, len(text), 2)]
            elif name not in HEAD:
                row[name] = float(text) if text else None
        row["seed"] = int(row["seed"])
    return rows


def write_results(path: Path, rows: list[Row], metrics: list[str]) -> None:
    """
    Writes results, whole or not at all.

    Args:
        path (`Path`):
            The CSV file.
        rows (`list[dict]`):
            One entry per evaluation.
        metrics (`list[str]`):
            What was measured.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    with open(part, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*HEAD, *COSTS, *metrics, *TRAINING, *SUCCESSES, MANY])
        writer.writeheader()
        for row in rows:
            texts = {name: "".join(np.base_repr(count, 36) for count in row[name]) for name in SUCCESSES}
            texts[MANY] = "".join(np.base_repr(count, 36).zfill(2) for count in row.get(MANY, []))
            writer.writerow({name: _short(value) for name, value in row.items()} | texts)
    os.replace(part, path)


def _short(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) and abs(value) < 1000 else value


def to_rows(run: Run, stage: str, arm: Mapping[str, Any], *, settings: str, metrics: list[str]) -> list[Row]:
    """
    A run as lines of a results file.

    Args:
        run ([`~trl_explore.compare.run.Run`]):
            The run.
        stage (`str`):
            What it was for. Only those of the verdicts keep their successes by problem.
        arm (`Mapping`):
            Its arm.
        settings (`str`):
            What [`settings_of`] returned.
        metrics (`list[str]`):
            What was measured.

    Returns:
        `list[dict]`: One entry per evaluation.
    """
    options = json.dumps(arm["options"], sort_keys=True)
    head = dict(zip(HEAD, (stage, run.arm, run.seed, settings, options, version()), strict=True))
    keeps = stage in ("admission", "collapse", "verdict")
    return [
        head
        | {name: point[name] for name in COSTS}
        | {metric: point[f"eval/{metric}"] for metric in metrics}
        | {name: point.get(f"train/{name}") for name in TRAINING}
        | {name: point.get(name, []) if keeps else [] for name in (*SUCCESSES, MANY)}
        for point in run.points
    ]


def to_runs(rows: list[Row], stage: str) -> list[Run]:
    """
    The runs of a results file.

    Args:
        rows (`list[dict]`):
            Its lines.
        stage (`str`):
            Which runs.

    Returns:
        `list[Run]`: In the order of the file, without the logs of their steps.
    """
    runs: dict[tuple[str, int], Run] = {}
    for row in rows:
        if row["stage"] == stage:
            run = runs.setdefault((row["arm"], row["seed"]), Run(row["arm"], row["seed"], [], []))
            run.points.append({name: row[name] for name in (*COSTS, *SUCCESSES)} | dict(_measured(row)))
            if row.get(MANY):
                run.points[-1][MANY] = row[MANY]
    return list(runs.values())


def timed_alike(rows: list[Row]) -> list[Row]:
    """
    Results whose verdicts took the seconds that the stage *seconds*, in which all arms ran in one sitting, took for as
    many tokens. Of several runs of an arm it is their mean: how much a method explores, and so what a token costs,
    depends on the seed.

    Args:
        rows (`list[dict]`):
            Lines of a results file.

    Returns:
        `list[dict]`: `rows` itself where an arm of the verdicts was not timed with the others.
    """
    timed: dict[tuple[str, str], dict[int, list[Row]]] = {}
    for row in rows:
        if row["stage"] == "seconds":
            timed.setdefault((row["arm"], row["settings"]), {}).setdefault(row["seed"], []).append(row)
    if any((row["arm"], row["settings"]) not in timed for row in rows if row["stage"] == "verdict"):
        return rows

    def again(row: Row) -> Row:
        if row["stage"] != "verdict":
            return row
        runs = timed[row["arm"], row["settings"]].values()
        return row | {name: statistics.mean(_spent(of, name, row["tokens"]) for of in runs) for name in SECONDS}

    return [again(row) for row in rows]


def _spent(points: list[Row], name: str, tokens: float) -> float:
    """A run's cost at so many tokens, between its evaluations, and beyond the last at the same price."""
    known = [point["tokens"] for point in points]
    return max(tokens / known[-1], 1.0) * float(np.interp(tokens, known, [point[name] for point in points]))


def _measured(row: Row) -> Iterator[tuple[str, float]]:
    for name, value in row.items():
        if name in TRAINING and value is not None:
            yield f"train/{name}", value
        elif name not in (*HEAD, *COSTS, *SUCCESSES, MANY, *TRAINING):
            yield f"eval/{name}", value
