"""Configuration of DEEP-GRPO."""

import math
from dataclasses import dataclass, field

from trl_explore.names import explain_fields
from trl_explore.saving.checkpoints import path_inside

from .config import ExplorationConfig, at_least, one_of, run_checks, within

CHECKS = (
    one_of("segmentation", ("delimiter", "fixed")),
    one_of("pivot_selection", ("utility", "uniform", "root")),
    one_of("branch_from", ("failures", "failed_groups", "all")),
    at_least(2, "num_branches", words="; a branch's advantage is relative to its siblings"),
    at_least(1, "num_pivots", "estimator_buffer_size", "estimator_update_steps"),
    within("aux_loss_weight", "depth_bias", "success_threshold", "estimator_l2"),
    within("aux_loss_weight", low=0, words="not be negative; 0 only measures the pivots"),
    within("estimator_l2", above=0, words="be positive, because separable outcomes have no finite fit without it"),
    at_least(1, "max_pivots_per_batch", "segment_length", "min_remaining_tokens", optional=True, words=", or None"),
)


@explain_fields
@dataclass
class DeepGRPOConfig(ExplorationConfig):
    r"""
    Configuration of [`DeepGRPOTrainer`]: every field of [`~trl.GRPOConfig`] and the knobs of DEEP-GRPO.

    Fields of GRPO keep TRL's defaults. The paper trains with `beta=1e-4`, 64 prompts per step and 8 generations.

    Args:
        success_threshold (`float`, *optional*, defaults to `1.0`):
            Smallest reward that counts as a success. The reward is the total reward, or the reward of `success_reward`
            if that is set. A completion with a smaller reward has failed and gets branches, so a higher threshold
            means more branches.
        num_branches (`int`, *optional*, defaults to `8`):
            Number of branches per pivot (K), at least 2. A larger number recovers more failures and gives a more
            precise baseline. The cost is proportional to it.
        num_pivots (`int`, *optional*, defaults to `1`):
            Number of pivots per failed completion, at least 1. All of them are different. The cost is proportional
            to it.
        aux_loss_weight (`float`, *optional*, defaults to `1.0`):
            Weight of the branches' loss (lambda), at least 0. With 0, the update is plain GRPO's, and the pivots are
            only measured.
        depth_bias (`float`, *optional*, defaults to `2.0`):
            Exponent of the depth bias (gamma in Eq. 1), any sign. Larger values prefer later pivots, whose branches
            are shorter. 0 ignores depth. Negative values prefer early pivots.
        segmentation (`str`, *optional*, defaults to `"delimiter"`):
            Rule that cuts a completion into segments: `"delimiter"` or `"fixed"`. `"delimiter"` cuts after the texts
            of `segment_delimiters`. `"fixed"` cuts every `segment_length` tokens.
        segment_length (`int`, *optional*):
            Number of tokens per segment with `segmentation="fixed"`, at most `max_completion_length`. Longer segments
            leave fewer pivots to choose from. None: 50, or `max_completion_length` if it is smaller.
        segment_delimiters (`list[str]`, *optional*, defaults to `[".", "\n"]`):
            Texts that end a segment with `segmentation="delimiter"`. More texts give more pivots to choose from.
        min_remaining_tokens (`int`, *optional*):
            Smallest token budget of a branch, from 1 to `max_completion_length`. Pivots that leave a smaller budget
            are not chosen. None: a tenth of `max_completion_length`.
        pivot_selection (`str`, *optional*, defaults to `"utility"`):
            Distribution of pivots: `"utility"`, `"uniform"` or `"root"`. `"utility"` is Eq. 1. The other two are
            controls for a comparison. `"uniform"` takes any start of a segment. `"root"` samples the whole completion
            again, with the same number of branches.
        branch_from (`str`, *optional*, defaults to `"failures"`):
            Completions that get branches: `"failures"`, `"failed_groups"` or `"all"`. `"failures"` are all failed
            completions. `"failed_groups"` are the completions of prompts without any success (cheapest). `"all"` adds
            the successes (the paper's expand-all ablation).
        max_pivots_per_batch (`int`, *optional*):
            Largest number of pivots per generation batch over all processes, at least 1. None: no limit. It limits the
            cost of a step. Every completion gets its first pivot before any completion gets a second one.
        estimator_buffer_size (`int`, *optional*, defaults to `10000`):
            Number of newest outcomes that the success estimator is fitted to, at least 1. With a larger buffer, the
            estimate changes more slowly and is more precise.
        estimator_min_samples (`int`, *optional*, defaults to `10`):
            Number of outcomes before the success estimator is fitted for the first time. Until then, pivots depend on
            depth alone.
        estimator_update_steps (`int`, *optional*, defaults to `1`):
            Number of generation batches between two fits of the success estimator, at least 1. Fits are cheap.
        estimator_l2 (`float`, *optional*, defaults to `1.0`):
            L2 penalty on the slope of the success estimator, above 0. One outcome has weight 1. With a larger penalty,
            the estimate depends less on depth while there are few outcomes. scikit-learn's `C` is the inverse of this
            penalty.
        deferred_branching (`bool`, *optional*, defaults to `False`):
            Sample the branches together with the next generation batch. This saves a generation call per batch (the
            paper's appendix H). Branches then start from prefixes that the previous policy sampled.
        hard_states_file (`str`, *optional*):
            `.jsonl` file inside `output_dir` that lists pivots without a successful branch. It has one JSON line per
            pivot. A pivot is listed only if at least one of its branches has a reward.
        environment_state (`str`, *optional*, defaults to `"auto"`):
            Way to restore environments: `"auto"`, `"snapshot"`, `"copy"` or `"replay"`. A branch needs the state of an
            earlier turn. `"snapshot"` calls the environment's own `snapshot()` and `restore(state)`. `"copy"` calls
            `copy.deepcopy` after every turn. `"replay"` repeats the tool calls of the earlier turns, and the tools
            must answer them as before. `"auto"` uses the first of these three that is possible. It changes to
            `"replay"` if copies turn out not to be separate.
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
                f"`segment_length={self.segment_length}` tokens, so no pivot is possible except the prompt. "
                "Lower `segment_length` or raise `max_completion_length`."
            )
        if (self.min_remaining_tokens or 0) > longest:
            raise ValueError(
                f"`min_remaining_tokens={self.min_remaining_tokens}` is more than `max_completion_length="
                f"{self.max_completion_length}`, so no pivot is possible, not even the prompt. Lower it."
            )
