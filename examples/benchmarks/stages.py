"""A stage of a benchmark: train the runs that are missing from a results file, and add them to the file.

A results file has the runs of all stages. A run in it is not trained again, even on another machine.
"""

import csv
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from regimes_results import Row, read_results, settings_of, to_rows, to_runs, write_results

from trl_explore.cli import main
from trl_explore.compare.folder import RESULT, SETTINGS, ComparisonFolder
from trl_explore.compare.run import Run
from trl_explore.compare.settings import read_comparison
from trl_explore.errors import UsageError
from trl_explore.names import unknown_name
from trl_explore.saving.whole_files import whole_file

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
        evaluation (`Mapping`, *optional*):
            Fields that replace those of `document` while the runs are trained. They may change only the evaluation.

    Raises:
        UsageError: If the stage has no arm with a name in `arms`, or no seed in `seeds`.
    """

    name: str
    document: Mapping[str, Any]
    results: Path
    folder: Path
    steps: Path | None = None
    arms: Sequence[str] | None = None
    seeds: Sequence[int] | None = None
    evaluation: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = [arm["name"] for arm in self.document["arms"]]
        for name in self.arms or ():
            if name not in known:
                raise UsageError(f"stage {self.name}: {unknown_name('arm', name, known)}")
        unknown = set(self.seeds or ()) - set(self.document["seeds"])
        if unknown:
            raise UsageError(f"stage {self.name}: it does not have the seeds {sorted(unknown)}")

    @property
    def selected(self) -> dict[str, Any]:
        """The comparison with only the arms and seeds to train."""
        arms = [arm for arm in self.document["arms"] if self.arms is None or arm["name"] in self.arms]
        seeds = self.document["seeds"] if self.seeds is None else list(self.seeds)
        return {**self.document, "arms": arms, "seeds": seeds}

    @property
    def runs_folder(self) -> ComparisonFolder:
        """Folder of the runs to train. Its name depends on the settings and on the choice of arms and seeds."""
        settings: dict[str, Any] = {"seeds": self.selected["seeds"]}
        settings |= {arm["name"]: settings_of(self.document, arm) for arm in self.selected["arms"]}
        # `settings_of` hashes any options, so it also makes one hash of these hashes.
        settings_hash = settings_of(self.document, {"method": self.name, "options": settings})
        comparison = read_comparison({**self.selected, **self.evaluation})
        return ComparisonFolder(comparison, self.folder / f"{self.name.replace(' ', '-')}-{settings_hash}")

    def without_stale(self, rows: list[Row]) -> list[Row]:
        """Drop the rows of this stage whose settings, arm or seed the comparison does not have. Keep all others."""
        settings = {arm["name"]: settings_of(self.document, arm) for arm in self.document["arms"]}
        found = []
        for row in rows:
            is_asked = row["settings"] == settings.get(row["arm"]) and row["seed"] in self.document["seeds"]
            if row["stage"] != self.name or is_asked:
                found.append(row)
        return found

    def finished(self, rows: list[Row]) -> dict[Key, Run]:
        """Return the runs of this stage with the settings of the comparison, by arm and seed."""
        return {(run.arm, run.seed): run for run in to_runs(self.without_stale(rows), self.name)}

    def missing(self, rows: list[Row]) -> list[Key]:
        """Return arm and seed of the runs to train that the rows lack."""
        finished = self.finished(rows)
        keys = [(arm["name"], seed) for arm in self.selected["arms"] for seed in self.selected["seeds"]]
        return [key for key in keys if key not in finished]

    def collect(self) -> None:
        """Add the finished runs in the folder to the results file. A run replaces its rows with other settings."""
        rows, folder = read_results(self.results), self.runs_folder
        metrics = list(folder.comparison.metrics)
        missing = self.missing(rows)
        is_changed = False
        for given, arm in zip(self.selected["arms"], folder.comparison.arms, strict=True):
            settings = settings_of(self.document, given)
            for seed in folder.comparison.seeds:
                path = folder.of_run(arm, seed) / RESULT
                if (arm.name, seed) not in missing or not path.is_file():
                    continue
                run = Run.load(path)
                if self.steps is not None:
                    add_steps(self.steps, self.name, run)
                rows = [row for row in rows if (row["stage"], row["arm"], row["seed"]) != (self.name, arm.name, seed)]
                rows += to_rows(run, self.name, given, settings=settings, metrics=metrics)
                is_changed = True
        if is_changed:
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
        folder, finished = self.runs_folder, self.finished(rows)
        folder.write_settings()
        for arm in folder.comparison.arms:
            for seed in folder.comparison.seeds:
                path = folder.of_run(arm, seed)
                if (arm.name, seed) in finished and not (path / RESULT).is_file():
                    path.mkdir(parents=True, exist_ok=True)
                    # So `compare` does not train it again.
                    with_all_costs(finished[arm.name, seed]).save(path / RESULT)
        print(f"{self.results.stem}: {self.name}", flush=True)
        command = ["compare", "--config", str(folder.path / SETTINGS), "--output_dir", str(folder.path)]
        if processes:
            command += ["--processes", str(processes)]
        try:
            code = main(command)
        finally:
            self.collect()
        if code:
            sys.exit(code)


def with_all_costs(run: Run) -> Run:
    """Replace costs that an old results file lacks by similar ones. Only the report of `compare` shows them."""
    points = []
    for point in run.points:
        costs = {"seconds": point["cpu_seconds"], "trained_tokens": point["tokens"]}
        missing = {name: cost for name, cost in costs.items() if point[name] is None}
        points.append({**point, **missing})
    return replace(run, points=points)


def add_steps(path: Path, stage: str, run: Run) -> None:
    """Add the logs of a run's training steps to a CSV file, one row per step. They replace earlier rows of the run."""
    key = (stage, run.arm, str(run.seed))
    rows = [row for row in read_steps(path) if (row["stage"], row["arm"], row["seed"]) != key]
    for logs in run.steps:
        row = dict(zip(("stage", "arm", "seed"), key, strict=True))
        for name, value in logs.items():
            if is_kept(name):
                row[name] = f"{value:.6g}"
        rows.append(row)
    columns: dict[str, None] = {}
    for row in rows:
        columns |= dict.fromkeys(row)  # in the order of their first appearance
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as part, open(part, "w", newline="", encoding="utf-8") as file:
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
