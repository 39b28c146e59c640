"""Compare REINFORCE with weights, a mixture of advantages, and PODS with tuned GRPO.

    python examples/benchmarks/small_fields.py dead_ends coverage many_solutions
    python examples/benchmarks/small_fields.py --report

Each arm is tuned GRPO with one field changed. Two values of this field are tried on development seeds; REINFORCE also
tries two learning rates. The best variant of each arm then trains on fresh seeds. PODS samples four times the
completions of GRPO, and trains some of them. Its control trains all of them.

The evaluations go to `small_fields_results/<regime>.csv`, with a column for the stage (`knob` or `verdict`). Runs in
this file are not trained again, unless their settings have changed. After training, or with `--report` alone, the
script writes the table to `small_fields_results/results.md`. The table has differences to GRPO along the curve in
percentage points, paired by seed, with 95 % t-intervals.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from auto_regimes import Runs, best_with_role, gaps, reading_of, shown
from regime_script import run_script, script_parser
from regimes_plan import Regime, folder
from regimes_results import by_arm_and_seed, read_results
from stages import Stage

from trl_explore.compare.costs import mean_along
from trl_explore.runs.tasks import find_run_task

RESULTS = Path(__file__).resolve().parent / "small_fields_results"
KNOB_SEEDS = range(320, 324)  # development
SEEDS = range(80, 85)  # no earlier run of this project used them
BASE = "GRPO"
COSTS = {"tokens": "generated tokens", "trained_tokens": "tokens in the loss", "cpu_seconds": "CPU seconds"}


def variants(options: dict[str, Any], *, num_generations: int, rows: int) -> dict[str, list[dict[str, Any]]]:
    """Return the variants of each arm: one of the control, four of REINFORCE, two of the others. `options` are the
    fields of tuned GRPO, with `num_generations` completions per prompt and `rows` completions per batch."""
    more = {**options, "num_generations": 4 * num_generations, "per_device_train_batch_size": 4 * rows}
    reinforce = []
    # At GRPO's learning rate, REINFORCE can destroy a model that nearly always fails, so it also gets a tenth of it.
    for learning_rate in (options["learning_rate"], options["learning_rate"] / 10):
        for weight in (0.1, 1.0):
            own = {"advantage": "reinforce", "success_weight": weight, "learning_rate": learning_rate}
            reinforce.append({**options, **own})
    return {
        "REINFORCE with weights": reinforce,
        "GRPO + MaxRL": [
            {**options, "advantage": ["grpo", "maxrl"], "advantage_weights": [0.5, 0.5]},
            {**options, "advantage": ["grpo", "maxrl"], "advantage_weights": [1.0, 1.0]},
        ],
        "GRPO, 4x samples": [more],
        "PODS": [
            {**more, "trained_generations": num_generations},
            {**more, "trained_generations": 2 * num_generations},
        ],
    }


def arms_of(regime: Regime) -> dict[str, list[dict[str, Any]]]:
    """Return the fields of all arms of a regime. GRPO is the first one."""
    options = best_with_role(regime, "baseline")["options"]
    # The sizes that `compare` sets for the task.
    sizes = {"num_generations": find_run_task(regime.comparison["task"]).options["num_generations"], "rows": 128}
    return {"GRPO": [options], **variants(options, **sizes)}


def stage_of(regime: Regime, output_dir: Path, stage: str, arms: dict[str, dict[str, Any]], seeds: list[int]) -> Stage:
    """Return the runs of arms with these fields on these seeds. Other seeds of the stage in its results are kept."""
    path = results_file(regime)
    document = document_of(regime, arms)
    known = {row["seed"] for row in read_results(path) if row["stage"] == stage}
    document["seeds"] = sorted(known.union(seeds))
    return Stage(stage, document, path, output_dir / regime.name, seeds=seeds)


def train(regime: Regime, args: argparse.Namespace) -> None:
    """Train all variants on the development seeds, and then the best variant of each arm on the other seeds."""
    arms = {}
    for arm, values in arms_of(regime).items():
        for number, options in enumerate(values, start=1):
            arms[f"{arm} / {number}"] = options
    knob = stage_of(regime, args.output_dir, "knob", arms, list(KNOB_SEEDS))
    knob.train(processes=args.processes)
    verdict = stage_of(regime, args.output_dir, "verdict", chosen(regime), args.seeds)
    verdict.train(processes=args.processes)


def document_of(regime: Regime, arms: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the comparison of these arms, without seeds."""
    document = {**regime.comparison, "arms": []}
    document.pop("samples_at_ends", None)
    for name, options in arms.items():
        method = "grpo" if name.startswith("GRPO") and "advantage" not in options else "exploration"
        document["arms"].append({"name": name, "method": method, "options": options})
    return document


def results_file(regime: Regime) -> Path:
    """Return the path of the results of a regime."""
    return RESULTS / f"{regime.name}.csv"


def read(regime: Regime, stage: str) -> tuple[Runs, dict[str, dict[str, Any]]]:
    """Return the evaluations of a stage by arm and seed, and the fields of each arm."""
    rows = read_results(results_file(regime))
    options = {row["arm"]: json.loads(row["options"]) for row in rows if row["stage"] == stage}
    return by_arm_and_seed(rows, stage), options


def chosen(regime: Regime) -> dict[str, dict[str, Any]]:
    """Return the fields of each arm that were best on the development seeds."""
    runs, options = read(regime, "knob")
    reading = reading_of(runs, "tokens")
    found: dict[str, dict[str, Any]] = {}
    heights: dict[str, float] = {}
    for name, of_seeds in runs.items():
        arm = name.partition(" / ")[0]
        height = statistics.mean(mean_along(points, "tokens", reading, regime.metric) for points in of_seeds.values())
        if arm not in heights or height > heights[arm]:
            heights[arm], found[arm] = height, options[name]
    return found


def report() -> str:
    """Return the table of all regimes that have results on the fresh seeds."""
    lines = [
        "| regime | arm | fields | " + " | ".join(f"equal {name}" for name in COSTS.values()) + " |",
        "| --- | --- | --- |" + " ---: |" * len(COSTS),
    ]
    for path in sorted(RESULTS.glob("*.csv")):
        regime = Regime.load(folder() / f"{path.stem}.yaml")
        runs, options = read(regime, "verdict")
        if BASE not in runs:
            continue
        for name in runs:
            fields = {key: value for key, value in options[name].items() if options[BASE].get(key) != value}
            cells = []
            for cost in COSTS:
                if name == BASE:
                    reading = reading_of(runs, cost)
                    own = runs[BASE].values()
                    level = statistics.mean(mean_along(points, cost, reading, regime.metric) for points in own)
                    cells.append(f"{100 * level:.1f}")
                else:
                    cells.append(shown(*gaps(runs, name, BASE, cost=cost, metric=regime.metric)))
            text = ", ".join(f"{key} {value}" for key, value in fields.items())
            lines.append(f"| {regime.name} | {name} | {text} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Tune and train the named regimes unless `--report` is set, and print the table."""
    regimes = ["dead_ends", "coverage", "many_solutions"]
    parser = script_parser(__doc__, output_dir="out/small_fields", regimes=regimes)
    parser.add_argument("--seeds", nargs="*", type=int, default=list(SEEDS))
    run_script(parser, train, report, results=RESULTS)


if __name__ == "__main__":
    main()
