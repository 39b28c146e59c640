"""Measure how many groups with contrast each source of training data yields per generated token.

    python examples/benchmarks/contrast.py dead_ends late_code --seeds 80 81
    python examples/benchmarks/contrast.py --config my_comparison.yaml

A group has contrast if its completions have different rewards. The sources are fresh prompts (`plain` in the table),
and the explorers, which sample unsolved prompts in another way.

`AutoExploreTrainer` trains with the tuned fields of GRPO, and gives each unsolved prompt to a random explorer. So all
explorers are measured with the same policy. The table has the mean of the metric
`explore/contrast_per_token/<source>` in each third of training: groups with contrast per 1,000 generated tokens. The
group of a fresh prompt counts with the share of its completions that failed. A dash marks a third in which a source
was not measured.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from auto_regimes import best_with_role, explorers_of
from regimes_plan import Regime, folder

METRIC = "explore/contrast_per_token/"


def comparison_of(regime: Regime, seeds: list[int]) -> dict[str, Any]:
    """Return the configuration of `trl-explore compare` that measures a regime."""
    options = {
        **best_with_role(regime, "baseline")["options"],
        "explore_min_share": 1.0,  # probability of a random explorer
        "explorers": list(explorers_of(regime)),
    }
    document = {**regime.comparison, "seeds": seeds, "evaluations": 1}
    document.pop("samples_at_ends", None)
    return {**document, "arms": [{"name": "random explorer", "method": "auto", "options": options}]}


def rates(runs: Path) -> dict[str, list[float | None]]:
    """Return the groups with contrast per 1,000 tokens, by source: the mean in each third of training, over all
    seeds. It is None for a third in which a source was not measured."""
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
    means: dict[str, list[float | None]] = {}
    for source, thirds in found.items():
        means[source] = [statistics.mean(values) if values else None for values in thirds]
    return means


def main() -> None:
    """Train the comparisons of the given regimes and of `--config`, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = sorted(path.stem for path in folder().glob("*.yaml"))
    parser.add_argument("regimes", nargs="*", metavar="REGIME", help=f"one of {', '.join(known)}")
    parser.add_argument("--config", type=Path, help="your own comparison with one arm `auto`, in addition to regimes")
    parser.add_argument("--seeds", nargs="*", type=int, default=[80, 81])
    parser.add_argument("--output_dir", type=Path, default=Path("out/contrast"))
    args = parser.parse_args()
    documents = {}
    for name in args.regimes:
        if name not in known:
            parser.error(f"unknown regime {name!r}: choose one of {', '.join(known)}")
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
            cells = ["-" if rate is None else f"{rate:.2f}" for rate in thirds]
            print(f"| {name} | {source} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
