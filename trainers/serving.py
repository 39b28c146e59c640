"""The vLLM backend in a trainer: when weights are sent, what may be asked, and what is said about the options."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from datasets import Dataset
from trl.trainer import grpo_trainer

from trl_explore.rows.streams import RowDict, loss_mask

from .resume import ResumableTrainer
from .vllm_backend import WEIGHTS_FOLDER, Answer, Request, ServedGeneration

MASKED_FRACTION = 0.1  # of the rows of a batch; above it the user is told


class ServingTrainer(ResumableTrainer):
    """
    [`~trl.GRPOTrainer`] whose vLLM backend is [`ServedGeneration`]. Without `use_vllm` nothing differs.
    """

    args: Any
    max_completion_length: int
    use_vllm = False
    vllm_generation: ServedGeneration
    _last_loaded_step: int
    _told_about_masks = False

    def __init__(self, *, args, **kwargs):
        with _backend(weight_sync=args.vllm_weight_sync, folder=Path(args.output_dir).resolve() / WEIGHTS_FOLDER):
            super().__init__(args=args, **kwargs)
        if args.use_vllm:
            warn_about_sampling(args)
            self._check_prompts()

    @property
    def max_served_length(self) -> int | None:
        """Tokens that vLLM takes in one sequence; `None` without vLLM."""
        return self.vllm_generation.max_served_length if self.use_vllm else None

    def complete(self, asked: list[Request]) -> list[list[Answer]]:
        """
        Continue prefixes by vLLM, with the weights of this step.

        Args:
            asked (`list[Request]`):
                Requests of this process; may be empty.

        Returns:
            `list[list[Answer]]`: `[R][num_samples_i]`.
        """
        if self.state.global_step != self._last_loaded_step:
            self.vllm_generation.sync_weights()
            self._last_loaded_step = self.state.global_step
        return self.vllm_generation.complete(asked)

    @contextmanager
    def budgeted(self, prefixes: list[list[int]], budgets: list[int]) -> Iterator[None]:
        """
        Let TRL's own sampling ask vLLM for no more than there is room for: later turns are no whole completions.

        Args:
            prefixes (`list[list[int]]`):
                What may be continued.
            budgets (`list[int]`):
                New tokens that each may have.
        """
        if not self.use_vllm:
            yield
            return
        self.vllm_generation.budgets = dict(zip(map(tuple, prefixes), budgets, strict=True))
        try:
            yield
        finally:
            self.vllm_generation.budgets = {}

    def unscored(self, completion_ids: list[list[int]]) -> list[list[float | None]] | None:
        """
        Log-probabilities of rows that vLLM did not sample as they are trained: TRL corrects nothing there.

        Args:
            completion_ids (`list[list[int]]`):
                Completions, `[B][T_i]`.

        Returns:
            `list[list[None]]`, *optional*: `[B][T_i]`; `None` without vLLM, where no row has any.
        """
        return [[None] * len(ids) for ids in completion_ids] if self.use_vllm else None

    def watch_correction(self, output: RowDict) -> None:
        """
        Count rows that TRL's correction takes out of the loss, and tell the user once if they are many.

        Args:
            output (`dict`):
                Rows as TRL scored them.
        """
        if "importance_sampling_ratio" not in output or self.vllm_importance_sampling_mode != "sequence_mask":
            return
        trained = loss_mask(output).any(dim=1)
        masked = (output["importance_sampling_ratio"].squeeze(1) == 0) & trained
        fraction = masked.sum().item() / max(trained.sum().item(), 1)
        self._metrics["train"]["sampling/masked_fraction"].append(fraction)
        if fraction > MASKED_FRACTION and not self._told_about_masks:
            self._told_about_masks = True
            warnings.warn(
                f"{fraction:.0%} of the rows were sampled by vLLM with probabilities so far from the trainer's that "
                "`vllm_importance_sampling_mode='sequence_mask'` takes them out of the loss. Small differences add up "
                "over long completions: `vllm_importance_sampling_mode='token_truncate'` keeps the rows, a larger "
                "`vllm_importance_sampling_clip_max` keeps more of them. If `sampling/sampling_logp_difference/mean` "
                "grows from step to step, the server does not get the weights.",
                stacklevel=2,
            )

    def _check_prompts(self) -> None:
        """The longest prompt must fit; where tools or environments add to it, it is checked when it is sampled."""
        longest = self._longest_prompt()
        if longest is not None:
            self.vllm_generation._check_lengths([Request([0] * longest, 1, self.max_completion_length)])

    def _longest_prompt(self, most: int = 10_000) -> int | None:
        """Tokens of the longest of so many prompts; `None` where tools or images add to them, and for a stream."""
        data = self.train_dataset
        if self.tools or self._is_vlm or not isinstance(data, Dataset) or "prompt" not in data.column_names:
            return None
        prompts = data.select(range(min(most, len(data))))["prompt"][:]
        longest = sorted(prompts, key=lambda prompt: len(str(prompt)))[-4:]
        return max(len(ids) for ids in self._tokenize_prompts(longest)[0])


@contextmanager
def _backend(**options) -> Iterator[None]:
    """TRL makes its backend in its constructor and has no slot for another; the name is ours for that long."""
    before = grpo_trainer.VLLMGeneration
    vars(grpo_trainer)["VLLMGeneration"] = partial(ServedGeneration, **options)
    try:
        yield
    finally:
        vars(grpo_trainer)["VLLMGeneration"] = before


def warn_about_sampling(args) -> None:
    """
    Tell a user of vLLM about options that harm a run without an error.

    Args:
        args ([`~trl.GRPOConfig`]):
            The configuration.
    """
    cuts = {"top_p": args.top_p < 1, "top_k": args.top_k > 0, "min_p": bool(args.min_p)}
    if args.vllm_importance_sampling_correction and any(cuts.values()):
        named = ", ".join(f"`{name}={vars(args)[name]}`" for name, cut in cuts.items() if cut)
        warnings.warn(
            f"{named}: vLLM reports the probabilities of the truncated distribution that it samples from, the trainer "
            "computes those of the whole one, so every importance ratio is biased. Sample without truncation, or set "
            "`vllm_importance_sampling_correction=False`.",
            stacklevel=3,
        )
    if "seed" in (args.generation_kwargs or {}):
        warnings.warn(
            f"`generation_kwargs` has `seed={args.generation_kwargs['seed']}`: vLLM then answers equal requests "
            "equally, so that the siblings of a group and the branches of a prefix become copies of each other. "
            "Leave `seed` out; `seed` of the configuration does not harm.",
            stacklevel=3,
        )
