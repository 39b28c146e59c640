"""Tree-GRPO: trajectories of agents grow into trees at random turns, whose leaves are compared twice."""

import time
import warnings
from typing import Any

import torch

from trl_explore.agent_trees.search import AgentTrees
from trl_explore.agents.forks import Forks
from trl_explore.agents.turns import Turns
from trl_explore.rows.scorer import ScoredRows
from trl_explore.rows.streams import RowDict

from .agent_tree_grpo_config import AgentTreeGRPOConfig
from .base import ExplorationTrainer, Requires


class AgentTreeGRPOTrainer(ExplorationTrainer):
    """
    GRPO for multi-turn agents whose rows are the leaves of trees of turns, compared in the prompt and in their tree.

    Method of [Tree Search for LLM Agent Reinforcement Learning](https://huggingface.co/papers/2509.21240), Tree-GRPO
    of Ji et al. [`TreeGRPOTrainer`] is another method, DeepSearch's tree search inside single completions. What
    changes with respect to GRPO, per generation batch:

    1. Every main row is the first trajectory of a tree. In each of `num_rounds` rounds, `num_expansions` nodes of the
       tree are drawn among the root and every turn but a last one; each is continued to one more trajectory.
    2. All leaves are rows of training, with the turns that they share.
    3. The advantage of a leaf is that among all leaves of the prompt plus `intra_weight` times that among the leaves
       of its tree (section 3.3).

    `num_expansions=0` gives GRPO's parameters bit for bit. Rows of branches are averaged together with the main ones,
    as if they were one batch. Deviations from the paper (all of them in `docs/methods/agent_tree_grpo.md`):

    1. Where fewer leaves are trained than there are, the first trajectory of a tree always is.
    2. In a tree with one reward, the advantage inside the tree is 0; in the authors' code it is the reward.

    The constructor takes what [`~trl.GRPOTrainer`] takes; `args` is an [`AgentTreeGRPOConfig`] or a plain
    [`~trl.GRPOConfig`]. `tools` and `environment_factory` are TRL's; without them, completions of a single turn are
    sampled again from the prompt. Vision-language models and `rollout_func` are refused.

    Raises:
        RuntimeError: While training, if at least eight tool calls in a row lost the connection to their service, and
            no call of their generation batches succeeded. A checkpoint is written before.
    """

    method = "agent_tree_grpo"
    config_class = AgentTreeGRPOConfig
    requires = Requires(
        samples=True, extra_rows=True, pooled=True, whole_groups=True, tools=True, turns=True, watched_tools=True
    )
    turns: Turns
    forks: Forks
    _leaves: ScoredRows | None = None

    def search(self, output: RowDict) -> None:
        args, trees = self.args, self.trees
        if args.num_expansions == 0:
            return
        start = time.perf_counter()
        explored = torch.ones(len(output["completion_ids"]), dtype=torch.bool)
        if self.choice is not None:
            explored = self.ranks.local(self.choice.explored(self.scorer.success()))
        trees.grow(explored.tolist())
        trees.compare()
        self.log_metric("branch/seconds", time.perf_counter() - start)
        for name, value in trees.metrics().items():
            self.log_metric(name, value)
        self._leaves = trees.rows()

    def assign_advantages(self, output: RowDict) -> torch.Tensor:
        advantages = super().assign_advantages(output)
        return self.trees.advantages(output) if self.args.num_expansions else advantages

    def extra_streams(self, output, examples, rewards):
        return {} if self._leaves is None else {"branch": (self._leaves, 1.0)}

    def setup(self) -> None:
        self.forks = Forks(self, self.turns, self.sample, self.watch, keep_states=self.args.num_rounds > 1)
        self.trees: AgentTrees = AgentTrees(self, self.scorer, self.forks)
        super().setup()
        if not self.tools:
            warnings.warn(
                "Tree-GRPO grows trees of an agent's turns, but there are neither `tools` nor an "
                "`environment_factory` with tools: every completion is one turn, and a branch is one more completion "
                "of the same prompt. Pass one of them; `TreeGRPOTrainer` and `TreeRLTrainer` search inside "
                "completions of one turn.",
                stacklevel=2,
            )

    def completion_columns(self) -> dict[str, list[Any]]:
        columns = super().completion_columns()
        return {**columns, **self.trees.columns()} if self.args.num_expansions else columns
