"""TreeGRPO: a Monte Carlo tree search samples the completions of a prompt, and its node values credit their tokens."""

from pathlib import Path
from typing import Any

from trl_explore.trees.buffer import SOLUTIONS_FILE
from trl_explore.trees.explorer import TreeExplorer
from trl_explore.trees.replay import SolutionCache

from .base import ExplorationTrainer, Requires
from .config import ExplorationConfig
from .tree_grpo_config import TreeGRPOConfig


class TreeGRPOTrainer(ExplorationTrainer):
    """
    GRPO whose completions come from one tree search per prompt. Advantages come from the node values of the search.

    Method of [DeepSearch: Overcome the Bottleneck of Reinforcement Learning with Verifiable Rewards via Monte Carlo
    Tree Search](https://huggingface.co/papers/2509.25454). What changes with respect to GRPO, per generation batch:

    1. Every prompt gets a tree. A node is a chunk of `node_length` tokens. All trees of the batch grow together, with
       one sampling call per iteration. The reward functions score each finished completion once.
    2. Each iteration backs up one completion: a correct one, or the most confident wrong one if none is correct (Eq.
       2-7). The search continues at the best node of the whole tree (Eq. 9-10), until it has `num_generations`
       completions.
    3. Every token gets the softly clipped value of its node minus the mean outcome of the tree (Eq. 16-18). Outcomes
       are +1 for correct and -1 for wrong completions. With `reward_mapping="scaled"`, the outcomes are the rewards,
       scaled to [-1, 1] in each tree.

    With `expansion_width=num_generations`, `max_tree_depth=1`, `node_length=max_completion_length` and
    `epsilon_high=None`, the parameters equal GRPO's bit for bit, on rewards of +1 and -1 and with
    `scale_rewards="none"`. There is one exception: each prompt is encoded only once, and rounding may change a sampled
    token. Deviations from the paper (all of them are in `docs/methods/tree_grpo.md`):

    1. With `skip_uniform_trees=True`, trees whose outcomes are all equal train nothing.
    2. `node_length` follows short completions, and the number of iterations is bounded. The paper does not specify
       these cases.
    3. A search may run out of nodes or budget. It then uses terminal nodes that it had passed over, and after them
       direct rollouts.

    The constructor has the arguments of [`~trl.GRPOTrainer`]. `args` is a [`TreeGRPOConfig`] or a plain
    [`~trl.GRPOConfig`]. The trainer refuses tools, environments, vision-language models and `rollout_func`.
    """

    method = "tree_grpo"
    num_generations: int
    config_class = TreeGRPOConfig
    args: TreeGRPOConfig
    requires = Requires(samples=True, main_rows=True, whole_groups=True, own_limit=True)
    explorer: TreeExplorer

    def make_explorer(self) -> TreeExplorer:
        return TreeExplorer(self, self.sample, self.scorer)

    @property
    def solutions(self) -> SolutionCache:
        """Solutions of hard prompts in the replay buffer."""
        return self.explorer.replay.solutions

    def check(self, args: ExplorationConfig, *, tools: Any, environment_factory: Any) -> None:
        assert isinstance(args, TreeGRPOConfig)
        super().check(args, tools=tools, environment_factory=environment_factory)
        if args.multi_objective_aggregation != "sum_then_normalize":
            raise ValueError(
                f"`multi_objective_aggregation={args.multi_objective_aggregation!r}` has no meaning for a tree "
                "search, whose completions are right or wrong: use 'sum_then_normalize'."
            )

    def method_files(self) -> list[str]:
        files = [SOLUTIONS_FILE]
        if self.args.dump_trees:
            files.append(self.args.dump_trees)
        return files

    def run_files(self) -> list[Path]:
        # A new run moves these files into another folder. It must not move the user's `replay_file`, which can be the
        # `solutions.jsonl` of an earlier run in this `output_dir`.
        if not self.args.replay_file:
            return super().run_files()
        replay_file = Path(self.args.replay_file).resolve()
        return [path for path in super().run_files() if path.resolve() != replay_file]
