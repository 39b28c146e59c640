"""Compare `auto` with GRPO, the best rival and the best method in the ten regimes, on new seeds.

    python examples/benchmarks/auto_regimes.py dead_ends maze --processes 2
    python examples/benchmarks/auto_regimes.py --report

Each regime has these arms:

- GRPO at its tuned learning rate.
- The rival and the method that were best in the verdict stage of the regime, with their tuned fields. This choice uses
  hindsight: no user knows them in advance.
- `auto` with the tuned fields of GRPO. All fields of `auto` have their defaults.
- The better of MaxRL and the pass@k advantage, and `auto` with the same fields.
- Controls: a random explorer for every unsolved prompt, and each explorer alone for every unsolved prompt.

The evaluations go to `auto_results/<regime>.csv`. Runs in this file are not trained again, unless their settings have
changed. An interrupted run continues from its last checkpoint. After training, or with `--report` alone, the script
prints the tables, and writes them to `auto_results/results.md`: differences to GRPO along the curve in percentage
points, paired by seed, with 95 % t-intervals. Then run `evidence_table.py`, which reads the same files.
"""

import argparse
import json
import statistics
from collections.abc import Collection
from pathlib import Path

from regime_script import run_script, script_parser
from regimes_plan import Arm, Regime, folder
from regimes_results import Row, by_arm_and_seed, read_results, to_runs
from stages import Stage

from trl_explore.compare.costs import interval, mean_along

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "auto_results"
SEEDS = range(70, 80)  # no earlier run of this project used them
AGENTS = ("tail_errors", "late_falls")
EXPLORERS = ("tree", "pivots", "resample")
AGENT_EXPLORERS = ("tail_branches", "turn_trees", "resample")
ADVANTAGES = ("MaxRL", "pass@k")
STAGE = "new seeds"  # name of the runs in the results files
Runs = dict[str, dict[int, list[Row]]]  # evaluations by arm and seed
COSTS = {"tokens": "tokens", "cpu_seconds": "CPU seconds"}


def explorers_of(regime: Regime) -> tuple[str, ...]:
    """Return the explorers that suit a regime."""
    return AGENT_EXPLORERS if regime.name in AGENTS else EXPLORERS


def best_with_role(regime: Regime, *roles: str) -> Arm:
    """Return the arm with one of these roles that was best in the verdict stage of a regime, with its tuned fields."""
    return best_named(regime, [arm["name"] for arm in regime.arms if arm["role"] in roles])


def best_named(regime: Regime, names: Collection[str]) -> Arm:
    """Return the arm with one of these names that was best in the verdict stage of a regime, with its tuned fields."""
    rows = read_results(regime.path)
    runs = to_runs(rows, "verdict")
    options = {row["arm"]: json.loads(row["options"]) for row in rows if row["stage"] == "verdict"}
    reading = min(run.points[-1]["tokens"] for run in runs)
    heights: dict[str, float] = {}
    for arm in regime.arms:
        own = [run.points for run in runs if run.arm == arm["name"]]
        if own and arm["name"] in names:
            heights[arm["name"]] = statistics.mean(
                mean_along(points, "tokens", reading, f"eval/{regime.metric}") for points in own
            )
    name = max(heights, key=heights.__getitem__)
    (arm,) = [arm for arm in regime.arms if arm["name"] == name]
    return {"name": name, "method": arm["method"], "options": options[name]}


def arms_of(regime: Regime) -> list[Arm]:
    """Return the arms of a regime."""
    grpo = best_with_role(regime, "baseline")
    tuned = grpo["options"]
    rival = best_with_role(regime, "rival", "more samples")
    method = best_with_role(regime, "method")
    advantage = best_named(regime, ADVANTAGES)
    arms = [grpo, rival, method]
    if advantage["name"] != rival["name"]:
        arms.append(advantage)
    arms.append({"name": "auto", "method": "auto", "options": tuned})
    arms.append({"name": f"auto, {advantage['name']}", "method": "auto", "options": advantage["options"]})
    every = {**tuned, "explore_min_share": 1.0}
    arms.append({"name": "uniform choice", "method": "auto", "options": every})
    for explorer in explorers_of(regime):
        arms.append({"name": f"{explorer} alone", "method": "auto", "options": {**every, "explorers": [explorer]}})
    return arms


def stage_of(regime: Regime, seeds: list[int], output_dir: Path) -> Stage:
    """Return the runs of all arms of a regime on these seeds. Other seeds in its results are kept."""
    document = {**regime.comparison, "arms": arms_of(regime)}
    document.pop("samples_at_ends", None)
    known = {row["seed"] for row in read_results(results_file(regime))}
    document["seeds"] = sorted(known.union(seeds))
    return Stage(STAGE, document, results_file(regime), output_dir / regime.name, seeds=seeds)


