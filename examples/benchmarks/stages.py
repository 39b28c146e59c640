"""Stages of a benchmark: `trl-explore compare` trains the runs that a results file lacks, and the file gets them.

A results file keeps the runs of all stages. So a run that is in it is not trained again, also on another machine.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from regimes_results import Row, read_results, settings_of, to_rows, to_runs, write_results

from trl_explore.compare.run import Run

Key = tuple[str, int]  # arm and seed of a run


def runs_of_stage(
    document: Mapping[str, Any], stage: str, found: list[Row]
) -> tuple[list[Row], dict[Key, Run], set[Key]]:
    """
    Find the runs of a stage that are finished, and the runs that there should be.

    Args:
        document (`Mapping`):
            The comparison, with the seeds and the arms of the stage.
        stage (`str`):
            Name of the stage.
        found (`list[dict]`):
            Rows of the results file.

    Returns:
        `tuple`: The rows without the rows of this stage that have other settings, or an arm or a seed that the
        comparison does not have. Then the finished runs of the stage, by arm and seed. Then arm and seed of all runs
        that the stage should have.
    """
    settings = {arm["name"]: settings_of(document, arm) for arm in document["arms"]}
    wanted = {(name, seed) for name in settings for seed in document["seeds"]}
    rows = []
    for row in found:
        is_wanted = (row["arm"], row["seed"]) in wanted and row["settings"] == settings[row["arm"]]
        if row["stage"] != stage or is_wanted:
            rows.append(row)
    known = {(run.arm, run.seed): run for run in to_runs(rows, stage)}
    return rows, known, wanted


def train_missing(
    results: Path,
    document: Mapping[str, Any],
    stage: str,
    folder: Path,
    *,
    arms: Sequence[str] | None = None,
    evaluated: Mapping[str, Any] | None = None,
    processes: int | None = None,
) -> None:
    """
    Train the runs of a stage that a results file lacks, and add them to the file.

    Args:
        results (`Path`):
            The results file.
        document (`Mapping`):
            The comparison, with the seeds and the arms of the stage.
        stage (`str`):
            Name of the stage.
        folder (`Path`):
            Folder of the stages. `trl-explore compare` writes into a folder in it, which [`folder_of_stage`] names.
        arms (`Sequence[str]`, *optional*):
            Names of the arms that are trained. `None`: all.
        evaluated (`Mapping`, *optional*):
            Fields of the comparison that replace those of `document`, and change only the evaluation.
        processes (`int`, *optional*):
            Number of runs that are trained at a time. `None`: one, in this process.

    Raises:
        SystemExit: If `trl-explore compare` failed or was interrupted. The finished runs are in the results file.
    """
    from trl_explore.cli import main
    from trl_explore.compare.folder import RESULT, ComparisonFolder
    from trl_explore.compare.settings import read_comparison

    if not collect(results, document, stage, folder, arms=arms):
        return
    _, known, _ = runs_of_stage(document, stage, read_results(results))
    trained = with_arms(document, arms)
    comparison = read_comparison({**trained, **(evaluated or {})})
    place = ComparisonFolder(comparison, folder_of_stage(trained, stage, folder))
    place.write_settings()
    for arm in comparison.arms:
        for seed in comparison.seeds:
            path = place.of_run(arm, seed)
            if (arm.name, seed) in known and not (path / RESULT).is_file():
                path.mkdir(parents=True, exist_ok=True)
                known[arm.name, seed].save(path / RESULT)  # so `compare` does not train it again
    print(f"{results.stem}: {stage}", flush=True)
    command = ["compare", "--config", str(place.path / "comparison.yaml"), "--output_dir", str(place.path)]
    if processes:
        command += ["--processes", str(processes)]
    code = main(command)
    collect(results, document, stage, folder, arms=arms)
    if code:
        sys.exit(code)


def collect(
    results: Path, document: Mapping[str, Any], stage: str, folder: Path, *, arms: Sequence[str] | None = None
) -> int:
    """
    Add the finished runs of a stage to the results file, and remove rows with other settings from it.

    Args:
        results (`Path`):
            The results file.
        document (`Mapping`):
            The comparison, with the seeds and the arms of the stage.
        stage (`str`):
            Name of the stage.
        folder (`Path`):
            Folder of the stages.
        arms (`Sequence[str]`, *optional*):
            Names of the arms that were trained. `None`: all.

    Returns:
        `int`: Number of runs of these arms that are still missing.
    """
    from trl_explore.compare.folder import RESULT
    from trl_explore.compare.settings import arm_folder, read_comparison

    found = read_results(results)
    rows, known, _ = runs_of_stage(document, stage, found)
    metrics = list(read_comparison(dict(document)).metrics)
    trained = with_arms(document, arms)
    place = folder_of_stage(trained, stage, folder)
    num_missing = 0
    for arm in trained["arms"]:
        for seed in document["seeds"]:
            path = place / f"{arm_folder(arm['name'])}-seed{seed}" / RESULT
            if (arm["name"], seed) in known:
                continue
            if path.is_file():
                rows += to_rows(Run.load(path), stage, arm, settings=settings_of(document, arm), metrics=metrics)
            else:
                num_missing += 1
    if rows != found:
        write_results(results, rows, metrics)
    return num_missing


def with_arms(document: Mapping[str, Any], names: Sequence[str] | None) -> dict[str, Any]:
    """Return a comparison with only the arms of these names. `None` keeps all arms."""
    if names is None:
        return dict(document)
    return {**document, "arms": [arm for arm in document["arms"] if arm["name"] in names]}


def folder_of_stage(document: Mapping[str, Any], stage: str, folder: Path) -> Path:
    """Return the folder of a stage's comparison. Its name changes with every setting."""
    settings = {arm["name"]: settings_of(document, arm) for arm in document["arms"]}
    whole = settings_of(document, {"method": stage, "options": settings})
    return folder / f"{stage.replace(' ', '-')}-{whole}"
