"""Compare sets of explorers for `auto`, on development seeds: should `resample` be a default explorer?

    python examples/benchmarks/explorer_sets.py dead_ends solution_families
    python examples/benchmarks/explorer_sets.py --report

The arms are tuned GRPO, `auto` with its two default explorers, and `auto` with `resample` as a third one. The page
of `auto` in the documentation has the answer. Finished runs are in `explorer_sets_results/<regime>.csv`, and are not
trained again. `--report` writes `explorer_sets_results/results.md`: differences along the curve in percentage points,
paired by seed, with 95 % t-intervals.
"""

import argparse
from pathlib import Path
from typing import Any

from auto_regimes import COSTS, best_with_role, explorers_of, gaps, shown
from regime_script import run_script, script_parser
from regimes_plan import Regime, folder
from regimes_results import by_arm_and_seed, read_results
from stages import Stage

RESULTS = Path(__file__).resolve().parent / "explorer_sets_results"
SEEDS = list(range(330, 336))  # no earlier run of this project used them
STAGE = "development"
GRPO, TWO, THREE = "GRPO", "two explorers", "two explorers and resample"


def document_of(regime: Regime) -> dict[str, Any]:
    """Return the comparison of a regime, for `trl-explore compare`."""
    grpo = best_with_role(regime, "baseline")
    arms = [{**grpo, "name": GRPO}]
    two = [name for name in explorers_of(regime) if name != "resample"]
    for name, explorers in ((TWO, two), (THREE, [*two, "resample"])):
        arms.append({"name": name, "method": "auto", "options": {**grpo["options"], "explorers": explorers}})
    document = {**regime.comparison, "seeds": SEEDS, "arms": arms}
    document.pop("samples_at_ends", None)
    return document


def stage_of(regime: Regime, output_dir: Path) -> Stage:
    """Return the runs of a regime."""
    return Stage(STAGE, document_of(regime), RESULTS / f"{regime.name}.csv", output_dir / regime.name)


def report() -> str:
    """Return the table of all regimes that have results."""
    lines = []
    for cost, label in COSTS.items():
        lines += [
            f"| equal {label} | seeds | two explorers - GRPO | with `resample` - GRPO | with - without `resample` |",
            "| --- | ---: | ---: | ---: | ---: |",
        ]
        for path in sorted(RESULTS.glob("*.csv")):
            regime = Regime.load(folder() / path.with_suffix(".yaml").name)
            runs = by_arm_and_seed(stage_of(regime, RESULTS).without_stale(read_results(path)), STAGE)
            if not runs.keys() >= {GRPO, TWO, THREE}:
                continue  # the first seed is not finished
            cells = [regime.name, str(len(runs[GRPO]))]
            for arm, base in ((TWO, GRPO), (THREE, GRPO), (THREE, TWO)):
                cells.append(shown(*gaps(runs, arm, base, cost=cost, metric=regime.metric)))
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Train the named regimes unless `--report` is set, and print the table."""

    def train(regime: Regime, args: argparse.Namespace) -> None:
        stage_of(regime, args.output_dir).train(processes=args.processes)

    run_script(script_parser(__doc__, output_dir="out/explorer_sets"), train, report, results=RESULTS)


if __name__ == "__main__":
    main()
