"""Compare `auto` with GRPO on seeds that no earlier run used. `auto` has its present rule.

    python examples/benchmarks/auto_fresh.py dead_ends tail_errors
    python examples/benchmarks/auto_fresh.py --report

The runs of `auto_regimes.py` had an earlier rule. The documentation explains both rules (`docs/auto-earlier.md`). All
fields are those of `auto_regimes.py`. Finished runs are in `auto_fresh_results/<regime>.csv`, and are not trained
again.

`--arms` limits training to some arms: by default, `GRPO` and `auto`. The best rival and the best method of the regime
are the other arms; no table has them yet. After training, or with `--report` alone, the script writes
`auto_fresh_results/results.md`: differences to GRPO along the curve in percentage points, paired by seed, with 95 %
t-intervals.
"""

import argparse
import statistics
from pathlib import Path

from auto_regimes import COSTS, Runs, arms_of, gaps, reading_of, shown, verdict
from regime_script import run_script, script_parser
from regimes_plan import Regime, folder
from regimes_results import by_arm_and_seed, read_results
from stages import Stage

from trl_explore.compare.costs import mean_along

RESULTS = Path(__file__).resolve().parent / "auto_fresh_results"
SEEDS = list(range(90, 100))  # no earlier run of this project used them
STAGE = "fresh seeds"


def stage_of(regime: Regime, output_dir: Path, arms: list[str] | None = None) -> Stage:
    """Return the runs of a regime. Only `arms` are trained, if they are given."""
    grpo, rival, method, *others = arms_of(regime)
    (auto,) = [arm for arm in others if arm["name"] == "auto"]
    document = {**regime.comparison, "seeds": SEEDS, "arms": [grpo, rival, method, auto]}
    document.pop("samples_at_ends", None)
    return Stage(STAGE, document, RESULTS / f"{regime.name}.csv", output_dir / regime.name, arms=arms)


def read(regime: Regime) -> Runs:
    """Return the evaluations of `GRPO` and `auto`, by arm and seed, for the seeds that both have. Empty if there is no
    such seed."""
    stage = stage_of(regime, RESULTS)  # nothing is trained, so its folder for checkpoints does not matter
    runs = by_arm_and_seed(stage.without_stale(read_results(stage.results)), STAGE)
    seeds = runs.get("GRPO", {}).keys() & runs.get("auto", {}).keys()
    if not seeds:
        return {}
    common: Runs = {}
    for arm in ("GRPO", "auto"):
        common[arm] = {seed: runs[arm][seed] for seed in sorted(seeds)}
    return common


def gap_of_auto(regime: Regime, cost: str) -> tuple[float, float | None] | None:
    """Return the difference between `auto` and GRPO along the curve, in percentage points, with half of the width of
    its interval. None if `auto` and GRPO have no common seed."""
    runs = read(regime)
    return gaps(runs, "auto", "GRPO", cost=cost, metric=regime.metric) if runs else None


def report() -> str:
    """Return the tables of all regimes that have results."""
    lines = []
    for cost, label in COSTS.items():
        lines += [f"| equal {label} | seeds | GRPO | `auto` | verdict |", "| --- | ---: | ---: | ---: | --- |"]
        for path in sorted(RESULTS.glob("*.csv")):
            regime = Regime.load(folder() / path.with_suffix(".yaml").name)
            runs = read(regime)
            if not runs:
                continue
            reading = reading_of(runs, cost)
            levels = [mean_along(points, cost, reading, regime.metric) for points in runs["GRPO"].values()]
            own = gaps(runs, "auto", "GRPO", cost=cost, metric=regime.metric)
            cells = [regime.name, str(len(runs["auto"])), f"{100 * statistics.mean(levels):.1f}"]
            lines.append("| " + " | ".join([*cells, shown(*own), verdict(*own)]) + " |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Train the named regimes unless `--report` is set, and print the tables."""
    parser = script_parser(__doc__, output_dir="out/auto_fresh")
    parser.add_argument("--arms", nargs="*", default=["GRPO", "auto"])

    def train(regime: Regime, args: argparse.Namespace) -> None:
        stage_of(regime, args.output_dir, args.arms).train(processes=args.processes)

    run_script(parser, train, report, results=RESULTS)


if __name__ == "__main__":
    main()
