"""TreeRL: the completions of a prompt are forked where the policy was least certain, and credited as one tree."""

import time
from typing import Any

import torch

from trl_explore.chains.search import ChainSearch
from trl_explore.rows.scorer import ScoredRows
from trl_explore.rows.streams import RowDict

from .base import ExplorationTrainer, Requires
from .tree_rl_config import TreeRLConfig


class TreeRLTrainer(ExplorationTrainer):
    """
    GRPO whose completions are forked at their most surprising tokens, with the values of that tree as advantages.

    Method of [TreeRL: LLM Reinforcement Learning with On-Policy Tree Search](https://huggingface.co/papers/2506.11902).
    What changes with respect to GRPO, per generation batch:

    1. The `num_generations` completions of a prompt are M chains. In each of `num_rounds` rounds (L), every chain with
       the branches that grow on it is forked at the `num_forks` (N) tokens of highest `-log p`, `branches_per_fork`
       (T) times each; all branches of a round are sampled in one call.
    2. Chains and branches are the leaves of one tree. A token of node s gets
       `[V(s) - V(root) + V(s) - V(parent)] / sqrt(leaves(s))`, where V is the mean reward of the leaves below a node.
    3. Branches are trained whole, their prefixes too, as further rows of the same mean: the root weighs what leaves
       share.

    `num_rounds=0` gives GRPO's parameters bit for bit. Deviations from the paper, and what the authors' code does, are
    in `docs/methods/tree_rl.md`; no reward model is needed, rewards are those of the reward functions.

    The constructor takes what [`~trl.GRPOTrainer`] takes; `args` is a [`TreeRLConfig`] or a plain
    [`~trl.GRPOConfig`]. Tools, environments, vision-language models and `rollout_func` are refused.
    """

    method = "tree_rl"
    config_class = TreeRLConfig
    requires = Requires(samples=True, extra_rows=True, pooled=True, whole_groups=True)

    # ------------------------------------------------------------------------------------------------ the algorithm

    def search(self, output: RowDict) -> None:
        args, chains = self.args, self.chains
        if not args.num_rounds:
            return
        start = time.perf_counter()
        explored = None if self.choice is None else self.choice.explored(self.scorer.success())
        reported = None if self._rollout is None else self._rollout.logprobs
        options: dict[str, Any] = {"reported": reported, "logprobs": args.fork_selection == "uncertain"}
        chains.begin(output, self.main_examples, self.main_completion_ids, explored, **options)
        for number in range(args.num_rounds):
            again = number + 1 < args.num_rounds and args.fork_selection == "uncertain"
            forks = chains.forks(args.num_forks, selection=args.fork_selection)
            chains.grow(forks, args.branches_per_fork, logprobs=again)
        chains.score(args.trained_leaves)
        self.log_metric("branch/seconds", time.perf_counter() - start)
        for name, value in chains.metrics(sum(map(len, self.main_completion_ids))).items():
            self.log_metric(name, value)

    def assign_advantages(self, output: RowDict) -> torch.Tensor:
        return self.chains.advantages(output)

    def extra_streams(
        self, output: RowDict, examples: list[dict[str, Any]], rewards: torch.Tensor
    ) -> dict[str, tuple[ScoredRows, float]]:
        return {} if self.chains.branch_rows is None else {"branch": (self.chains.branch_rows, 1.0)}

    # -------------------------------------------------------------------------------------------- its parts and limits

    def setup(self) -> None:
        super().setup()
        self.chains = ChainSearch(self, self.scorer, self.sample)

    def completion_columns(self) -> dict[str, list[Any]]:
        return self.chains.columns(len(self.main_completion_ids))
