"""How much contrast does a generated token buy? For plain groups of GRPO, and for explorers of unsolved prompts.

    python examples/benchmarks/contrast.py dead_ends late_code --seeds 300 301 302
    python examples/benchmarks/contrast.py --report out/contrast

GRPO trains at the tuned rate of each regime. After each generation batch, every explorer explores the unsolved prompts
of the batch. Its completions are scored and counted, and not trained. So all numbers of a step come from one policy.
The rows go to `contrast.jsonl` in the folder of each run; `--report` adds them up over thirds of training.
"""

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from trl_explore.explorers.branch_explorer import ScoredGroup
from trl_explore.explorers.explorer import PromptGroup, Sample
from trl_explore.explorers.resample import ResampleExplorer
from trl_explore.pivots.explorer import PivotExplorer
from trl_explore.rewards.success import succeeded
from trl_explore.rows.rollouts import Rollout
from trl_explore.rows.streams import row_tokens
from trl_explore.sketches.two_stage import TwoStage
from trl_explore.trainers import DeepGRPOConfig, ExplorationTrainer, SESAConfig, TreeGRPOConfig
from trl_explore.trainers.requires import Requires
from trl_explore.trees.explorer import TreeExplorer

HERE = Path(__file__).resolve().parent
# Tuned learning rate of GRPO in each regime (`regimes/results`).
RATES = {
    "dead_ends": 1e-3,
    "late_code": 6e-4,
    "many_solutions": 3e-4,
    "maze": 5e-5,
    "deep_ends": 1e-3,
    "coverage": 3e-5,
}
MORE_TOKENS = 5  # times the regime's budget, since the explorers' tokens count too
COUNTS = ("prompts", "tokens", "groups", "contrasts", "spread", "rows", "solved")


@dataclass
class ContrastConfig(TreeGRPOConfig, DeepGRPOConfig, SESAConfig):
    expansion_width: int = 4
    explorers: str = "tree pivots sketches resample"


