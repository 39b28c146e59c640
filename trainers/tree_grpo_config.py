"""Configuration of TreeGRPO."""

from dataclasses import dataclass, replace

from trl_explore.names import explain_fields
from trl_explore.saving.checkpoints import path_inside
from trl_explore.trees.rules import DEPTH_BONUSES
from trl_explore.trees.search import Limits

from .config import ExplorationConfig, at_least, one_of, run_checks, within
from .tree_rl_config import check_credit_of_tree

CHECKS = (
    one_of("selection", ("global", "uct", "random")),
    one_of("reward_mapping", ("scaled", "binary")),
    one_of("depth_bonus", tuple(DEPTH_BONUSES)),
    one_of("node_credit", ("value", "outcome")),
    one_of("advantage_normalization", ("mean", "mean_std")),
    at_least(1, "expansion_width", "max_tree_depth", "min_expansion_width", "replay_solutions", "parallel_expansions"),
    at_least(1, "node_length", "max_search_iterations", "max_tree_tokens", optional=True, words=", or None"),
    within("width_decay", "overlong_buffer", "uct_coef", "overlong_penalty", low=0, words="be at least 0, and finite"),
    within("quality_weight", "entropy_weight", "depth_weight", "success_threshold"),
    within("q_temperature", "q_max", above=0, words="be a positive number"),
    within("incomplete_score", low=-1, high=0, words="be between -1 and 0"),
    within("q_decay_min", "replay_threshold", low=0, high=1, words="be between 0 and 1"),
)


