"""TreeGRPO: the completions of a prompt come from a Monte Carlo tree search, and its values credit every step."""

from pathlib import Path
from typing import Any

from trl_explore.trees.explorer import TreeExplorer
from trl_explore.trees.replay import SolutionCache

from .base import ExplorationTrainer, Requires
from .tree_grpo_config import TreeGRPOConfig


class TreeGRPOTrainer(ExplorationTrainer):
    """
    GRPO whose completions come from a tree search per prompt, with the values found by the search as advantages.

    Method of [DeepSearch: Overcome the Bottleneck of Reinforcement Learning with Verifiable Rewards via Monte Carlo
    Tree Search](https://huggingface.co/papers/2509.25454). What changes with respect to GRPO, per generation batch:

    1. Every prompt grows a tree of chunks of `node_length` tokens; all trees of the batch advance together, one
       batched sampling call per iteration. The reward functions score every completion that ends, once.
    2. Per iteration one completion is backed up: a correct one, else the most confident wrong one (Eq. 2-7). The
       search goes on at the best node of the whole tree (Eq. 9-10), until there are `num_generations` completions.
    3. Every token gets the softly clipped value of its node minus the mean outcome of the tree (Eq. 16-18). Outcomes
       are +1 for correct and -1 for wrong completions. Graded rewards are scaled to [-1, 1] in each tree
       (`reward_mapping`).

    With `expansion_width=num_generations`, `max_tree_depth=1`, `node_length=max_completion_length` and
    `epsilon_high=None` it is GRPO with `scale_rewards="none"` on rewards of +1 and -1: the same parameters bit for
    bit, unless the rounding of a prompt that is encoded once changes a sampled token. Deviations from the paper (all
    of them in `docs/methods/tree_grpo.md`):

    1. `skip_uniform_trees=True`: trees without contrast train nothing.
    2. `node_length` follows short completions, and iterations are bounded; both only matter where the paper is silent.
    3. A search that runs out of nodes or budget first uses terminal nodes that it had passed over, then direct
       rollouts.

    The constructor takes what [`~trl.GRPOTrainer`] takes; `args` is a [`TreeGRPOConfig`] or a plain
    [`~trl.GRPOConfig`]. Tools, environments, vision-language models and `rollout_func` are refused.
    """

    method = "tree_grpo"
    num_generations: int
    config_class = TreeGRPOConfig
    requires = Requires(samples=True, main_rows=True, whole_groups=True)
    explorer: TreeExplorer

    def make_explorer(self) -> TreeExplorer:
        return TreeExplorer(self, self.sample, self.scorer)

    @property
    def solutions(self) -> SolutionCache:
        """The replay buffer's solutions of hard prompts."""
        return self.explorer.replay.solutions

    def check(self, args: Any, *, tools: Any, environment_factory: Any) -> None:
        super().check(args, tools=tools, environment_factory=environment_factory)
        if args.multi_objective_aggregation != "sum_then_normalize":
            raise ValueError(
                f"`multi_objective_aggregation={args.multi_objective_aggregation!r}` has no meaning for a tree "
                "search, whose completions are right or wrong: use 'sum_then_normalize'."
            )

    def run_files(self) -> list[Path]:
        # A file of solutions that the user passed is read only: the run writes its solutions into another file.
        replayed = self.args.replay_file and Path(self.args.replay_file).resolve()
        return [path for path in super().run_files() if path.resolve() != replayed]
