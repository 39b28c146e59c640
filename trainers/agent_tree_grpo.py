"""Tree-GRPO: trajectories of agents grow into trees at random turns, whose leaves are compared twice."""

import warnings

from trl_explore.agent_trees.explorer import TurnTreeExplorer

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

    def make_branch_explorer(self) -> TurnTreeExplorer:
        return TurnTreeExplorer(self, self.make_agent_forks(keep_states=self.args.num_rounds > 1), self.scorer)

    def setup(self) -> None:
        super().setup()
        if not self.tools:
            warnings.warn(
                "Tree-GRPO grows trees of an agent's turns, but there are neither `tools` nor an "
                "`environment_factory` with tools: every completion is one turn, and a branch is one more completion "
                "of the same prompt. Pass one of them; `TreeGRPOTrainer` and `TreeRLTrainer` search inside "
                "completions of one turn.",
                stacklevel=2,
            )
