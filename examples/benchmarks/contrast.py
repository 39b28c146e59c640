"""Measure how much contrast a generated token buys: fresh prompts, and each explorer of unsolved prompts.

    python examples/benchmarks/contrast.py dead_ends late_code --seeds 80 81
    python examples/benchmarks/contrast.py --config my_comparison.yaml

`auto` trains with GRPO's tuned fields. It gives each unsolved prompt to a random explorer, so that all explorers are
measured under one policy. The result is the mean of `explore/contrast_per_token/<source>` over each third of training,
in groups with contrast per 1,000 generated tokens. A group of fresh prompts counts with the share of its completions
that failed.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from auto_regimes import AGENTS, EXPLORERS, best
from regimes_plan import Regime, folder

METRIC = "explore/contrast_per_token/"


def comparison_of(regime: Regime, seeds: list[int]) -> dict[str, Any]:
    """Return the comparison that measures a regime."""
    options = {
        **best(regime, ("baseline",))["options"],
        "explore_min_share": 1.0,
        "explorers": list(EXPLORERS[regime.name in AGENTS]),
    }
    document = {**regime.comparison, "seeds": seeds, "evaluations": 1}
    document.pop("samples_at_ends", None)
    return {**document, "arms": [{"name": "random explorer", "method": "auto", "options": options}]}


def rates(runs: Path) -> dict[str, list[float]]:
    """Return the mean contrast per 1,000 tokens by source, for each third of training, over all seeds."""
    found: dict[str, list[list[float]]] = {}
    for run in sorted(runs.glob("*-seed*")):
        state = max(run.glob("checkpoint-*/trainer_state.json"), key=lambda path: path.stat().st_mtime)
        history = json.loads(state.read_text())["log_history"]
        for number, entry in enumerate(history):
            third = 3 * number // len(history)
            for name, value in entry.items():
                if name.startswith(METRIC):
                    thirds = found.setdefault(name.removeprefix(METRIC), [[], [], []])
                    thirds[third].append(1000 * value)
    means = {}
    for source, thirds in found.items():
        means[source] = [statistics.mean(values) for values in thirds if values]
    return means


def main() -> None:
    """Measure regimes, or a comparison of one's own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = sorted(path.stem for path in folder().glob("*.yaml"))
    parser.add_argument("regimes", nargs="*", metavar="REGIME", help=f"of {', '.join(known)}")
    parser.add_argument("--config", type=Path, help="a comparison with one arm of `auto`, instead of a regime")
    parser.add_argument("--seeds", nargs="*", type=int, default=[80, 81])
    parser.add_argument("--output_dir", type=Path, default=Path("out/contrast"))
    args = parser.parse_args()
    documents = {}
    for name in args.regimes:
        if name not in known:
            parser.error(f"{name!r} is no regime: choose of {', '.join(known)}")
        documents[name] = comparison_of(Regime.load(folder() / f"{name}.yaml"), args.seeds)
    if args.config is not None:
        documents[args.config.stem] = yaml.safe_load(args.config.read_text())
    print("| task | source | first third | second third | last third |")
    print("| --- | --- | ---: | ---: | ---: |")
    for name, document in documents.items():
        target = args.output_dir / name
        target.mkdir(parents=True, exist_ok=True)
        file = target / "comparison.yaml"
        file.write_text(yaml.safe_dump(document, sort_keys=False))
        command = [sys.executable, "-m", "trl_explore.cli", "compare", "--config", str(file)]
        subprocess.run([*command, "--output_dir", str(target / "runs")], check=True, stdout=subprocess.DEVNULL)
        for source, thirds in rates(target / "runs").items():
            print(f"| {name} | {source} | {' | '.join(f'{rate:.2f}' for rate in thirds)} |")


if __name__ == "__main__":
    main()
