"""AttnRL: fork completions at steps to which later steps attend, and credit the tree of all branches."""

from trl_explore.chains.reading import AttentionReader
from trl_explore.chains.steps import StepForkExplorer

from .attn_rl_config import AttnRLConfig
from .base import ExplorationTrainer, Requires


class AttnRLTrainer(ExplorationTrainer):
    """
    GRPO with branches from steps to which later steps attend. Advantages are values of the tree of all branches.

    Method of [Attention as a Compass: Efficient Exploration for Process-Supervised RL in Reasoning
    Models](https://huggingface.co/papers/2509.26628). What changes with respect to GRPO, per generation batch:

    1. The `num_generations` completions of a prompt are chains, cut into steps at blank lines. A separate forward pass
       with eager attention measures how much later steps attend to each step. The maximum over layers and heads is the
       influence of the step.
    2. Chains are forked at `num_forks` steps of high influence, with `branches_per_fork` branches per step. One call
       samples all branches. If a prompt is solved less often, more of its chains are forked.
    3. Chains and branches are the leaves of one tree. A token of node s gets
       `[V(s) - V(root) + V(s) - V(parent)] / sqrt(leaves(s))`, where V is the mean reward of the leaves below a node.
       All tokens of a branch are trained. The loss is one mean over main rows and branches.

    With `num_forks=0`, the parameters equal GRPO's bit for bit. Two features of the paper are missing: branches
    that are sampled one step off-policy, and a number of prompts that depends on the number of useful rows. These and
    other deviations are in `docs/methods/attn_rl.md`.

    The constructor has the arguments of [`~trl.GRPOTrainer`]. `args` is an [`AttnRLConfig`] or a plain
    [`~trl.GRPOConfig`]. The trainer refuses tools, environments, vision-language models, `rollout_func`, and models
    that do not return their attention.
    """

    method = "attn_rl"
    config_class = AttnRLConfig
    args: AttnRLConfig
    requires = Requires(samples=True, extra_rows=True, whole_groups=True)

    def make_branch_explorer(self) -> StepForkExplorer:
        reader = AttentionReader(self, distance=self.args.influence_distance, layers=self.args.attention_layers)
        if self.args.num_forks:
            reader.check()
        return StepForkExplorer(self, self.make_forks(), self.scorer, reader)
