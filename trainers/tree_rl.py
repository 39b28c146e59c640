"""TreeRL: the completions of a prompt are forked where the policy was least certain, and credited as one tree."""

from trl_explore.chains.explorer import UncertainForkExplorer

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

    def make_branch_explorer(self) -> UncertainForkExplorer:
        return UncertainForkExplorer(self, self.make_forks(), self.scorer)