class ContrastTrainer(ExplorationTrainer):
    """GRPO that also counts what explorers would find in the unsolved prompts of each batch."""

    config_class = ContrastConfig
    requires = Requires(samples=True, whole_groups=True)

    def setup(self) -> None:
        super().setup()
        names = self.args.explorers.split()
        parts = (self, self.sample, self.scorer)
        size = self.num_generations
        self.explorers: dict[str, Any] = {}
        if "tree" in names:
            self.explorers["tree"] = TreeExplorer(*parts)
        if "sketches" in names:
            sizes = dict(group_size=size, num_explored=size, context_length=2048)
            self.explorers["sketches"] = TwoStage(*parts, num_sketches=self.args.sketches_per_prompt, **sizes)
        if "resample" in names:
            self.explorers["resample"] = ResampleExplorer(*parts)
        self.pivots = PivotExplorer(self, self.make_forks(), self.scorer) if "pivots" in names else None
        self.file = open(Path(self.args.output_dir) / "contrast.jsonl", "w")  # noqa: SIM115

    def search(self, output: Any) -> None:
        super().search(output)
        size = self.num_generations
        prompt_ids = row_tokens(output)[0]
        forks = self.pivots.forks if self.pivots is not None else self.make_forks()
        forks.begin_search(self.main_examples, prompt_ids, self.main_completion_ids, None)
        totals, deciding = self.scorer.totals().tolist(), self.scorer.success().tolist()
        rewards = self.scorer.rewards_per_func
        assert rewards is not None
        self.count("plain", [deciding[row : row + size] for row in range(0, len(deciding), size)],
                   sum(map(len, self.main_completion_ids)), len(deciding) // size)  # fmt: skip
        scored, groups = [], []
        for row in range(0, len(deciding), size):
            if not succeeded(torch.tensor(deciding[row : row + size]), threshold=self.args.success_threshold).any():
                rows = slice(row, row + size)
                scored.append(
                    ScoredGroup(forks.trajectories[rows], totals[rows], deciding[rows], [True] * size, [True] * size)
                )
                samples = [
                    Sample(ids, reward.tolist())
                    for ids, reward in zip(self.main_completion_ids[rows], rewards[rows], strict=True)
                ]
                groups.append(PromptGroup(self.main_examples[row], prompt_ids[row], samples))
        if not groups:
            return
        for name, explorer in self.explorers.items():
            before = self.sample.tokens.own
            with self.sample.forked_randomness():
                explored = explorer.explore(groups, self.plain)
            found = []
            for group, one in zip(groups, explored, strict=True):
                if one.rewards is None:
                    one.rewards, _ = self.scorer.judge(
                        [group.example] * size, one.completion_ids, prompt_ids=[group.prompt_ids] * size
                    )
                found.append(self.scorer.success(torch.tensor(one.rewards)).tolist())
            self.count(name, found, self.sample.tokens.own - before, len(groups))
        if self.pivots is not None:
            before = self.sample.tokens.own
            points = self.pivots.choose(scored)
            branches = forks.sample_branches([point.fork(self.args.num_branches) for point in points])
            forks.judge(branches)
            success = []
            if branches:
                success = self.scorer.success(torch.tensor([branch.rewards for branch in branches])).tolist()
            number = self.args.num_branches
            found = [success[i : i + number] for i in range(0, len(success), number)]
            rows_solved = set()
            for i, point in enumerate(points):
                if max(found[i]) >= self.args.success_threshold:
                    rows_solved.add(point.origin.main_row // size)
                    self.pivots.estimator.add([point.depth], [1])
                else:
                    self.pivots.estimator.add([point.depth], [0])
            self.pivots.estimator.fit()
            self.count("pivots", found, self.sample.tokens.own - before, len(groups), solved=len(rows_solved))
        self.file.flush()

    def plain(self, prompts: list[list[int]]) -> Rollout:
        """Sample as GRPO does."""
        sampled = self.sample(prompts, 1, self.args.max_completion_length, main_stream=True)
        return Rollout([continuation.token_ids for (continuation,) in sampled])

    def count(
        self, source: str, found: Sequence[list[float]], tokens: int, prompts: int, *, solved: int | None = None
    ) -> None:
        """Write a row: what a source sampled for `prompts` prompts. `found` are rewards of its comparison groups."""
        row: dict[str, Any] = dict(step=self.state.global_step, source=source, prompts=prompts, tokens=tokens)
        row |= dict(groups=len(found), contrasts=0, spread=0.0, rows=0, solved=0)
        for rewards in found:
            mean = sum(rewards) / len(rewards)
            variance = sum((reward - mean) ** 2 for reward in rewards) / len(rewards)
            row["contrasts"] += variance > 0
            row["spread"] += len(rewards) * variance
            row["rows"] += len(rewards) if variance > 0 else 0
            row["solved"] += max(rewards) >= self.args.success_threshold
        if solved is not None:
            row["solved"] = solved
        self.file.write(json.dumps(row) + "\n")


def document(regime: str, seeds: list[int]) -> dict[str, Any]:
    """Return the comparison that trains the regime's GRPO with counting."""
    comparison = yaml.safe_load((HERE / "regimes" / f"{regime}.yaml").read_text())["comparison"]
    common = {**comparison.pop("common", {}), "learning_rate": RATES[regime]}
    tokens = MORE_TOKENS * float(comparison.pop("budget")["tokens"])
    arm = {"name": regime, "method": "contrast.ContrastTrainer"}
    comparison |= {"evaluations": 1, "samples_at_ends": None, "budget": {"tokens": tokens}}
    return {**comparison, "seeds": seeds, "common": common, "arms": [arm]}


def report(folder: Path) -> None:
    """Print groups with contrast, spread and trained rows per 1,000 tokens, by regime, third and source."""
    print("| regime | third | source | prompts | tokens per prompt | contrasts | spread | rows | solved |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for regime in sorted(path for path in folder.iterdir() if path.is_dir()):
        sums: dict[tuple[int, str], dict[str, float]] = defaultdict(lambda: dict.fromkeys(COUNTS, 0.0))
        for file in regime.rglob("contrast.jsonl"):
            rows = [json.loads(line) for line in file.read_text().splitlines()]
            last = max(row["step"] for row in rows) + 1
            for row in rows:
                own = sums[3 * row["step"] // last, row["source"]]
                for name in COUNTS:
                    own[name] += row[name]
        for (third, source), own in sorted(sums.items()):
            thousand = own["tokens"] / 1000
            print(
                f"| {regime.name} | {third + 1} | {source} | {own['prompts']:.0f} "
                f"| {own['tokens'] / own['prompts']:.0f} | {own['contrasts'] / thousand:.2f} "
                f"| {own['spread'] / thousand:.2f} | {own['rows'] / thousand:.1f} "
                f"| {100 * own['solved'] / own['prompts']:.0f} % |"
            )


def main() -> None:
    """Train each regime, or report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("regimes", nargs="*", choices=list(RATES))
    parser.add_argument("--seeds", nargs="*", type=int, default=[300, 301, 302])
    parser.add_argument("--output_dir", type=Path, default=Path("out/contrast"))
    parser.add_argument("--report", type=Path)
    args = parser.parse_args()
    if args.report is not None:
        report(args.report)
        return
    for regime in args.regimes:
        folder = args.output_dir / regime
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "comparison.yaml"
        file.write_text(yaml.safe_dump(document(regime, args.seeds)))
        command = [sys.executable, "-m", "trl_explore.cli", "compare", "--config", str(file)]
        subprocess.run([*command, "--output_dir", str(folder / "runs")], check=True, cwd=HERE)
    report(args.output_dir)


if __name__ == "__main__":
    main()
