"""The knobs of DEEP-GRPO, their defaults and what is wrong with a bad one."""

import math
from dataclasses import dataclass, field

from trl_explore.agents.snapshots import STATES
from trl_explore.names import explain_fields
from trl_explore.saving.checkpoints import path_inside

from .config import ExplorationConfig, at_least, one_of, run_checks, within

CHECKS = (
    one_of("segmentation", ("delimiter", "fixed")),
    one_of("pivot_selection", ("utility", "uniform", "root")),
    one_of("environment_state", STATES),
    one_of("branch_from", ("failures", "failed_groups", "all")),
    at_least(2, "num_branches", words="; a branch's advantage is relative to its siblings"),
    at_least(1, "num_pivots", "estimator_buffer_size", "estimator_update_steps"),
    within("aux_loss_weight", "depth_bias", "success_threshold", "estimator_l2"),
    within("aux_loss_weight", low=0, words="not be negative; 0 switches it off"),
    within("estimator_l2", above=0, words="be positive, or separable outcomes diverge"),
    at_least(1, "max_pivots_per_batch", "segment_length", "min_remaining_tokens", optional=True, words=", or None"),
)


@explain_fields
@dataclass
class DeepGRPOConfig(ExplorationConfig):
    r"""
    Configuration of [`DeepGRPOTrainer`]: every field of [`~trl.GRPOConfig`] and the knobs of DEEP-GRPO.

    Fields of GRPO keep TRL's defaults; the paper trains with `beta=1e-4`, 64 prompts per step and 8 generations.

    Args:
        success_threshold (`float`, *optional*, defaults to `1.0`):
            Smallest reward of a success: the total, or that of `success_reward`. A completion below it has failed and
            is branched from, so a higher value branches more.
        num_branches (`int`, *optional*, defaults to `8`):
            Branches K per pivot, at least 2. More of them recover more failures and give a steadier baseline; the cost
            grows in proportion.
        num_pivots (`int`, *optional*, defaults to `1`):
            Pivots per failed completion, at least 1, drawn without replacement. Cost grows in proportion.
        aux_loss_weight (`float`, *optional*, defaults to `1.0`):
            Weight lambda of the branches' loss, at least 0. With 0 the update is plain GRPO's, and the pivots are only
            measured.
        depth_bias (`float`, *optional*, defaults to `2.0`):
            Exponent gamma of the depth bias (Eq. 1), any sign. Larger values draw later pivots, whose branches are
            shorter; 0 ignores depth, negative values draw early pivots.
        segmentation (`str`, *optional*, defaults to `"delimiter"`):
            Where a completion is cut into segments: `"delimiter"` or `"fixed"`. `"delimiter"` cuts after the texts of
            `segment_delimiters`, `"fixed"` every `segment_length` tokens.
        segment_length (`int`, *optional*):
            Tokens per segment with `segmentation="fixed"`. Longer segments leave fewer pivots to choose from. Up to
            `max_completion_length`; `None` is 50, or `max_completion_length` if that is less.
        segment_delimiters (`list[str]`, *optional*, defaults to `[".", "\n"]`):
            Texts that end a segment with `segmentation="delimiter"`. More texts give more pivots to choose from.
        min_remaining_tokens (`int`, *optional*):
            Fewest tokens that a branch may have, so no pivot is drawn later. From 1 to `max_completion_length`; `None`
            is a tenth of it.
        pivot_selection (`str`, *optional*, defaults to `"utility"`):
            How pivots are drawn: `"utility"` (Eq. 1), `"uniform"` or `"root"`. The last two are controls for a
            comparison: `"uniform"` draws any segment start, `"root"` samples the whole completion again, as many times
            as there would be pivots.
        branch_from (`str`, *optional*, defaults to `"failures"`):
            Completions to branch from: `"failures"`, `"failed_groups"` or `"all"`. `"failures"` are all that failed,
            `"failed_groups"` only those of prompts without any success (cheapest), `"all"` adds the successes (the
            paper's expand-all ablation).
        max_pivots_per_batch (`int`, *optional*):
            Most pivots per generation batch, at least 1; `None` sets no limit. It bounds the cost of a step. Counted
            over all processes, and drawn fairly over the completions.
        estimator_buffer_size (`int`, *optional*, defaults to `10000`):
            Newest outcomes of pivots that the success estimator is fitted to, at least 1. A larger buffer gives a
            slower, steadier estimate.
        estimator_min_samples (`int`, *optional*, defaults to `10`):
            Outcomes before the success estimator is first fitted. Until then depth alone decides.
        estimator_update_steps (`int`, *optional*, defaults to `1`):
            Generation batches between two fits of the success estimator, at least 1. Fits are cheap.
        estimator_l2 (`float`, *optional*, defaults to `1.0`):
            L2 penalty on the slope of the success estimator, above 0; an outcome counts 1. A larger penalty gives a
            flatter estimate while outcomes are few. scikit-learn's `C` is its inverse.
        deferred_branching (`bool`, *optional*, defaults to `False`):
            Sample the branches together with the next generation batch. This saves a generation call per batch (the
            paper's appendix H); branches then start from prefixes that the previous policy sampled.
        hard_states_file (`str`, *optional*):
            `.jsonl` file inside `output_dir` that lists pivots without a successful branch. A pivot is one JSON line,
            written if any of its branches could be scored.
        environment_state (`str`, *optional*, defaults to `"auto"`):
            How environments return to a turn: `"auto"`, `"snapshot"`, `"copy"` or `"replay"`. `"snapshot"` uses the
            environment's own `snapshot()` and `restore(state)`, `"copy"` calls `copy.deepcopy` after every turn,
            `"replay"` makes the calls of the prefix again, which must be answered as before. `"auto"` takes the first
            that is possible, and changes to replays where copies turn out not to be separate.
    """

    success_threshold: float = 1.0
    num_branches: int = 8
    num_pivots: int = 1
    aux_loss_weight: float = 1.0
    depth_bias: float = 2.0
    segmentation: str = "delimiter"
    segment_length: int | None = None
    segment_delimiters: list[str] = field(default_factory=lambda: [".", "\n"])
    min_remaining_tokens: int | None = None
    pivot_selection: str = "utility"
    branch_from: str = "failures"
    max_pivots_per_batch: int | None = None
    estimator_buffer_size: int = 10_000
    estimator_min_samples: int = 10
    estimator_update_steps: int = 1
    estimator_l2: float = 1.0
    deferred_branching: bool = False
    hard_states_file: str | None = None
    environment_state: str = "auto"

    @property
    def asks_about_success(self) -> bool:
        return True

    def validate(self) -> None:
        super().validate()
        run_checks(self, CHECKS)
        self._check_segments()
        pivots = self.rows_per_generation * self.num_pivots
        self.check_stage("num_branches", min(pivots, self.max_pivots_per_batch or pivots))
        if self.hard_states_file is not None:
            path_inside(self.output_dir or ".", self.hard_states_file, field="hard_states_file")

    def _check_segments(self) -> None:
        if not self.segment_delimiters or not all(self.segment_delimiters):
            raise ValueError(f"`segment_delimiters={self.segment_delimiters!r}` must hold non-empty texts.")
        longest = self.max_completion_length or math.inf
        if (self.segment_length or 0) > longest:
            raise ValueError(
                f"`max_completion_length={self.max_completion_length}` is smaller than one segment of "
                f"`segment_length={self.segment_length}` tokens: there would be nothing to branch from but the "
                "prompt. Lower `segment_length` or raise `max_completion_length`."
            )
        if (self.min_remaining_tokens or 0) > longest:
            raise ValueError(
                f"`min_remaining_tokens={self.min_remaining_tokens}` is more than `max_completion_length="
                f"{self.max_completion_length}`, so that not even the prompt could be branched from. Lower it."
            )
