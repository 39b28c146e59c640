"""A stage of a benchmark: `trl-explore compare` trains the runs that a results file lacks, and the file gets them.

A results file keeps the runs of all stages. So a run that is in it is not trained again, also on another machine.
"""

import csv
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regimes_results import Row, read_results, settings_of, to_rows, to_runs, write_results

from trl_explore.cli import main
from trl_explore.compare.folder import RESULT, SETTINGS, ComparisonFolder
from trl_explore.compare.run import Run
from trl_explore.compare.settings import read_comparison
from trl_explore.errors import UsageError
from trl_explore.names import unknown_name

Key = tuple[str, int]  # arm and seed of a run
STEP_METRICS = ("step", "tokens", "reward", "entropy", "frac_reward_zero_std", "completions/mean_length")


@dataclass(frozen=True)
class Stage:
    """
    Runs with a common purpose, and the results file that keeps them.

    Args:
        name (`str`):
            Name of the stage in the results file.
        document (`Mapping`):
            The comparison, with all seeds and all arms of the stage.
        results (`Path`):
            The results file.
        folder (`Path`):
            Folder for checkpoints. The stage gets a folder in it.
        steps (`Path`, *optional*):
            CSV file for logs of the training steps, see [`is_kept`].
        arms (`Sequence[str]`, *optional*):
            Names of the arms to train. None: all.
        seeds (`Sequence[int]`, *optional*):
            Seeds to train. None: all.
        evaluated (`Mapping`, *optional*):
            Fields that replace those of `document` while the runs are trained. They may change only the evaluation.

    Raises:
        UsageError: If the stage has no arm with a name in `arms`.
    """

    name: str
    document: Mapping[str, Any]
    results: Path
    folder: Path
    steps: Path | None = None
    arms: Sequence[str] | None = None
    seeds: Sequence[int] | None = None
    evaluated: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = [arm["name"] for arm in self.document["arms"]]
        for name in self.arms or ():
            if name not in known:
                raise UsageError(f"stage {self.name}: {unknown_name('arm', name, known)}")

    @property
    def trained(self) -> dict[str, Any]:
        """The comparison with only the arms and seeds to train."""
        arms = [arm for arm in self.document["arms"] if self.arms is None or arm["name"] in self.arms]
        seeds = self.document["seeds"] if self.seeds is None else list(self.seeds)
        return {**self.document, "arms": arms, "seeds": seeds}

    @property
    def place(self) -> ComparisonFolder:
        """Folder of the runs to train. It has another name if a setting changes."""
        settings = {arm["name"]: settings_of(self.document, arm) for arm in self.trained["arms"]}
        whole = settings_of(self.document, {"method": self.name, "options": settings})
        comparison = read_comparison({**self.trained, **self.evaluated})
        return ComparisonFolder(comparison, self.folder / f"{self.name.replace(' ', '-')}-{whole}")

    def valid(self, rows: list[Row]) -> list[Row]:
        """Return the rows without rows of this stage whose settings, arm or seed the comparison does not have."""
        settings = {arm["name"]: settings_of(self.document, arm) for arm in self.document["arms"]}
        found = []
        for row in rows:
            is_asked = row["settings"] == settings.get(row["arm"]) and row["seed"] in self.document["seeds"]
            if row["stage"] != self.name or is_asked:
                found.append(row)
        return found

    def finished(self, rows: list[Row]) -> dict[Key, Run]:
        """Return the runs of this stage in valid rows, by arm and seed."""
        return {(run.arm, run.seed): run for run in to_runs(self.valid(rows), self.name)}

    def missing(self, rows: list[Row]) -> list[Key]:
        """Return arm and seed of the runs to train that the rows lack."""
        finished = self.finished(rows)
        keys = [(arm["name"], seed) for arm in self.trained["arms"] for seed in self.trained["seeds"]]
        return [key for key in keys if key not in finished]

    def collect(self) -> None:
        """Add the finished runs in the folder to the results file, and remove invalid rows from the file."""
        found = read_results(self.results)
        rows, missing, place = self.valid(found), self.missing(found), self.place
        metrics = list(place.comparison.metrics)
        for given, arm in zip(self.trained["arms"], place.comparison.arms, strict=True):
            settings = settings_of(self.document, given)
            for seed in place.comparison.seeds:
                path = place.of_run(arm, seed) / RESULT
                if (arm.name, seed) in missing and path.is_file():
                    run = Run.load(path)
                    if self.steps is not None:
                        add_steps(self.steps, self.name, run)
                    rows += to_rows(run, self.name, given, settings=settings, metrics=metrics)
        if rows != found:
            write_results(self.results, rows, metrics)

    def train(self, *, processes: int | None = None) -> None:
        """
        Train the missing runs, and add them to the results file.

        Args:
            processes (`int`, *optional*):
                Number of runs to train at a time. None: one, in this process.

        Raises:
            SystemExit: If `trl-explore compare` failed or was interrupted. The results file has the finished runs.
        """
        self.collect()
        rows = read_results(self.results)
        if not self.missing(rows):
            return
        place, finished = self.place, self.finished(rows)
        place.write_settings()
        for arm in place.comparison.arms:
            for seed in place.comparison.seeds:
                path = place.of_run(arm, seed)
                if (arm.name, seed) in finished and not (path / RESULT).is_file():
                    path.mkdir(parents=True, exist_ok=True)
                    finished[arm.name, seed].save(path / RESULT)  # so `compare` does not train it again
        print(f"{self.results.stem}: {self.name}", flush=True)
        command = ["compare", "--config", str(place.path / SETTINGS), "--output_dir", str(place.path)]
        if processes:
            command += ["--processes", str(processes)]
        code = main(command)
        self.collect()
        if code:
            sys.exit(code)


def add_steps(path: Path, stage: str, run: Run) -> None:
    """Add the logs of a run's training steps to a CSV file, one row per step."""
    rows = read_steps(path)
    for logs in run.steps:
        row = {"stage": stage, "arm": run.arm, "seed": str(run.seed)}
        for name, value in logs.items():
            if is_kept(name):
                row[name] = f"{value:.6g}"
        rows.append(row)
    columns: dict[str, None] = {}
    for row in rows:
        columns |= dict.fromkeys(row)  # in the order of their first appearance
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def is_kept(name: str) -> bool:
    """Return whether the file of steps has a metric: it is in `STEP_METRICS`, or it is the share of an explorer."""
    return name in STEP_METRICS or name.startswith("explore/share/")


def read_steps(path: Path) -> list[dict[str, str]]:
    """Return the rows of a file of steps. Empty if the file does not exist."""
    if not path.is_file():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
