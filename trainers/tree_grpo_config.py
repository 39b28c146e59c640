"""The knobs of TreeGRPO, their defaults and what is wrong with a bad one."""

from dataclasses import dataclass, replace

from trl_explore.credit.checks import refuse
from trl_explore.names import explain_fields
from trl_explore.saving.checkpoints import path_inside
from trl_explore.trees.rules import DEPTH_BONUSES
from trl_explore.trees.search import Limits

from .config import ExplorationConfig, at_least, one_of, run_checks, within

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

    Fields of GRPO keep TRL's defaults but for `epsilon_high`, which is the paper's 0.28. `scale_rewards` has no
    effect: `advantage_normalization` takes its place.

    Args:
        epsilon_high (`float`, *optional*, defaults to `0.28`):
            Upper clip of the probability ratio, at least 0. A larger value allows larger steps towards better tokens;
            `None` is `epsilon`.
        expansion_width (`int`, *optional*, defaults to `8`):
            Children per node (W), at least 1. A wider search costs in proportion, unless it ends earlier. With short
            answers, 4 learned more from as many tokens.
        max_tree_depth (`int`, *optional*, defaults to `64`):
            Most nodes per path, at least 1. The completion budget ends a path too.
        node_length (`int`, *optional*):
            Most tokens per node (C), at least 1. Longer nodes need fewer calls and give coarser credit. `None` is 256
            (the paper's), or an eighth of `max_completion_length` if that is less.
        parallel_expansions (`int`, *optional*, defaults to `1`):
            Nodes of a tree that an iteration expands, at least 1; 1 is the paper's. More of them make fewer and larger
            sampling calls and shallower trees; try more prompts per batch first. Beside the node that the search goes
            on with, the best others of the frontier are expanded, chosen as if every visit that is under way had
            failed (virtual loss).
        max_search_iterations (`int`, *optional*):
            Most iterations per tree, at least 1; each is one sampling call. More of them leave fewer direct rollouts
            and cost more. Rows that are missing in the end are filled with completions that wait, then with direct
            rollouts. `None` is what a search can need: `num_generations` times the deepest possible tree.
        max_tree_tokens (`int`, *optional*):
            Most tokens that the search samples per tree, at least 1; `None` sets no limit. Direct rollouts do not
            count.
        reward_mapping (`str`, *optional*, defaults to `"scaled"`):
            Outcome of a finished completion, in [-1, 1]: `"scaled"` or `"binary"`. `"scaled"` scales the rewards of a
            tree: its smallest reward is worth -1, its largest +1. Rewards of 0 and 1 give the paper's outcomes, and
            rewards between them train too. `"binary"` (Eq. 6) is +1 for a correct completion and -1 for any other.
            The reward is the total, or that of `success_reward`.
        success_threshold (`float`, *optional*, defaults to `1.0`):
            Smallest reward of a correct completion: the total, or that of `success_reward`. The search prefers correct
            completions, and a tree whose rewards are all equal has outcomes of +1 or -1 by it.
        incomplete_score (`float`, *optional*, defaults to `-1.0`):
            Outcome of a wrong completion that a limit cut off, in [-1, 0]. A higher value punishes these less.
        selection (`str`, *optional*, defaults to `"global"`):
            Where a search goes on after a completion: `"global"`, `"uct"` or `"random"`. `"global"` takes the best
            node of the whole tree (Eq. 9), `"uct"` goes down from the root by upper confidence bounds. `"random"` is
            the control for a comparison: where `"global"` takes the best, any of the same nodes, all equally likely;
            from there, both go down alike until a completion ends.
        uct_coef (`float`, *optional*, defaults to `2.0`):
            Weight of the exploration bonus among siblings (Eq. 8), at least 0. With more weight, siblings that were
            visited less are tried sooner.
        quality_weight (`float`, *optional*, defaults to `0.4`):
            Weight lambda 1 of the parent's mean value in the global score (Eq. 9). With more weight the search goes on
            where completions were right.
        entropy_weight (`float`, *optional*, defaults to `0.0`):
            Weight lambda 2 of the node's mean token entropy, any sign. With more weight the search goes on where the
            policy is unsure, with a negative one where it is confident. With vLLM the entropy is the mean `-log p` of
            the node's tokens.
        depth_weight (`float`, *optional*, defaults to `0.01`):
            Weight lambda 3 of the depth bonus. With more weight the search goes on deeper. With short answers 0.01
            stays near the root; where a wrong choice ends an answer of few nodes, 4.0 did better.
        depth_bonus (`str`, *optional*, defaults to `"sqrt"`):
            Shape of the depth bonus: `"sqrt"`, `"linear"` or `"log"`. At depth d (Eq. 10) they are
            `sqrt(d / max_tree_depth)`, `d` and `ln(d + 1)`. The first is small where a completion has far fewer nodes
            than `max_tree_depth`.
        q_decay_min (`float`, *optional*, defaults to `0.1`):
            Smallest decay of an outcome on its way to the root (Eq. 5), in [0, 1]. A higher value gives early nodes
            more of an outcome.
        min_expansion_width (`int`, *optional*, defaults to `1`):
            Fewest children per node where `width_decay` shrinks the width, at least 1.
        width_decay (`int`, *optional*, defaults to `0`):
            How fast the width shrinks with depth, at least 0; 0: not at all. In children fewer per `max_tree_depth /
            expansion_width` levels. A narrower tree is cheaper.
        q_temperature (`float`, *optional*, defaults to `1.0`):
            Softness of the clip of a node's value, above 0. The clip is `tanh(value / q_temperature) * q_max` (Eq.
            16); a softer one gives inner nodes weaker credit.
        q_max (`float`, *optional*, defaults to `1.0`):
            Limit of the clip of a node's value, above 0. A higher limit gives inner nodes stronger credit beside the
            last one.
        node_credit (`str`, *optional*, defaults to `"value"`):
            What the tokens of a node are worth: `"value"`, the clipped value that the search found (Eq. 16), or
            `"outcome"`, that of the completion which they are trained in, which is GRPO's credit on the tree's rows.
        advantage_normalization (`str`, *optional*, defaults to `"mean"`):
            What a node's value is compared with: `"mean"` or `"mean_std"` of the tree. `"mean"` subtracts the mean
            terminal score of the tree (Eq. 18); `"mean_std"` also divides by its standard deviation.
        overlong_buffer (`int`, *optional*, defaults to `0`):
            Tokens over which the overlong penalty grows, at least 0; 0: none. They end at `max_completion_length`,
            where the penalty is `overlong_penalty`; a larger buffer begins earlier.
        overlong_penalty (`float`, *optional*, defaults to `1.0`):
            Penalty of a completion of `max_completion_length` tokens, at least 0.
        share_prefix_once (`bool`, *optional*, defaults to `False`):
            Train a node that several completions share in the first of them only.
        skip_uniform_trees (`bool`, *optional*, defaults to `True`):
            Train nothing where all completions are right or all are wrong. Completions that were cut off are wrong,
            whatever `incomplete_score` says. `False` is the authors': the first steps of all-wrong trees then get
            positive advantages and those of all-correct trees negative ones.
        replay_buffer (`bool`, *optional*, defaults to `False`):
            Use correct completions of hard prompts again, in the place of a search. This is cheaper. At the next visit
            of such a prompt they replace failures among direct rollouts. Once the prompt is not hard any more, they
            are dropped, and it is searched like any other.
        replay_threshold (`float`, *optional*, defaults to `0.25`):
            Largest share of correct completions of a hard prompt, in [0, 1]. A prompt is hard if its tree's share is
            above 0 and at most this, and stays hard while at most this share of its direct rollouts is correct; with a
            higher value, more prompts count as hard, and for longer.
        replay_solutions (`int`, *optional*, defaults to `2`):
            Most solutions kept per prompt, at least 1. More of them replace more failures.
        replay_file (`str`, *optional*):
            Solutions of an earlier run to start from: the `solutions.jsonl` in its `output_dir`.
        dump_trees (`str`, *optional*):
            Folder inside `output_dir` for the trees, one JSON line each. There is one file per process; `trl-explore
            tree FILE` shows them.
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
        own = {
            "advantage": self.advantage != "grpo",
            "count_bonus": self.count_bonus > 0,
            "trained_generations": self.trained_generations is not None,
        }
        refuse(
            self,
            (name for name, used in own.items() if used),
            "does nothing here, where a tree's values are the credit",
        )
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
                f"`num_generations={self.num_generations}` is more than the {limits.most_results} completions that a "
                f"tree of `expansion_width={self.expansion_width}` and depth {limits.deepest} can end with: raise "
                "`expansion_width` or `max_tree_depth`, shorten `node_length`, or lower `num_generations`."
            )

    def limits(self) -> Limits:
        """
        Shape and budget of the trees, with every default filled in.

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
