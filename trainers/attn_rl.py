"""AttnRL: completions are forked at steps that later steps attend to, and credited as one tree."""

from trl_explore.chains.reading import AttentionReader
from trl_explore.chains.steps import StepForkExplorer

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

    def make_branch_explorer(self) -> StepForkExplorer:
        reader = AttentionReader(self, distance=self.args.influence_distance, layers=self.args.attention_layers)
        if self.args.num_forks:
            reader.check()
        return StepForkExplorer(self, self.make_forks(), self.scorer, reader)
