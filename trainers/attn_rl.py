"""AttnRL: completions are forked at steps that later steps attend to, and credited as one tree."""

import time
from typing import Any

import torch

from trl_explore.chains.reading import AttentionReader
from trl_explore.chains.search import ChainSearch
from trl_explore.chains.steps import StepForks
from trl_explore.rows.scorer import ScoredRows
from trl_explore.rows.streams import RowDict

from .attn_rl_config import AttnRLConfig
from .base import ExplorationTrainer, Requires


class AttnRLTrainer(ExplorationTrainer):
    """
    GRPO whose completions are forked at steps that later ones attend to, with the values of that tree as advantages.

    Method of [Attention as a Compass: Efficient Exploration for Process-Supervised RL in Reasoning
    Models](https://huggingface.co/papers/2509.26628). What changes with respect to GRPO, per generation batch:

    1. The `num_generations` completions of a prompt are chains, cut into steps at blank lines. A pass of its own, with
       eager attention, reads how much later steps attend to each; the largest over layers and heads is its influence.
    2. Chains are forked at `num_forks` steps of high influence, `branches_per_fork` times each; all branches are
       sampled in one call. The less often a prompt is solved, the more of its chains are forked.
    3. Chains and branches are the leaves of one tree. A token of node s gets
       `[V(s) - V(root) + V(s) - V(parent)] / sqrt(leaves(s))`, where V is the mean reward of the leaves below a node.
       Branches are trained whole, as further rows of the same mean.

    `num_forks=0` gives GRPO's parameters bit for bit. Two things of the authors' are left out: branches that are
    sampled one step off-policy, and a number of prompts that follows how many rows were of use. These and other
    deviations are in `docs/methods/attn_rl.md`.

    The constructor takes what [`~trl.GRPOTrainer`] takes; `args` is an [`AttnRLConfig`] or a plain
    [`~trl.GRPOConfig`]. Tools, environments, vision-language models, `rollout_func` and models whose attention cannot
    be read are refused.
    """

    method = "attn_rl"
    config_class = AttnRLConfig
    requires = Requires(samples=True, extra_rows=True, pooled=True, whole_groups=True)

    # ------------------------------------------------------------------------------------------------ the algorithm

    def search(self, output: RowDict) -> None:
        args, chains = self.args, self.chains
        if not args.num_forks:
            return
        start = time.perf_counter()
        explored = None if self.choice is None else self.choice.explored(self.scorer.success())
        reported = None if self._rollout is None else self._rollout.logprobs
        options: dict[str, Any] = {"reported": reported, "logprobs": args.fork_selection == "uncertain"}
        chains.begin(output, self.main_examples, self.main_completion_ids, explored, **options)
        forks = self.steps.choose()
        self.log_metric("steps/seconds", time.perf_counter() - start)
        chains.grow(forks, args.branches_per_fork, logprobs=False)
        chains.score(None)
        self.log_metric("branch/seconds", time.perf_counter() - start)
        for name, value in chains.metrics(sum(map(len, self.main_completion_ids))).items():
            self.log_metric(name, value)

    def assign_advantages(self, output: RowDict) -> torch.Tensor:
        return self.chains.advantages(output)

    def extra_streams(
        self, output: RowDict, examples: list[dict[str, Any]], rewards: torch.Tensor
    ) -> dict[str, tuple[ScoredRows, float]]:
        return {} if self.chains.branch_rows is None else {"branch": (self.chains.branch_rows, 1.0)}

    # -------------------------------------------------------------------------------------------- its parts and state

    def setup(self) -> None:
        super().setup()
        reader = AttentionReader(self, distance=self.args.influence_distance, layers=self.args.attention_layers)
        if self.args.num_forks:
            reader.check()
        self.chains = ChainSearch(self, self.scorer, self.sample)
        self.steps = StepForks(self, self.chains, reader)

    def completion_columns(self) -> dict[str, list[Any]]:
        return self.chains.columns(len(self.main_completion_ids))

    def exploration_state(self) -> dict[str, Any]:
        return {**super().exploration_state(), "easy_prompts": self.steps.state()}

    def load_exploration_state(self, state: dict[str, Any]) -> None:
        super().load_exploration_state(state)
        self.steps.load_state(state["easy_prompts"])