def results_file(regime: Regime) -> Path:
    """Return the path of the results of a regime."""
    return RESULTS / f"{regime.name}.csv"


def read(regime: Regime) -> Runs:
    """Return the evaluations of a regime, by arm and seed: of the seeds on which all arms are finished. Empty if there
    is no such seed."""
    rows = read_results(results_file(regime))
    stage = stage_of(regime, [], RESULTS)
    runs = by_arm_and_seed(stage.without_stale(rows), STAGE)
    names = [arm["name"] for arm in stage.document["arms"]]
    if not runs.keys() >= set(names):
        return {}
    seeds = set.intersection(*(set(runs[name]) for name in names))
    complete: Runs = {}
    for name in names:
        complete[name] = {seed: points for seed, points in runs[name].items() if seed in seeds}
    return complete if seeds else {}


def gaps(runs: Runs, arm: str, base: str, *, cost: str, metric: str) -> tuple[float, float | None]:
    """Return the difference between two arms, in percentage points, and the half width of its 95 % t-interval. It is
    the mean over the learning curve and over the seeds that both arms have."""
    reading = reading_of(runs, cost)
    found = []
    for seed, points in runs[arm].items():
        if seed in runs[base]:
            own = mean_along(points, cost, reading, metric)
            other = mean_along(runs[base][seed], cost, reading, metric)
            found.append(100 * (own - other))
    return interval(found)


def verdict(mean: float, half: float | None) -> str:
    """Return "ahead" or "behind" if the interval of the difference to GRPO excludes 0, else "level"."""
    if half is None or abs(mean) <= half:
        return "level"
    return "ahead" if mean > 0 else "behind"


def shown(mean: float, half: float | None) -> str:
    """Return a difference with its interval, as text."""
    return f"{mean:+.1f}" if half is None else f"{mean:+.1f} ± {half:.1f}"


def tables(cost: str) -> list[str]:
    """Return the two tables for one kind of cost: `auto` beside the best arms, and its controls."""
    main = [
        f"| equal {COSTS[cost]} | GRPO | best rival | best method | `auto` | verdict | `auto` to best method |",
        "| --- | ---: | ---: | ---: | ---: | --- | ---: |",
    ]
    controls = [
        f"| equal {COSTS[cost]} | with an advantage | the advantage alone | random explorer | explorers alone |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for file in sorted(RESULTS.glob("*.csv")):
        regime = Regime.load(folder() / f"{file.stem}.yaml")
        runs, metric = read(regime), regime.metric
        if not runs:
            continue
        base, rival, method, *others = runs
        found = {name: shown(*gaps(runs, name, base, cost=cost, metric=metric)) for name in runs if name != base}
        own = gaps(runs, "auto", base, cost=cost, metric=metric)
        to_method = shown(*gaps(runs, "auto", method, cost=cost, metric=metric))
        level = 100 * statistics.mean(
            mean_along(points, cost, reading_of(runs, cost), metric) for points in runs[base].values()
        )
        main.append(
            f"| {regime.name} | {level:.1f} | {rival} {found[rival]} | {method} {found[method]} | {found['auto']} "
            f"| {verdict(*own)} | {to_method} |"
        )
        (combined,) = [name for name in others if name.startswith("auto, ")]
        advantage = combined.removeprefix("auto, ")
        alone = [f"{name.removesuffix(' alone')} {found[name]}" for name in others if name.endswith(" alone")]
        controls.append(
            f"| {regime.name} | {advantage} {found[combined]} | {found[advantage]} | {found['uniform choice']} "
            f"| {', '.join(alone)} |"
        )
    return [*main, "", *controls, ""]


def reading_of(runs: Runs, cost: str) -> float:
    """Return the cost up to which all runs can be read."""
    return min(points[-1][cost] for of_seeds in runs.values() for points in of_seeds.values())


def report() -> str:
    """Return the tables of all regimes that have results."""
    lines = []
    for cost in COSTS:
        lines += tables(cost)
    return "\n".join(lines)


def main() -> None:
    """Train the named regimes unless `--report` is set, and print the tables."""
    parser = script_parser(__doc__, output_dir="out/auto")
    parser.add_argument("--seeds", nargs="*", type=int, default=list(SEEDS))

    def train(regime: Regime, args: argparse.Namespace) -> None:
        stage_of(regime, args.seeds, args.output_dir).train(processes=args.processes)

    run_script(parser, train, report, results=RESULTS)


if __name__ == "__main__":
    main()
