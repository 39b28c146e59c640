"""The knobs of TreeGRPO, their defaults and what is wrong with a bad one."""

import math
from dataclasses import dataclass, field, replace

from trl_explore.names import explain_unknown_fields, unknown_name
from trl_explore.saving.checkpoints import path_inside
from trl_explore.trees.rules import DEPTH_BONUSES
from trl_explore.trees.search import Limits

from .config import ExplorationConfig

CHOICES = {
    "selection": ("global", "uct", "random"),
    "depth_bonus": tuple(DEPTH_BONUSES),
    "advantage_normalization": ("mean", "mean_std"),
}


@explain_unknown_fields
@dataclass
class TreeGRPOConfig(ExplorationConfig):
    r"""
    Configuration of [`TreeGRPOTrainer`]: every field of [`~trl.GRPOConfig`] and the knobs of DeepSearch.

    Fields of GRPO keep TRL's defaults but for `epsilon_high`, which is the paper's 0.28. `scale_rewards` has no
    effect: `advantage_normalization` takes its place.

    Args:
        expansion_width (`int`, *optional*, defaults to `8`):
            Children per node, at least 1.
        max_tree_depth (`int`, *optional*, defaults to `64`):
            Depth at which a node ends its completion, at least 1.
        node_length (`int`, *optional*):
            Most tokens per node. `None` means the paper's 256, or an eighth of `max_completion_length` if less.
        max_search_iterations (`int`, *optional*):
            Most iterations (one sampling call each) per tree; completions that wait, then direct rollouts fill the
            rows that are then missing. `None` means what a search needs at most: `num_generations` times the deepest
            possible tree.
        max_tree_tokens (`int`, *optional*):
            Most tokens that the search samples per tree, direct rollouts apart. `None` sets no limit.
        success_threshold (`float`, *optional*, defaults to `1.0`):
            A completion whose reward (the total, or that of `success_reward`) reaches it is correct (+1), any other
            wrong (-1).
        incomplete_score (`float`, *optional*, defaults to `-1.0`):
            Outcome of a wrong completion that a limit cut off, in [-1, 0].
        selection (`str`, *optional*, defaults to `"global"`):
            Where the search goes on after a completion has ended: `"global"` at the best node of the whole tree
            (Eq. 9), `"uct"` from the root down by upper confidence bounds. The control that a comparison needs is
            `"random"`: wherever `"global"` chooses, any of the same nodes, all equally likely; from there, both go
            down alike until a completion ends.
        uct_coef (`float`, *optional*, defaults to `2.0`):
            Weight of the exploration bonus among siblings (Eq. 8).
        quality_weight (`float`, *optional*, defaults to `0.4`):
            Weight lambda 1 of the parent's mean value in the global score (Eq. 9).
        entropy_weight (`float`, *optional*, defaults to `0.0`):
            Weight lambda 2 of the node's mean token entropy (with vLLM: the mean negative log-probability of its
            tokens); negative prefers confident nodes.
        depth_weight (`float`, *optional*, defaults to `0.01`):
            Weight lambda 3 of the depth bonus.
        depth_bonus (`str`, *optional*, defaults to `"sqrt"`):
            Depth bonus of a node at depth d (Eq. 10): `"sqrt"` is `sqrt(d / max_tree_depth)`, `"linear"` is `d`,
            `"log"` is `ln(d + 1)`.
        q_decay_min (`float`, *optional*, defaults to `0.1`):
            Smallest decay of an outcome on its way to the root (Eq. 5), in [0, 1].
        min_expansion_width (`int`, *optional*, defaults to `1`):
            Fewest children per node where `width_decay` shrinks the width.
        width_decay (`int`, *optional*, defaults to `0`):
            Children fewer per `max_tree_depth / expansion_width` levels of depth; 0 keeps the width.
        q_temperature (`float`, *optional*, defaults to `1.0`):
            Softness of the clip of a node's value, `tanh(value / q_temperature) * q_max` (Eq. 16), positive.
        q_max (`float`, *optional*, defaults to `1.0`):
            Limit of that clip, positive.
        advantage_normalization (`str`, *optional*, defaults to `"mean"`):
            `"mean"` subtracts the mean terminal score of the tree (Eq. 18); `"mean_std"` also divides by its standard
            deviation.
        overlong_buffer (`int`, *optional*, defaults to `0`):
            Tokens before `max_completion_length` over which a penalty grows to `overlong_penalty`; 0 means none.
        overlong_penalty (`float`, *optional*, defaults to `1.0`):
            Penalty of a completion of `max_completion_length` tokens.
        share_prefix_once (`bool`, *optional*, defaults to `False`):
            Whether a node that several completions share is trained in the first of them only.
        skip_uniform_trees (`bool`, *optional*, defaults to `True`):
            Whether a tree whose completions are all correct or all wrong (cut off ones are wrong, whatever
            `incomplete_score` says) trains nothing. The paper does not say so; without it, the first steps of
            all-wrong trees get positive advantages and those of all-correct trees negative ones.
        replay_buffer (`bool`, *optional*, defaults to `False`):
            Keep correct completions of hard prompts; at the next visit of such a prompt they replace failures among
            direct rollouts, and the search is saved. Once the prompt is not hard any more, they are forgotten, and
            it is searched like any other.
        replay_threshold (`float`, *optional*, defaults to `0.25`):
            A prompt is hard if its tree's share of correct completions is above 0 and at most this, and stays hard
            while at most this share of its direct rollouts is correct.
        replay_solutions (`int`, *optional*, defaults to `2`):
            Most solutions kept per prompt, at least 1.
        replay_file (`str`, *optional*):
            Solutions of an earlier run to start from: the `solutions.jsonl` in its `output_dir`.
        dump_trees (`str`, *optional*):
            Folder inside `output_dir` to which every tree is written as a JSON line, one file per process;
            `trl-explore tree FILE` shows them.
    """

    epsilon_high: float | None = field(
        default=0.28, metadata={"help": "Upper clip of the probability ratio (clip-higher); None: epsilon."}
    )
    expansion_width: int = field(default=8, metadata={"help": "Children per node."})
    max_tree_depth: int = field(default=64, metadata={"help": "Depth at which a node ends its completion."})
    node_length: int | None = field(
        default=None,
        metadata={"help": "Most tokens per node; None: 256, or an eighth of max_completion_length if that is less."},
    )
    max_search_iterations: int | None = field(
        default=None, metadata={"help": "Most iterations per tree; None: as many as a search can need."}
    )
    max_tree_tokens: int | None = field(
        default=None, metadata={"help": "Most tokens that the search samples per tree; None: no limit."}
    )
    success_threshold: float = field(default=1.0, metadata={"help": "Smallest reward of a correct completion."})
    incomplete_score: float = field(default=-1.0, metadata={"help": "Outcome of a wrong, cut-off completion."})
    selection: str = field(
        default="global", metadata={"help": "'global' (frontier selection), 'uct', or the control 'random'."}
    )
    uct_coef: float = field(default=2.0, metadata={"help": "Weight of the exploration bonus among siblings."})
    quality_weight: float = field(default=0.4, metadata={"help": "Weight lambda 1 of the parent's mean value."})
    entropy_weight: float = field(default=0.0, metadata={"help": "Weight lambda 2 of the node's entropy."})
    depth_weight: float = field(default=0.01, metadata={"help": "Weight lambda 3 of the depth bonus."})
    depth_bonus: str = field(default="sqrt", metadata={"help": "Depth bonus: 'sqrt', 'linear' or 'log'."})
    q_decay_min: float = field(default=0.1, metadata={"help": "Smallest decay of an outcome towards the root."})
    min_expansion_width: int = field(default=1, metadata={"help": "Fewest children where the width shrinks."})
    width_decay: int = field(default=0, metadata={"help": "How fast the width shrinks with depth; 0: not at all."})
    q_temperature: float = field(default=1.0, metadata={"help": "Softness of the clip of a node's value."})
    q_max: float = field(default=1.0, metadata={"help": "Limit of the clip of a node's value."})
    advantage_normalization: str = field(default="mean", metadata={"help": "'mean' or 'mean_std'."})
    overlong_buffer: int = field(default=0, metadata={"help": "Tokens over which the overlong penalty grows."})
    overlong_penalty: float = field(default=1.0, metadata={"help": "Penalty of the longest completion."})
    share_prefix_once: bool = field(default=False, metadata={"help": "Train a shared node in one row only."})
    skip_uniform_trees: bool = field(
        default=True, metadata={"help": "Train nothing where all are right or all wrong."}
    )
    replay_buffer: bool = field(default=False, metadata={"help": "Reuse correct completions of hard prompts."})
    replay_threshold: float = field(default=0.25, metadata={"help": "Largest success ratio of a hard prompt."})
    replay_solutions: int = field(default=2, metadata={"help": "Most solutions kept per prompt."})
    replay_file: str | None = field(default=None, metadata={"help": "Solutions of an earlier run to start from."})
    dump_trees: str | None = field(default=None, metadata={"help": "Folder inside output_dir for the trees."})

    def validate(self) -> None:
        super().validate()
        for name, choices in CHOICES.items():
            value = vars(self)[name]
            if value not in choices:
                raise ValueError(f"`{name}`: {unknown_name('value', str(value), choices)}")
        counts = ("expansion_width", "max_tree_depth", "node_length", "max_search_iterations", "max_tree_tokens")
        for name in (*counts, "min_expansion_width", "replay_solutions"):
            value = vars(self)[name]
            if value is not None and value < 1:
                raise ValueError(f"`{name}={value}` must be at least 1.")
        for name in ("width_decay", "overlong_buffer", "uct_coef", "overlong_penalty"):
            if not 0 <= vars(self)[name] < math.inf:
                raise ValueError(f"`{name}={vars(self)[name]}` must be a finite number, at least 0.")
        for name in ("quality_weight", "entropy_weight", "depth_weight", "success_threshold"):
            if not math.isfinite(vars(self)[name]):
                raise ValueError(f"`{name}={vars(self)[name]}` must be a finite number.")
        for name in ("q_temperature", "q_max"):
            if not 0 < vars(self)[name] < math.inf:
                raise ValueError(f"`{name}={vars(self)[name]}` must be a positive number.")
        for name, low, high in (("incomplete_score", -1, 0), ("q_decay_min", 0, 1), ("replay_threshold", 0, 1)):
            if not low <= vars(self)[name] <= high:
                raise ValueError(f"`{name}={vars(self)[name]}` must be between {low} and {high}.")
        self._check_sizes()
        if self.replay_file is not None and not self.replay_buffer:
            raise ValueError(f"`replay_file={self.replay_file!r}` has no effect without `replay_buffer=True`: set it.")
        if self.dump_trees is not None:
            path_inside(self.output_dir or ".", self.dump_trees, field="dump_trees", suffix="")

    def _check_sizes(self) -> None:
        self.check_stage("expansion_width", max(1, self.rows_per_generation // (self.num_generations or 1)))
        budget = self.max_completion_length or 0
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
        )
        if self.max_search_iterations is None:
            limits = replace(limits, max_iterations=num_results * limits.deepest)
        return limits
