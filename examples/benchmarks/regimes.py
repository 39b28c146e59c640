"""When does exploration pay? Every method beside GRPO and its controls, where exploration can pay at all.

    python examples/benchmarks/regimes.py train late_code      # or several regimes, or none for all: what is missing
    python examples/benchmarks/regimes.py report               # table, verdicts and picture from results/*.csv

A regime is a file in `regimes/`: what `trl-explore compare` runs, and for every arm a grid of the same size over the
learning rate and one knob. The grid is tried on a development seed, the best of each arm then runs on fresh seeds.
One arm is plain GRPO with four times the samples per prompt: where it does not learn faster per step, more exploration
has nothing to give, and the regime is not admitted.

Every run goes into `regimes/results/<regime>.csv`, one line per evaluation; those of the verdict also say how many
samples of each problem succeeded, one digit of base 36 per problem. What is there is not trained again, so a
run that was stopped, or moved to another machine, goes on from there. `REGIMES` names another folder of regimes.
On a GPU, `train --large --minutes 9` trains a model of 77 million parameters, in slices.
"""

import argparse
import csv
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from trl_explore import __version__
from trl_explore.clocks import mean_along
from trl_explore.comparison import TRAINING, Run

HERE = Path(__file__).resolve().parent
STAGES = ("tuning", "verdict")
COSTS = ("step", "tokens", "trained_tokens", "seconds", "cpu_seconds")
SUCCESSES = ("correct", "greedy_correct")
ROLES = ("baseline", "admission", "method", "control")


@dataclass(frozen=True)
class Regime:
    """
    A file of `regimes/`.

    Args:
        name (`str`):
            Name of the file.
        claim (`str`):
            What is claimed to pay here, and why.
        metric (`str`):
            What arms are tuned and judged by, such as `"greedy_accuracy"`.
        comparison (`dict`):
            What `trl-explore compare` is given, without seeds and arms.
        seeds (`dict[str, list[int]]`):
            Seeds of each stage.
        arms (`list[dict]`):
            Arms with `name`, `method`, `role`, `options` and `grid`: values by field of the configuration.
    """

    name: str
    claim: str
    metric: str
    comparison: dict[str, Any]
    seeds: dict[str, list[int]]
    arms: list[dict[str, Any]]

    @classmethod
    def load(cls, path: Path) -> "Regime":
        """Reads a file, and refuses arms that are not tuned alike."""
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
        regime = cls(name=path.stem, **document)
        sizes = {arm["name"]: len(candidates(arm)) for arm in regime.arms}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"{path.name}: arms are tuned by grids of different sizes: {sizes}")
        if any(arm["role"] not in ROLES for arm in regime.arms) or regime.arms[0]["role"] != "baseline":
            raise ValueError(f"{path.name}: give each arm a role of {ROLES}; the first is the baseline")
        return regime

    def document(self, stage: str, arms: list[dict[str, Any]]) -> dict[str, Any]:
        """A file for `trl-explore compare`."""
        return {**self.comparison, "seeds": self.seeds[stage], "arms": arms}


def enlarged(regime: Regime) -> Regime:
    """
    The same regime for a GPU: a model of 77 million parameters in bfloat16, a tenth of the learning rates, two seeds.

    Args:
        regime ([`Regime`]):
            A regime of the tiny model.

    Returns:
        [`Regime`]: With results of its own.
    """
    common = {**regime.comparison.get("common", {}), "use_cpu": False, "bf16": True}
    size = {"hidden_size": 768, "num_layers": 10}
    arms = []
    for arm in regime.arms:
        rates = [rate / 10 for rate in arm["grid"]["learning_rate"]]
        arms.append({**arm, "grid": {**arm["grid"], "learning_rate": rates}})
    return replace(
        regime,
        name=f"{regime.name}-large",
        comparison={**regime.comparison, "model_size": size, "common": common},
        seeds={**regime.seeds, "verdict": regime.seeds["verdict"][:2]},
        arms=arms,
    )


def candidates(arm: Mapping[str, Any]) -> list[dict[str, Any]]:
    """
    The settings that an arm is tuned over.

    Args:
        arm (`Mapping`):
            An arm of a regime.

    Returns:
        `list[dict]`: Fields of its configuration, one entry per point of the grid.
    """
    grid = arm.get("grid", {})
    points = itertools.product(*grid.values())
    return [{**arm.get("options", {}), **dict(zip(grid, point, strict=True))} for point in points]