@explain_fields
@dataclass
class TreeGRPOConfig(ExplorationConfig):
    r"""
    Configuration of [`TreeGRPOTrainer`]: every field of [`~trl.GRPOConfig`] and the knobs of DeepSearch.

    Fields of GRPO keep TRL's defaults, except for `epsilon_high`, which is 0.28 as in the paper. `scale_rewards` has
    no effect: `advantage_normalization` replaces it.

    Args:
        epsilon_high (`float`, *optional*, defaults to `0.28`):
            Upper clip of the probability ratio, at least 0. A larger value allows larger steps towards better tokens.
            None: `epsilon`.
        expansion_width (`int`, *optional*, defaults to `8`):
            Number of children per node (W), at least 1. The cost of a search is proportional to it, unless the search
            ends earlier. With short answers, 4 learned more than 8 from the same number of tokens.
        max_tree_depth (`int`, *optional*, defaults to `64`):
            Largest number of nodes per path, at least 1. The completion budget ends a path, too.
        node_length (`int`, *optional*):
            Largest number of tokens per node (C), at least 1. Longer nodes need fewer calls and give coarser credit.
            None: 256 (as in the paper), or an eighth of `max_completion_length` if that is less.
        parallel_expansions (`int`, *optional*, defaults to `1`):
            Number of nodes of a tree that an iteration expands, at least 1. The paper has 1. With more nodes, there
            are fewer and larger sampling calls, and trees are shallower. Try more prompts per batch first. The
            additional nodes are the best of the frontier, under the assumption that the visits in progress fail
            (virtual loss).
        max_search_iterations (`int`, *optional*):
            Largest number of iterations per tree, at least 1. Each is one sampling call. More iterations leave fewer
            direct rollouts and cost more. If rows are missing at the end, finished completions that were not chosen
            before fill them, and then direct rollouts. None: `num_generations` times the depth of the deepest possible
            tree, which is enough for every search.
        max_tree_tokens (`int`, *optional*):
            Largest number of tokens that the search samples per tree, at least 1. None: no limit. Direct rollouts do
            not count.
        reward_mapping (`str`, *optional*, defaults to `"scaled"`):
            Outcome of a finished completion, in [-1, 1]: `"scaled"` or `"binary"`. `"scaled"` maps the smallest reward
            of a tree to -1 and the largest to +1. Rewards of 0 and 1 give the paper's outcomes, and rewards between
            them train, too. `"binary"` (Eq. 6) is +1 for a correct completion and -1 for any other. The reward is the
            total reward, or the reward of `success_reward` if that is set.
        success_threshold (`float`, *optional*, defaults to `1.0`):
            Smallest reward of a correct completion. The reward is the total reward, or the reward of `success_reward`
            if that is set. The search prefers correct completions. If all rewards of a tree are equal, its outcomes
            are +1 or -1 by this threshold.
        incomplete_score (`float`, *optional*, defaults to `-1.0`):
            Outcome of a wrong completion that a limit cut off, in [-1, 0]. A higher value punishes these completions
            less.
        selection (`str`, *optional*, defaults to `"global"`):
            Choice of the next node: `"global"`, `"uct"` or `"random"`. After a completion ended, `"global"` takes the
            best node of the whole tree (Eq. 9). `"uct"` goes down from the root by upper confidence bounds. `"random"`
            is the control for a comparison: it takes a random node instead of the best one. From there, `"global"` and
            `"random"` go down by the same rule until a completion ends.
        uct_coef (`float`, *optional*, defaults to `2.0`):
            Weight of the exploration bonus among siblings (Eq. 8), at least 0. With more weight, siblings with fewer
            visits are tried sooner.
        quality_weight (`float`, *optional*, defaults to `0.4`):
            Weight of the parent's mean value in the global score (lambda 1 in Eq. 9). With more weight, the search
            continues where completions were right.
        entropy_weight (`float`, *optional*, defaults to `0.0`):
            Weight of the node's mean token entropy in the global score (lambda 2), any sign. With a positive weight,
            the search continues where the policy is unsure. With a negative weight, it continues where the policy is
            confident. With vLLM, the entropy is the mean `-log p` of the node's tokens.
        depth_weight (`float`, *optional*, defaults to `0.01`):
            Weight of the depth bonus in the global score (lambda 3). With more weight, the search continues at deeper
            nodes. With short answers, a search with 0.01 stays near the root. If a wrong choice ends an answer of few
            nodes, 4.0 was better.
        depth_bonus (`str`, *optional*, defaults to `"sqrt"`):
            Shape of the depth bonus: `"sqrt"`, `"linear"` or `"log"`. At depth d (Eq. 10) they are `sqrt(d /
            max_tree_depth)`, `d` and `ln(d + 1)`. `"sqrt"` is small if a completion has far fewer nodes than
            `max_tree_depth`.
        q_decay_min (`float`, *optional*, defaults to `0.1`):
            Smallest decay factor of an outcome on its way to the root (Eq. 5), in [0, 1]. With a higher value, early
            nodes get more of an outcome.
        min_expansion_width (`int`, *optional*, defaults to `1`):
            Smallest number of children per node if `width_decay` reduces the width, at least 1.
        width_decay (`int`, *optional*, defaults to `0`):
            Number of children by which the width decreases after every `max_tree_depth // expansion_width` levels, at
            least 0. With 0, the width is constant. A narrower tree is cheaper.
        q_temperature (`float`, *optional*, defaults to `1.0`):
            Softness of the clip of a node's value, above 0. The clip is `tanh(value / q_temperature) * q_max` (Eq.
            16). A softer clip gives inner nodes weaker credit.
        q_max (`float`, *optional*, defaults to `1.0`):
            Limit of the clip of a node's value, above 0. A higher limit gives inner nodes stronger credit relative to
            the last node.
        node_credit (`str`, *optional*, defaults to `"value"`):
            Credit of a node's tokens: `"value"` or `"outcome"`. `"value"` is the clipped value that the search found
            (Eq. 16). `"outcome"` is the outcome of the completion in which the tokens are trained. This is GRPO's
            credit on the rows of the tree.
        advantage_normalization (`str`, *optional*, defaults to `"mean"`):
            Normalisation of a node's value: `"mean"` or `"mean_std"`. `"mean"` subtracts the mean terminal score of
            the tree (Eq. 18). `"mean_std"` also divides by the standard deviation of these scores, except in trees
            whose completions are all right or all wrong.
        overlong_buffer (`int`, *optional*, defaults to `0`):
            Number of tokens over which the overlong penalty increases, at least 0. 0: no penalty. The buffer ends at
            `max_completion_length`, where the penalty is `overlong_penalty`. A larger buffer begins earlier.
        overlong_penalty (`float`, *optional*, defaults to `1.0`):
            Penalty of a completion of `max_completion_length` tokens, at least 0.
        share_prefix_once (`bool`, *optional*, defaults to `False`):
            If several completions share a node, train its tokens only in the first of these completions.
        skip_uniform_trees (`bool`, *optional*, defaults to `True`):
            Do not train trees whose completions are all right or all wrong. Completions that a limit cut off are wrong
            here, with any `incomplete_score`. `False` is the authors' choice: the first steps of trees that are all
            wrong then get positive advantages, and the first steps of trees that are all correct get negative ones.
        replay_buffer (`bool`, *optional*, defaults to `False`):
            Reuse correct completions of hard prompts instead of a search, which is cheaper. At the next visit of a
            hard prompt, its stored completions replace failures among direct rollouts. When the prompt is not hard any
            more, its completions are dropped, and it is searched like any other prompt.
        replay_threshold (`float`, *optional*, defaults to `0.25`):
            Largest share of correct completions of a hard prompt, in [0, 1]. A prompt becomes hard if the share in its
            tree is above 0 and at most this threshold. It remains hard while the share in its direct rollouts is at
            most this threshold. With a higher threshold, more prompts are hard, and for longer.
        replay_solutions (`int`, *optional*, defaults to `2`):
            Largest number of completions that are stored per prompt, at least 1. More of them replace more failures.
        replay_file (`str`, *optional*):
            Stored completions of an earlier run: the `solutions.jsonl` in its `output_dir`. None: the run starts
            without stored completions.
        dump_trees (`str`, *optional*):
            Folder inside `output_dir` for the trees, one JSON line each, and one file per process. `trl-explore tree
            FILE` shows them. None: trees are not written.
    """

    epsilon_high: float | None = 0.28
    expansion_width: int = 8
    max_tree_depth: int = 64
    node_length: int | None = None
    parallel_expansions: int = 1
    max_search_iterations: int | None = None
    max_tree_tokens: int | None = None
    reward_mapping: str = "scaled"
    success_threshold: float = 1.0
    incomplete_score: float = -1.0
    selection: str = "global"
    uct_coef: float = 2.0
    quality_weight: float = 0.4
    entropy_weight: float = 0.0
    depth_weight: float = 0.01
    depth_bonus: str = "sqrt"
    q_decay_min: float = 0.1
    min_expansion_width: int = 1
    width_decay: int = 0
    q_temperature: float = 1.0
    q_max: float = 1.0
    node_credit: str = "value"
    advantage_normalization: str = "mean"
    overlong_buffer: int = 0
    overlong_penalty: float = 1.0
    share_prefix_once: bool = False
    skip_uniform_trees: bool = True
    replay_buffer: bool = False
    replay_threshold: float = 0.25
    replay_solutions: int = 2
    replay_file: str | None = None
    dump_trees: str | None = None

    @property
    def asks_about_success(self) -> bool:
        return True

    def validate(self) -> None:
        super().validate()
        run_checks(self, CHECKS)
        check_credit_of_tree(self)
        self._check_sizes()
        if self.replay_file is not None and not self.replay_buffer:
            raise ValueError(f"`replay_file={self.replay_file!r}` has no effect without `replay_buffer=True`: set it.")
        if self.dump_trees is not None:
            path_inside(self.output_dir or ".", self.dump_trees, field="dump_trees", suffix="")

    def _check_sizes(self) -> None:
        trees = max(1, self.rows_per_generation // (self.num_generations or 1))
        self.check_stage("expansion_width", trees * self.parallel_expansions)
        budget = self.max_completion_length
        if budget is None:
            raise ValueError(
                "`max_completion_length=None`: a search tree divides the token limit of a completion among its "
                "nodes. Set a number."
            )
        if self.node_length is not None and self.node_length > budget:
            raise ValueError(
                f"`node_length={self.node_length}` is longer than a whole completion of "
                f"`max_completion_length={self.max_completion_length}` tokens: lower it, or leave it out for an "
                "eighth of the completion."
            )
        if self.overlong_buffer > budget:
            raise ValueError(
                f"`overlong_buffer={self.overlong_buffer}` is longer than "
                f"`max_completion_length={self.max_completion_length}`: lower it."
            )
        limits = self.limits()
        if limits.most_results < limits.num_results:
            raise ValueError(
                f"`num_generations={self.num_generations}` is more than the {limits.most_results} completions of the "
                f"largest tree with `expansion_width={self.expansion_width}` and depth {limits.deepest}: raise "
                "`expansion_width` or `max_tree_depth`, shorten `node_length`, or lower `num_generations`."
            )

    def limits(self) -> Limits:
        """
        Return the shape and the budget of the trees. Fields that are None get their defaults.

        Returns:
            [`~trl_explore.trees.search.Limits`]: The limits.
        """
        budget, num_results = self.max_completion_length or 1, self.num_generations or 1
        limits = Limits(
            num_results=num_results,
            width=self.expansion_width,
            max_depth=self.max_tree_depth,
            node_length=self.node_length or min(256, max(1, budget // 8)),
            max_completion_length=budget,
            max_iterations=self.max_search_iterations or 1,
            max_tokens=self.max_tree_tokens,
            min_width=self.min_expansion_width,
            width_decay=self.width_decay,
            parallel=self.parallel_expansions,
        )
        if self.max_search_iterations is None:
            limits = replace(limits, max_iterations=num_results * limits.deepest)
        return limits
