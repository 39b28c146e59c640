"""The knobs of DEEP-GRPO, their defaults and what is wrong with a bad one."""

import math
from dataclasses import dataclass, field

from trl_explore.names import explain_unknown_fields, unknown_name
from trl_explore.saving.checkpoints import path_inside

from .config import ExplorationConfig

CHOICES = {
    "segmentation": ("delimiter", "fixed"),
    "pivot_selection": ("utility", "uniform", "root"),
    "branch_from": ("failures", "failed_groups", "all"),
}


@explain_unknown_fields
@dataclass
class DeepGRPOConfig(ExplorationConfig):
    r"""
    Configuration of [`DeepGRPOTrainer`]: every field of [`~trl.GRPOConfig`] and the knobs of DEEP-GRPO.

    Fields of GRPO keep TRL's defaults; the paper trains with `beta=1e-4`, 64 prompts per step and 8 generations.

    Args:
        success_threshold (`float`, *optional*, defaults to `1.0`):
            A completion whose reward (the total, or that of `success_reward`) is below it has failed.
        num_branches (`int`, *optional*, defaults to `8`):
            Continuations K sampled from each pivot, at least 2.
        num_pivots (`int`, *optional*, defaults to `1`):
            Pivots per failed completion, drawn without replacement.
        aux_loss_weight (`float`, *optional*, defaults to `1.0`):
            Weight lambda of the branches' stream, at least 0. 0 trains plain GRPO and only measures the pivots.
        depth_bias (`float`, *optional*, defaults to `2.0`):
            Exponent gamma of Eq. 1; larger values branch later, 0 ignores depth, negative values branch early.
        segmentation (`str`, *optional*, defaults to `"delimiter"`):
            Where a completion may be cut: `"delimiter"` after the texts of `segment_delimiters`, `"fixed"` every
            `segment_length` tokens.
        segment_length (`int`, *optional*):
            Tokens per segment with `segmentation="fixed"`. `None` means 50, or `max_completion_length`
            if that is less.
        segment_delimiters (`list[str]`, *optional*, defaults to `[".", "\n"]`):
            Texts that end a segment with `segmentation="delimiter"`.
        min_remaining_tokens (`int`, *optional*):
            Fewest tokens of `max_completion_length` that a branch must have, from 1: no pivot is drawn later. `None`
            is a tenth of it.
        pivot_selection (`str`, *optional*, defaults to `"utility"`):
            `"utility"` is Eq. 1. The two controls that a comparison needs: `"uniform"` draws any cut, `"root"`
            resamples the whole completion, as often as the others would branch.
        branch_from (`str`, *optional*, defaults to `"failures"`):
            `"failures"` branches from every failed completion, `"failed_groups"` only where no completion of the
            prompt succeeded, `"all"` from successes too (the paper's expand-all ablation).
        max_pivots_per_batch (`int`, *optional*):
            Largest number of pivots per generation batch over all processes, drawn fairly over the completions. `None`
            sets no limit.
        estimator_buffer_size (`int`, *optional*, defaults to `10000`):
            Outcomes that the success estimator remembers.
        estimator_min_samples (`int`, *optional*, defaults to `10`):
            Outcomes before its first fit; until then all depths are equally promising.
        estimator_update_steps (`int`, *optional*, defaults to `1`):
            Generation batches between two fits.
        estimator_l2 (`float`, *optional*, defaults to `1.0`):
            Weight of the quadratic penalty on the estimator's slope, positive; each outcome counts 1. scikit-learn's
            `C` is its inverse.
        deferred_branching (`bool`, *optional*, defaults to `False`):
            Sample the branches together with the next generation batch instead of in a second call (the paper's
            appendix H). Saves a generation call per batch; branches then start from states of the previous policy.
        hard_states_file (`str`, *optional*):
            File inside `output_dir`, ending in `.jsonl`, to which every pivot without a successful branch is appended
            as a JSON line, if any of them could be scored.
    """

    success_threshold: float = field(default=1.0, metadata={"help": "A completion with a smaller reward has failed."})
    num_branches: int = field(default=8, metadata={"help": "Continuations K per pivot, at least 2."})
    num_pivots: int = field(default=1, metadata={"help": "Pivots per failed completion."})
    aux_loss_weight: float = field(default=1.0, metadata={"help": "Weight lambda of the branches' stream."})
    depth_bias: float = field(default=2.0, metadata={"help": "Exponent gamma of the depth bias (Eq. 1)."})
    segmentation: str = field(default="delimiter", metadata={"help": "Where to cut: 'delimiter' or 'fixed'."})
    segment_length: int | None = field(
        default=None,
        metadata={"help": "Tokens per segment for 'fixed'; None: 50, or less for short completions."},
    )
    segment_delimiters: list[str] = field(
        default_factory=lambda: [".", "\n"], metadata={"help": "Texts that end a segment for 'delimiter'."}
    )
    min_remaining_tokens: int | None = field(
        default=None,
        metadata={"help": "Fewest tokens of max_completion_length left to a branch; None: a tenth of it."},
    )
    pivot_selection: str = field(
        default="utility", metadata={"help": "'utility' (Eq. 1), or the controls 'uniform' and 'root'."}
    )
    branch_from: str = field(
        default="failures", metadata={"help": "Completions to branch from: 'failures', 'failed_groups' or 'all'."}
    )
    max_pivots_per_batch: int | None = field(
        default=None, metadata={"help": "Largest number of pivots per generation batch; None: no limit."}
    )
    estimator_buffer_size: int = field(default=10_000, metadata={"help": "Outcomes the estimator remembers."})
    estimator_min_samples: int = field(default=10, metadata={"help": "Outcomes before the estimator's first fit."})
    estimator_update_steps: int = field(default=1, metadata={"help": "Generation batches between two fits."})
    estimator_l2: float = field(
        default=1.0, metadata={"help": "Quadratic penalty on the estimator's slope; an outcome counts 1."}
    )
    deferred_branching: bool = field(
        default=False, metadata={"help": "Sample branches together with the next generation batch."}
    )
    hard_states_file: str | None = field(
        default=None, metadata={"help": "A .jsonl file inside output_dir for pivots without a successful branch."}
    )

    def validate(self) -> None:
        super().validate()
        for name, choices in CHOICES.items():
            value = vars(self)[name]
            if value not in choices:
                raise ValueError(f"`{name}`: {unknown_name('value', str(value), choices)}")
        least = {"num_branches": 2, "num_pivots": 1, "estimator_buffer_size": 1, "estimator_update_steps": 1}
        for name, minimum in least.items():
            if vars(self)[name] < minimum:
                why = "; a branch's advantage is relative to its siblings" if name == "num_branches" else ""
                raise ValueError(f"`{name}={vars(self)[name]}` must be at least {minimum}{why}.")
        for name in ("aux_loss_weight", "depth_bias", "success_threshold", "estimator_l2"):
            if not math.isfinite(vars(self)[name]):
                raise ValueError(f"`{name}={vars(self)[name]}` must be a finite number.")
        if self.aux_loss_weight < 0:
            raise ValueError(f"`aux_loss_weight={self.aux_loss_weight}` must not be negative; 0 switches it off.")
        if self.estimator_l2 <= 0:
            raise ValueError(f"`estimator_l2={self.estimator_l2}` must be positive, or separable outcomes diverge.")
        if self.max_pivots_per_batch is not None and self.max_pivots_per_batch < 1:
            raise ValueError(f"`max_pivots_per_batch={self.max_pivots_per_batch}` must be at least 1, or None.")
        if not self.segment_delimiters or not all(self.segment_delimiters):
            raise ValueError(f"`segment_delimiters={self.segment_delimiters!r}` must hold non-empty texts.")
        longest = self.max_completion_length or math.inf
        if self.segment_length is not None and not 1 <= self.segment_length <= longest:
            raise ValueError(
                f"`max_completion_length={self.max_completion_length}` is smaller than one segment of "
                f"`segment_length={self.segment_length}` tokens: there would be nothing to branch from but the "
                "prompt. Lower `segment_length` or raise `max_completion_length`."
                if self.segment_length > 0
                else f"`segment_length={self.segment_length}` must be at least 1 token."
            )
        if self.min_remaining_tokens is not None and self.min_remaining_tokens < 1:
            raise ValueError(f"`min_remaining_tokens={self.min_remaining_tokens}` must be at least 1, or None.")
        if (self.min_remaining_tokens or 0) > longest:
            raise ValueError(
                f"`min_remaining_tokens={self.min_remaining_tokens}` is more than `max_completion_length="
                f"{self.max_completion_length}`, so that not even the prompt could be branched from. Lower it."
            )
        pivots = self.rows_per_generation * self.num_pivots
        self.check_stage("num_branches", min(pivots, self.max_pivots_per_batch or pivots))
        if self.hard_states_file is not None:
            path_inside(self.output_dir or ".", self.hard_states_file, field="hard_states_file")
