"""Compare sets of explorers for `auto`, on development seeds: should `resample` be a default explorer?

    python examples/benchmarks/explorer_sets.py dead_ends solution_families
    python examples/benchmarks/explorer_sets.py --report

The arms are tuned GRPO, `auto` with the two explorers that were its first defaults, and `auto` with `resample` as a
third one. Finished runs are in `explorer_sets_results/<regime>.csv`, and are not trained again. `--report` writes
`explorer_sets_results/results.md`: differences along the curve in percentage points, paired by seed, with 95 %
t-intervals.
"""

import argparse
from pathlib import Path
from typing import Any

from auto_regimes import AGENTS, COSTS, EXPLORERS, best, shown
from regimes_plan import Regime, folder
from regimes_results import read_results, to_runs
from stages import train_missing

from trl_explore.compare.costs import interval, mean_along

RESULTS = Path(__file__).resolve().parent / "explorer_sets_results"
SEEDS = list(range(330, 336))  # no earlier run of this project used them
STAGE = "development"
GRPO, TWO, THREE = "GRPO", "two explorers", "two explorers and resample"


def document_of(regime: Regime) -> dict[str, Any]:
    """Return the comparison of a regime, for `trl-explore compare`."""
    grpo = best(regime, ("baseline",))
    arms = [{**grpo, "name": GRPO}]
    two = [name for name in EXPLORERS[regime.name in AGENTS] if name != "resample"]
    for name, explorers in ((TWO, two), (THREE, [*two, "resample"])):
        arms.append({"name": name, "method": "auto", "options": {**grpo["options"], "explorers": explorers}})
    document = {**regime.comparison, "seeds": SEEDS, "arms": arms}
    document.pop("samples_at_ends", None)
    return document


def differences(regime: Regime, arm: str, base: str, cost: str) -> list[float]:
    """Return the differences between two arms along the curve, in percentage points, one per seed."""
    runs = to_runs(read_results(RESULTS / f"{regime.name}.csv"), STAGE)
    reading = min(run.points[-1][cost] for run in runs)
    heights: dict[str, dict[int, float]] = {}
    for run in runs:
        height = mean_along(run.points, cost, reading, f"eval/{regime.metric}")
        heights.setdefault(run.arm, {})[run.seed] = height
    seeds = heights.get(arm, {}).keys() & heights.get(base, {}).keys()
    return [100 * (heights[arm][seed] - heights[base][seed]) for seed in sorted(seeds)]


def report() -> str:
    """Return the table of all regimes that have results."""
    lines = []
    for cost, label in COSTS.items():
        lines += [
            f"| equal {label} | seeds | two explorers above GRPO | with `resample` above GRPO | with above without |",
            "| --- | ---: | ---: | ---: | ---: |",
        ]
        for path in sorted(RESULTS.glob("*.csv")):
            regime = Regime.load(folder() / f"{path.stem}.yaml")
            cells = [regime.name]
            for arm, base in ((TWO, GRPO), (THREE, GRPO), (THREE, TWO)):
                found = differences(regime, arm, base, cost)
                cells.append(shown(*interval(found)) if found else "")
            cells.insert(1, str(len(differences(regime, THREE, TWO, cost))))
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Train the named regimes unless `--report` is set, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = sorted(path.stem for path in folder().glob("*.yaml"))
    parser.add_argument("regimes", nargs="*", metavar="REGIME", help=f"of {', '.join(known)}")
    parser.add_argument("--output_dir", type=Path, default=Path("out/explorer_sets"))
    parser.add_argument("--processes", type=int)
    parser.add_argument("--report", action="store_true", help="only print the table")
    args = parser.parse_args()
    for name in args.regimes:
        if name not in known:
            parser.error(f"{name!r} is no regime: choose from {', '.join(known)}")
    if not args.report:
        for name in args.regimes or known:
            regime = Regime.load(folder() / f"{name}.yaml")
            results = RESULTS / f"{name}.csv"
            train_missing(results, document_of(regime), STAGE, args.output_dir / name, processes=args.processes)
    text = report()
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "results.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
