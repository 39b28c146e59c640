"""Tree-GRPO: branch an agent's trajectories at random turns, and compare the leaves in their group and in their
tree."""

import warnings

from trl_explore.agent_trees.explorer import TurnTreeExplorer

from .agent_tree_grpo_config import AgentTreeGRPOConfig
from .base import ExplorationTrainer, Requires


class AgentTreeGRPOTrainer(ExplorationTrainer):
    """
    GRPO for multi-turn agents. Trajectories branch into trees of turns, and every leaf of a tree is a training row.

    Method of [Tree Search for LLM Agent Reinforcement Learning](https://huggingface.co/papers/2509.21240), Tree-GRPO
    of Ji et al. [`TreeGRPOTrainer`] is another method: DeepSearch's tree search inside single completions. What
    changes with respect to GRPO, per generation batch:

    1. Every main row is the first trajectory of a tree. Each of `num_rounds` rounds chooses `num_expansions` random
       nodes of the tree: the root, or any turn except the last one of a trajectory. From each of these nodes, one
       more trajectory is sampled.
    2. All leaves are training rows, including the turns that they share.
    3. The advantage of a leaf is its advantage among all leaves of the prompt, plus `intra_weight` times its advantage
       among the leaves of its tree (section 3.3).

    With `num_expansions=0`, the parameters equal GRPO's bit for bit. The loss is one mean over main rows and
    branches. Deviations from the paper (all of them are in `docs/methods/agent_tree_grpo.md`):

    1. If only some leaves are trained, the first trajectory of each tree is always one of them.
    2. In a tree with only one reward, the advantage inside the tree is 0. In the authors' code it is the reward.

    The constructor has the arguments of [`~trl.GRPOTrainer`]. `args` is an [`AgentTreeGRPOConfig`] or a plain
    [`~trl.GRPOConfig`]. `tools` and `environment_factory` work as in TRL. Without them, the method samples further
    completions of one turn from the prompt. It refuses vision-language models and `rollout_func`.

    Raises:
        RuntimeError: During training, if at least eight consecutive tool calls lost the connection to their service,
            and no call of their generation batches succeeded. The trainer writes a checkpoint before.
    """

    method = "agent_tree_grpo"
    config_class = AgentTreeGRPOConfig
    args: AgentTreeGRPOConfig
    requires = Requires(samples=True, extra_rows=True, whole_groups=True, tools=True, turns=True, watched_tools=True)

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
