"""Read and write the results of `regimes.py`, one CSV file per regime.

A file has one line per evaluation of a run. Each line names the run's stage, arm and seed, a hash of its settings, the
arm's options and the version of the code. A reader needs these columns to decide which runs may be compared.
"""

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

RUN_COLUMNS = ("stage", "arm", "seed", "settings", "options", "version")  # describe the run, not the evaluation
SECONDS = ("seconds", "cpu_seconds")  # wall seconds and CPU seconds of training
COSTS = ("step", "tokens", "trained_tokens", *SECONDS)
# Successes per held-out problem: of the usual samples, and of greedy decoding. A number is one digit of base 36.
SUCCESSES = ("correct", "greedy_correct")
MOST_SAMPLES = 35  # largest number of samples per problem for which one digit of base 36 can hold the successes
# Successes per held-out problem out of `samples_at_ends` samples. A number is two digits of base 36.
END_SUCCESSES = "end_correct"
REPORTED_STAGES = ("admission", "collapse", "verdict")  # run on the verdict seeds; their lines have successes
TASK_MODULE = "examples.benchmarks.tasks:"

Row = dict[str, Any]


def settings_of(document: Mapping[str, Any], arm: Mapping[str, Any]) -> str:
    """
    Return a hash of all settings that change the result of a run, except its seed.

    Args:
        document (`Mapping`):
            The comparison that the run belongs to. Its seeds and its list of arms are ignored.
        arm (`Mapping`):
            The arm of the run, with `method` and `options`.

    Returns:
        `str`: Eight hexadecimal digits.
    """
    common = {name: value for name, value in document.items() if name not in ("seeds", "arms")}
    if str(common.get("task")).startswith(TASK_MODULE):
        # Older results were hashed with the name of a task instead of its import path. Their hashes must still match.
        common["task"] = find_run_task(common["task"]).name
    text = json.dumps([common, arm["method"], arm["options"]], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


@lru_cache
def version() -> str:
    """Return the version of the package. In a git checkout, add the commit, and `+` if tracked code was changed."""
    git = ["git", "-C", str(Path(trl_explore.__file__).parent)]
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    if commit.returncode:
        return trl_explore.__version__
    difference = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", ".", "../trainers"], check=False)
    mark = "+" if difference.returncode else ""
    return f"{trl_explore.__version__} {commit.stdout.strip()}{mark}"


def read_results(path: Path) -> list[Row]:
    """
    Read a results file.

    Args:
        path (`Path`):
            A CSV file that [`write_results`] wrote.

    Returns:
        `list[dict]`: One entry per evaluation. Empty if the file does not exist.
    """
    if not path.is_file():
        return []
    version = path.stat()
    return [dict(row) for row in _parse(path.resolve(), version.st_mtime_ns, version.st_size)]


@lru_cache(maxsize=32)  # reports read a file several times, and a file has thousands of rows
def _parse(path: Path, modified: int, size: int) -> list[Row]:
    """Read a results file. `modified` and `size` only tell versions of the file apart."""
    with open(path, newline="", encoding="utf-8") as file:
        rows: list[Row] = list(csv.DictReader(file))
    for row in rows:
        for column, text in row.items():
            row[column] = _parse_cell(column, text)
    return rows


def _parse_cell(column: str, text: str) -> Any:
    """Return the value that a cell of a results file holds. An empty cell of a number is None."""
    if column == "seed":
        return int(text)
    if column in RUN_COLUMNS:
        return text
    if column in SUCCESSES:
        return [int(digit, 36) for digit in text]
    if column == END_SUCCESSES:
        return [int(text[start : start + 2], 36) for start in range(0, len(text), 2)]
    return float(text) if text else None


def write_results(path: Path, rows: list[Row], metrics: list[str]) -> None:
    """
    Write a results file. If writing fails, `path` keeps its former content.

    Args:
        path (`Path`):
            The CSV file. Its folder is created if necessary.
        rows (`list[dict]`):
            One entry per evaluation.
        metrics (`list[str]`):
            Names of the metrics, which are columns of the file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    with open(part, "w", newline="", encoding="utf-8") as file:
        known = [*RUN_COLUMNS, *COSTS, *TRAINING, *SUCCESSES, END_SUCCESSES]
        measured = dict.fromkeys(metrics)
        for row in rows:  # rows of other stages may have further metrics
            measured |= dict.fromkeys(name for name in row if name not in known)
        columns = [*RUN_COLUMNS, *COSTS, *measured, *TRAINING, *SUCCESSES, END_SUCCESSES]
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        for row in rows:
            cells = {column: _shorten(value) for column, value in row.items()}
            for column in SUCCESSES:
                cells[column] = "".join(np.base_repr(count, 36) for count in row[column])
            cells[END_SUCCESSES] = "".join(np.base_repr(count, 36).zfill(2) for count in row.get(END_SUCCESSES, []))
            writer.writerow(cells)
    os.replace(part, path)


def _shorten(value: Any) -> Any:
    """Return a float below 1000 as text with six significant digits, and any other value unchanged."""
    return f"{value:.6g}" if isinstance(value, float) and abs(value) < 1000 else value


def to_rows(run: Run, stage: str, arm: Mapping[str, Any], *, settings: str, metrics: list[str]) -> list[Row]:
    """
    Convert a run to lines of a results file.

    Args:
        run ([`~trl_explore.compare.run.Run`]):
            The run.
        stage (`str`):
            Stage that the run belongs to. Successes per problem are kept only for the stages in `REPORTED_STAGES`.
        arm (`Mapping`):
            Arm of the run, with `options`.
        settings (`str`):
            Hash of the run's settings, from [`settings_of`].
        metrics (`list[str]`):
            Names of the metrics to keep.

    Returns:
        `list[dict]`: One entry per evaluation.
    """
    options = json.dumps(arm["options"], sort_keys=True)
    keeps_successes = stage in REPORTED_STAGES
    rows = []
    for point in run.points:
        row = dict(zip(RUN_COLUMNS, (stage, run.arm, run.seed, settings, options, version()), strict=True))
        row |= {name: point[name] for name in COSTS}
        row |= {metric: point[f"eval/{metric}"] for metric in metrics}
        row |= {name: point.get(f"train/{name}") for name in TRAINING}
        for name in (*SUCCESSES, END_SUCCESSES):
            row[name] = point.get(name, []) if keeps_successes else []
        rows.append(row)
    return rows


def to_runs(rows: list[Row], stage: str) -> list[Run]:
    """
    Convert lines of a results file to runs.

    Args:
        rows (`list[dict]`):
            Lines of a results file.
        stage (`str`):
            Stage whose runs to return.

    Returns:
        `list[Run]`: The runs in the order of the file. Their `steps` are empty, because the file has no training logs.
    """
    runs: dict[tuple[str, int], Run] = {}
    for row in rows:
        if row["stage"] == stage:
            run = runs.setdefault((row["arm"], row["seed"]), Run(row["arm"], row["seed"], [], []))
            point = {name: row[name] for name in (*COSTS, *SUCCESSES)} | dict(_metrics_of(row))
            if row.get(END_SUCCESSES):
                point[END_SUCCESSES] = row[END_SUCCESSES]
            run.points.append(point)
    return list(runs.values())


def by_arm_and_seed(rows: list[Row], stage: str) -> dict[str, dict[int, list[Row]]]:
    """Return the lines of a stage, by arm and seed, in the order of the file."""
    runs: dict[str, dict[int, list[Row]]] = {}
    for row in rows:
        if row["stage"] == stage:
            runs.setdefault(row["arm"], {}).setdefault(row["seed"], []).append(row)
    return runs


def timed_alike(rows: list[Row]) -> list[Row]:
    """
    Replace the seconds of verdict runs by seconds that were measured under equal conditions.

    Verdict runs are trained at different times, when the machine is not equally fast. The stage *seconds* trains all
    arms one after another in one sitting. This function gives each verdict evaluation the seconds that the arm took in
    that stage for the same number of tokens. If an arm was timed on several seeds, the function takes their mean: the
    seconds per token depend on how much a method explores, which differs between seeds.

    Args:
        rows (`list[dict]`):
            Lines of a results file.

    Returns:
        `list[dict]`: The lines with replaced seconds. If an arm of the verdict stage was not timed with the same
        settings, `rows` itself, unchanged.
    """
    timed: dict[tuple[str, str], dict[int, list[Row]]] = {}  # arm and settings: seed: evaluations
    for row in rows:
        if row["stage"] == "seconds":
            runs_by_seed = timed.setdefault((row["arm"], row["settings"]), {})
            runs_by_seed.setdefault(row["seed"], []).append(row)
    for row in rows:
        if row["stage"] == "verdict" and (row["arm"], row["settings"]) not in timed:
            return rows
    replaced = []
    for row in rows:
        if row["stage"] == "verdict":
            timed_runs = timed[row["arm"], row["settings"]].values()
            seconds = {}
            for name in SECONDS:
                seconds[name] = statistics.mean(_seconds_at(run, name, row["tokens"]) for run in timed_runs)
            row = row | seconds
        replaced.append(row)
    return replaced


def _seconds_at(evaluations: list[Row], name: str, tokens: float) -> float:
    """
    Return the seconds that a run took to generate a number of tokens.

    The seconds are interpolated between evaluations. After the last evaluation, a token costs the average of the run.

    Args:
        evaluations (`list[dict]`):
            Lines of the run.
        name (`str`):
            `"seconds"` or `"cpu_seconds"`.
        tokens (`float`):
            Number of generated tokens.
    """
    known = [row["tokens"] for row in evaluations]
    extrapolation = max(tokens / known[-1], 1.0)
    return extrapolation * float(np.interp(tokens, known, [row[name] for row in evaluations]))


def _metrics_of(row: Row) -> Iterator[tuple[str, float]]:
    """Yield name and value of each metric in a line, with the prefix `train/` or `eval/` that a run's points have."""
    for name, value in row.items():
        if name in TRAINING and value is not None:
            yield f"train/{name}", value
        elif value is not None and name not in (*RUN_COLUMNS, *COSTS, *SUCCESSES, END_SUCCESSES, *TRAINING):
            yield f"eval/{name}", value
