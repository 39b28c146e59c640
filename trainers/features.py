"""Gradient features of the main rows, where possible out of the forward pass that TRL makes anyway."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import gather
from peft import PeftModel
from trl.trainer.utils import maybe_gather_lm_head_ctx, pad

from trl_explore.gradients.features import lm_head_of, sequence_features
from trl_explore.rows.streams import kept_randomness

from .base import ExplorationTrainer
from .sampling import without_dropout


@dataclass
class FeatureRows:
    """
    Rows of a generation batch whose features are wanted, of this process.

    Args:
        prompt_ids (`list[list[int]]`):
            Prompts, `[B][P_i]`.
        completion_ids (`list[list[int]]`):
            Completions, `[B][T_i]`.
        loss_mask (`list[list[int]]`):
            1 for tokens of the loss, `[B][T_i]`.
        features (`list[torch.Tensor]`):
            Features so far, in parts of shape `(b, D)`.
    """

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    loss_mask: list[list[int]]
    features: list[torch.Tensor] = field(default_factory=list)


class FeaturePass:
    """
    Computes gradient features of a trainer's rows by a hook on the backbone.

    Args:
        trainer ([`~trl.GRPOTrainer`]):
            Any GRPO trainer; its current policy is the one whose gradients are taken.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.seconds = 0.0

    def language_model(self) -> Any:
        """The causal language model without the wrappers of accelerate and PEFT."""
        model: Any = self.trainer.accelerator.unwrap_model(self.trainer.model)
        return model.get_base_model() if isinstance(model, PeftModel) else model

    def gathered(self, rows: FeatureRows) -> torch.Tensor:
        """
        Features of the rows of all processes; runs the backbone unless it was watched before.

        Args:
            rows ([`FeatureRows`]):
                Rows of this process; every process has as many.

        Returns:
            `torch.Tensor`: Float32 of shape `(N, D)`; NaN for rows without a token in the loss.
        """
        if not rows.features:
            self.run(rows)
        features = torch.cat(rows.features)
        empty = torch.tensor([not any(mask) for mask in rows.loss_mask], device=features.device)
        return gather(features.masked_fill(empty.unsqueeze(1), torch.nan))

    def run(self, rows: FeatureRows) -> None:
        """
        Send rows through the backbone without dropout; the LM head scores one position only.

        Args:
            rows ([`FeatureRows`]):
                Rows of this process; their features are appended.
        """
        start = time.perf_counter()
        trainer = self.trainer
        device, pad_id = trainer.accelerator.device, trainer._tokenizer.pad_token_id

        def padded(values: list[list[int]], value: int, side: str) -> torch.Tensor:
            return pad([torch.tensor(ids) for ids in values], padding_value=value, padding_side=side).to(device)

        ones = [[[1] * len(ids) for ids in part] for part in (rows.prompt_ids, rows.completion_ids)]
        ids = torch.cat([padded(rows.prompt_ids, pad_id, "left"), padded(rows.completion_ids, pad_id, "right")], dim=1)
        mask = torch.cat([padded(ones[0], 0, "left"), padded(ones[1], 0, "right")], dim=1)
        width = max(map(len, rows.completion_ids))
        batch = trainer.args.per_device_train_batch_size
        with (
            torch.no_grad(),
            kept_randomness(device),
            without_dropout(trainer.model),
            self.watching(rows, width),
            trainer.accelerator.autocast(),
        ):
            for part, part_mask in zip(ids.split(batch), mask.split(batch), strict=True):
                trainer.model(input_ids=part, attention_mask=part_mask, use_cache=False, logits_to_keep=1)
        self.seconds = time.perf_counter() - start

    @contextmanager
    def watching(self, rows: FeatureRows, width: int) -> Iterator[None]:
        """
        Turn the hidden states of every forward pass into features of the next rows, and forget them.

        Args:
            rows ([`FeatureRows`]):
                Rows that will be sent through the backbone, in their order.
            width (`int`):
                Columns that their completions take at the end of a batch.
        """
        trainer, model = self.trainer, self.language_model()
        in_fp32 = trainer.args.cast_lm_head_to_fp32

        def record(module: Any, args: Any, output: Any) -> None:
            start = time.perf_counter()
            hidden = output.last_hidden_state[:, -width - 1 : -1]  # the position before a token is where it was drawn
            hidden = hidden.float() if in_fp32 else hidden
            first = sum(map(len, rows.features))
            part = slice(first, first + len(hidden))
            ids, mask = torch.zeros(2, len(hidden), width, dtype=torch.long, device=hidden.device)
            for row, (tokens, real) in enumerate(zip(rows.completion_ids[part], rows.loss_mask[part], strict=True)):
                ids[row, : len(tokens)] = torch.tensor(tokens, device=hidden.device)
                mask[row, : len(real)] = torch.tensor(real, device=hidden.device)
            layer = model.get_output_embeddings()
            bias = [layer.bias] if getattr(layer, "bias", None) is not None else []
            precision = torch.autocast(hidden.device.type, enabled=False) if in_fp32 else nullcontext()
            with torch.no_grad(), precision, maybe_gather_lm_head_ctx(layer.weight, *bias):
                head = lm_head_of(model, temperature=trainer.temperature)
                found = sequence_features(hidden, ids, mask, head)
            rows.features.append(found.features.to(trainer.accelerator.device))
            self.seconds += time.perf_counter() - start

        handle = model.base_model.register_forward_hook(record)
        try:
            yield
        finally:
            handle.remove()


