"""TreeRL: fork completions at the tokens of which the policy was least certain, and credit the tree of branches."""

from trl_explore.chains.explorer import UncertainForkExplorer

from .base import ExplorationTrainer, Requires
from .tree_rl_config import TreeRLConfig


class TreeRLTrainer(ExplorationTrainer):
    """
    GRPO with branches from the most surprising tokens. Advantages are values of the tree of all branches.

    Method of [TreeRL: LLM Reinforcement Learning with On-Policy Tree
    Search](https://huggingface.co/papers/2506.11902). What changes with respect to GRPO, per generation batch:

    1. The `num_generations` completions of a prompt are M chains. Each of `num_rounds` rounds (L) forks every chain
       and its branches at the `num_forks` (N) tokens with the largest `-log p`, with `branches_per_fork` (T) branches
       per token. One call samples all branches of a round.
    2. Chains and branches are the leaves of one tree. A token of node s gets
       `[V(s) - V(root) + V(s) - V(parent)] / sqrt(leaves(s))`, where V is the mean reward of the leaves below a node.
    3. All tokens of a branch are trained, including its prefix. The loss is one mean over main rows and branches. The
       division by `sqrt(leaves(s))` reduces the weight of tokens that several leaves share.

    With `num_rounds=0`, the parameters equal GRPO's bit for bit. Deviations from the paper and from the authors'
    code are in `docs/methods/tree_rl.md`. The method needs no reward model: rewards come from the reward functions.

    The constructor has the arguments of [`~trl.GRPOTrainer`]. `args` is a [`TreeRLConfig`] or a plain
    [`~trl.GRPOConfig`]. The trainer refuses tools, environments, vision-language models and `rollout_func`.
    """

    method = "tree_rl"
    config_class = TreeRLConfig
    args: TreeRLConfig
    requires = Requires(samples=True, extra_rows=True, whole_groups=True)

    def make_branch_explorer(self) -> UncertainForkExplorer:
        return UncertainForkExplorer(self, self.make_forks(), self.scorer)