def tuning_arms(regime: Regime) -> list[dict[str, Any]]:
    """Arms for the stage `tuning`: one for each candidate of each arm."""
    arms = []
    for arm in regime.arms:
        for options in candidates(arm):
            tried = ", ".join(f"{name} {options[name]}" for name in arm.get("grid", {}))
            arms.append({"name": f"{arm['name']}: {tried}", "method": arm["method"], "options": options})
    return arms


def verdict_arms(regime: Regime, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """
    Arms for the stage `verdict`: the best candidates on the development seeds, by the mean along their curves.

    Args:
        regime ([`Regime`]):
            The regime.
        rows (`list[dict]`):
            Its results, of which those of the tuning count.

    Returns:
        `list[dict]`: One arm for each of the regime's.
    """
    runs = to_runs(rows, "tuning")
    scores: dict[str, list[float]] = {}
    for run in runs:
        reading = min(other.points[-1]["tokens"] for other in runs)
        value = mean_along(run.points, "tokens", reading, f"eval/{regime.metric}")
        scores.setdefault(run.arm, []).append(value)
    tried = iter(tuning_arms(regime))
    arms = []
    for arm in regime.arms:
        best = max(itertools.islice(tried, len(candidates(arm))), key=lambda a: statistics.mean(scores[a["name"]]))
        arms.append({**best, "name": arm["name"]})
    return arms


def results_path(regime: Regime) -> Path:
    """Where a regime's results are."""
    return folder() / "results" / f"{regime.name}.csv"


def folder() -> Path:
    """The folder of the regimes."""
    return Path(os.environ.get("REGIMES", HERE / "regimes"))


def read_results(path: Path) -> list[dict[str, Any]]:
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
        rows = list(csv.DictReader(file))
    for row in rows:
        for name, text in row.items():
            if name in SUCCESSES:
                row[name] = [int(count, 36) for count in text]
            elif name not in ("stage", "arm", "options", "version"):
                row[name] = float(text) if text else None
        row["seed"] = int(row["seed"])
    return rows


def write_results(path: Path, rows: list[dict[str, Any]]) -> None:
    """
    Writes results, whole or not at all.

    Args:
        path (`Path`):
            The CSV file.
        rows (`list[dict]`):
            One entry per evaluation, all with the same keys.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    with open(part, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        for row in rows:
            texts = {name: "".join(np.base_repr(count, 36) for count in row[name]) for name in SUCCESSES}
            writer.writerow({name: _short(value) for name, value in row.items()} | texts)
    os.replace(part, path)


def _short(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) and abs(value) < 1000 else value


def to_rows(run: Run, stage: str, options: Mapping[str, Any], metrics: list[str]) -> list[dict[str, Any]]:
    """
    A run as lines of a results file.

    Args:
        run ([`~trl_explore.comparison.Run`]):
            The run.
        stage (`str`):
            `"tuning"` or `"verdict"`.
        options (`Mapping`):
            Fields that were set for its arm.
        metrics (`list[str]`):
            What was measured.

    Returns:
        `list[dict]`: One entry per evaluation.
    """
    head = {"stage": stage, "arm": run.arm, "options": json.dumps(options, sort_keys=True), "seed": run.seed}
    return [
        head
        | {name: point[name] for name in COSTS}
        | {metric: point[f"eval/{metric}"] for metric in metrics}
        | {name: point.get(f"train/{name}") for name in TRAINING}
        | {name: point.get(name, []) if stage == "verdict" else [] for name in SUCCESSES}
        | {"version": version()}
        for point in run.points
    ]


def to_runs(rows: list[dict[str, Any]], stage: str) -> list[Run]:
    """
    The runs of a results file.

    Args:
        rows (`list[dict]`):
            Lines of the file.
        stage (`str`):
            `"tuning"` or `"verdict"`.

    Returns:
        `list[Run]`: In the order of the file, without the logs of their steps.
    """
    runs: dict[tuple[str, int], Run] = {}
    for row in rows:
        if row["stage"] == stage:
            run = runs.setdefault((row["arm"], row["seed"]), Run(row["arm"], row["seed"], [], []))
            run.points.append({name: row[name] for name in (*COSTS, *SUCCESSES)} | dict(_measured(row)))
    return list(runs.values())


def _measured(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in row.items():
        if name in TRAINING and value is not None:
            yield f"train/{name}", value
        elif name not in ("stage", "arm", "options", "seed", "version", *COSTS, *SUCCESSES, *TRAINING):
            yield f"eval/{name}", value


def version() -> str:
    """The package's version, and the commit where it is a checkout."""
    command = ["git", "-C", str(HERE), "describe", "--always", "--dirty"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"{__version__}+{found.stdout.strip()}" if found.returncode == 0 else __version__


def train(regime: Regime, output_dir: Path) -> None:
    """
    Trains what is missing of a regime, and adds it to its results seed by seed.

    Args:
        regime ([`Regime`]):
            The regime.
        output_dir (`Path`):
            Where checkpoints go.
    """
    path = results_path(regime)
    for stage in STAGES:
        arms = tuning_arms(regime) if stage == "tuning" else verdict_arms(regime, read_results(path))
        for number in range(1, len(regime.seeds[stage]) + 1):
            document = {**regime.document(stage, arms), "seeds": regime.seeds[stage][:number]}
            print(f"{regime.name}: {stage}, seed {document['seeds'][-1]}", flush=True)
            compare(regime, stage, document, output_dir / regime.name / stage)


def compare(regime: Regime, stage: str, document: dict[str, Any], output_dir: Path) -> None:
    """
    Runs `trl-explore compare` on what the results do not have yet.

    Args:
        regime ([`Regime`]):
            The regime.
        stage (`str`):
            `"tuning"` or `"verdict"`.
        document (`dict`):
            The comparison.
        output_dir (`Path`):
            Its folder.
    """
    from trl_explore.cli import main
    from trl_explore.compare_folder import RESULT, ComparisonFolder
    from trl_explore.compare_settings import read_comparison

    comparison = read_comparison(document)
    options = {arm["name"]: json.dumps(arm["options"], sort_keys=True) for arm in document["arms"]}
    place = ComparisonFolder(comparison, output_dir)
    rows = read_results(results_path(regime))
    # Arms that are tried with other settings now, or not at all, are no results any more.
    rows = [row for row in rows if row["stage"] != stage or options.get(row["arm"]) == row["options"]]
    known = {(run.arm, run.seed): run for run in to_runs(rows, stage)}
    for arm, seed in place.missing():
        if (arm.name, seed) in known:
            place.of_run(arm, seed).mkdir(parents=True, exist_ok=True)
            known[arm.name, seed].save(place.of_run(arm, seed) / RESULT)
    code = 0
    if place.missing():
        output_dir.mkdir(parents=True, exist_ok=True)
        config = output_dir.parent / f"{stage}.yaml"
        config.write_text(yaml.safe_dump(document, sort_keys=False))
        code = main(["compare", "--config", str(config), "--output_dir", str(output_dir)])
    runs = [(arm, seed) for seed in comparison.seeds for arm in comparison.arms]
    fresh = [(arm, place.of_run(arm, seed) / RESULT) for arm, seed in runs if (arm.name, seed) not in known]
    given = {arm["name"]: arm["options"] for arm in document["arms"]}
    for arm, file in fresh:
        if file.is_file():  # also where others are not finished
            rows += to_rows(Run.load(file), stage, given[arm.name], list(comparison.metrics))
    if rows:
        write_results(results_path(regime), rows)
    if code:
        sys.exit(code)


def main() -> None:
    """Trains or reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("train", "report"))
    parser.add_argument("regimes", nargs="*", help="names of files in regimes/ (default: all)")
    parser.add_argument("--output_dir", type=Path, default=Path("out/regimes"), help="where checkpoints go")
    parser.add_argument("--large", action="store_true", help="a model of 77 million parameters, on a GPU")
    parser.add_argument("--minutes", type=float, help="stop after so long as Ctrl-C does; the same command goes on")
    args = parser.parse_args()
    files = sorted(folder().glob("*.yaml"))
    unknown = set(args.regimes) - {path.stem for path in files}
    if unknown:
        parser.error(f"unknown regimes {sorted(unknown)}; there are {[path.stem for path in files]}")
    chosen = [Regime.load(path) for path in files if not args.regimes or path.stem in args.regimes]
    if args.large:
        chosen = [enlarged(regime) for regime in chosen]
    if args.minutes:
        signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
        signal.setitimer(signal.ITIMER_REAL, 60 * args.minutes)
    if args.command == "train":
        for regime in chosen:
            train(regime, args.output_dir)
    else:
        from regimes_report import report

        report(chosen)


if __name__ == "__main__":
    main()