class FeatureTrainer(ExplorationTrainer):
    """
    [`ExplorationTrainer`] that knows the gradient features of its main rows when their rewards are shaped.

    A hook on the backbone sees the hidden states of whatever forward pass there is: TRL's for old log-probabilities
    where it makes one and nothing random is in it (dropout), otherwise one more without gradients.
    """

    # Class-level defaults: objects made without `__init__` behave as plain GRPO.
    feature_pass: FeaturePass
    wants_features = False  # whether features are computed at all
    _feature_rows: FeatureRows | None = None
    _old_logprobs_follow = False

    def setup(self) -> None:
        super().setup()
        self.feature_pass = FeaturePass(self)

    def gradient_features(self) -> torch.Tensor:
        """
        Features of all main rows, over all processes. To be called once per batch, from [`shape_rewards`].

        Returns:
            `torch.Tensor`: Float32 of shape `(N, D)`; NaN for rows without a token in the loss.
        """
        rows, self._feature_rows = self._feature_rows, None
        assert rows is not None
        return self.feature_pass.gathered(rows)

    # ---------------------------------------------------------------------------------------------- seams into TRL

    def _generate(self, prompts):
        result = super()._generate(prompts)
        if self._partial is not None or not self._is_training or not self.wants_features:
            return result
        prompt_ids, completion_ids, tool_mask = result[:3]
        loss_mask = tool_mask or [[1] * len(ids) for ids in completion_ids]
        if self.mask_truncated_completions:
            ends = {*self.eos_token_ids, self._tokenizer.pad_token_id}
            loss_mask = [
                m if ids[-1] in ends else [0] * len(m) for m, ids in zip(loss_mask, completion_ids, strict=True)
            ]
        self._feature_rows = FeatureRows(prompt_ids, completion_ids, loss_mask)
        self.feature_pass.seconds = 0.0
        # As in `_generate_and_score_completions`: old log-probabilities, where steps and rollouts do not align.
        every = self.args.steps_per_generation * self.num_iterations
        self._old_logprobs_follow = self.args.gradient_accumulation_steps % every != 0 or (
            self.use_vllm and self.vllm_importance_sampling_correction
        )
        return result

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs):
        arguments = model, input_ids, attention_mask, logits_to_keep, *args
        if self._feature_rows is None or not self._old_logprobs_follow:
            return super()._get_per_token_logps_and_entropies(*arguments, **kwargs)
        self._old_logprobs_follow = False
        self.rows_stay_apart = True
        before = random_state(self.accelerator.device)
        try:
            with self.feature_pass.watching(self._feature_rows, logits_to_keep):
                result = super()._get_per_token_logps_and_entropies(*arguments, **kwargs)
        finally:
            self.rows_stay_apart = False
        if not torch.equal(random_state(self.accelerator.device), before):
            # Drawn was dropout: TRL's log-probabilities have it, but equal completions must have equal features.
            self._feature_rows.features.clear()
        return result


def random_state(device: torch.device) -> torch.Tensor:
    """
    State of the generators that a forward pass draws from.

    Args:
        device (`torch.device`):
            Device of the model.

    Returns:
        `torch.Tensor`: Bytes, another after every draw.
    """
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state())
    return torch.cat(states)
