"""Gradient features of the main rows, where possible out of the forward pass that TRL makes anyway."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import gather
from peft import PeftModel
from trl.trainer.utils import maybe_gather_lm_head_ctx, pad

from trl_explore.gradients import lm_head_of, sequence_features

from .base import ExplorationTrainer


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


class FeatureTrainer(ExplorationTrainer):
    """
    [`ExplorationTrainer`] that knows the gradient features of its main rows when their rewards are shaped.

    A hook on the backbone sees the hidden states of whatever forward pass there is: TRL's for old log-probabilities
    where it makes one, otherwise one more without gradients, whose LM head scores a single position.
    """

    feature_seconds = 0.0
    _feature_rows: FeatureRows | None = None
    _old_logprobs_follow = False

    @property
    def wants_features(self) -> bool:
        """Whether features are computed at all."""
        return False

    def gradient_features(self) -> torch.Tensor:
        """
        Features of all main rows, over all processes. To be called once per batch, from [`shape_rewards`].

        Returns:
            `torch.Tensor`: Float32 of shape `(N, D)`; NaN for rows without a token in the loss.
        """
        rows = self._feature_rows
        assert rows is not None
        if not rows.features:
            self._run_backbone(rows)
        features = torch.cat(rows.features)
        empty = torch.tensor([not any(mask) for mask in rows.loss_mask], device=features.device)
        self._feature_rows = None
        return gather(features.masked_fill(empty.unsqueeze(1), torch.nan))

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
        self.feature_seconds = 0.0
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
        with self._recorded(self._feature_rows, logits_to_keep):
            return super()._get_per_token_logps_and_entropies(*arguments, **kwargs)

    def _run_backbone(self, rows: FeatureRows) -> None:
        start = time.perf_counter()
        device, pad_id = self.accelerator.device, self._tokenizer.pad_token_id

        def padded(values: list[list[int]], value: int, side: str) -> torch.Tensor:
            return pad([torch.tensor(ids) for ids in values], padding_value=value, padding_side=side).to(device)

        ones = [[[1] * len(ids) for ids in part] for part in (rows.prompt_ids, rows.completion_ids)]
        ids = torch.cat([padded(rows.prompt_ids, pad_id, "left"), padded(rows.completion_ids, pad_id, "right")], dim=1)
        mask = torch.cat([padded(ones[0], 0, "left"), padded(ones[1], 0, "right")], dim=1)
        width = max(map(len, rows.completion_ids))
        batch, model = self.args.per_device_train_batch_size, self.model
        assert model is not None
        with torch.no_grad(), self._recorded(rows, width), self.accelerator.autocast():
            for part, part_mask in zip(ids.split(batch), mask.split(batch), strict=True):
                model(input_ids=part, attention_mask=part_mask, use_cache=False, logits_to_keep=1)
        self.feature_seconds = time.perf_counter() - start

    @contextmanager
    def _recorded(self, rows: FeatureRows, width: int) -> Iterator[None]:
        """Turn the hidden states of every forward pass into features of the next rows, and forget them."""
        model = self._language_model()

        def record(module: Any, args: Any, output: Any) -> None:
            start = time.perf_counter()
            hidden = output.last_hidden_state[:, -width - 1 : -1]  # the position before a token is where it was drawn
            first = sum(map(len, rows.features))
            part = slice(first, first + len(hidden))
            ids, mask = torch.zeros(2, len(hidden), width, dtype=torch.long, device=hidden.device)
            for row, (tokens, real) in enumerate(zip(rows.completion_ids[part], rows.loss_mask[part], strict=True)):
                ids[row, : len(tokens)] = torch.tensor(tokens, device=hidden.device)
                mask[row, : len(real)] = torch.tensor(real, device=hidden.device)
            layer = model.get_output_embeddings()
            bias = [layer.bias] if getattr(layer, "bias", None) is not None else []
            in_fp32 = self.args.cast_lm_head_to_fp32
            with torch.no_grad(), maybe_gather_lm_head_ctx(layer.weight, *bias):
                head = lm_head_of(model, temperature=self.temperature)
                if in_fp32:
                    with torch.autocast(hidden.device.type, enabled=False):
                        found = sequence_features(hidden.float(), ids, mask, head)
                else:
                    found = sequence_features(hidden, ids, mask, head)
            rows.features.append(found.features.to(self.accelerator.device))
            self.feature_seconds += time.perf_counter() - start

        handle = model.base_model.register_forward_hook(record)
        try:
            yield
        finally:
            handle.remove()

    def _language_model(self) -> Any:
        model: Any = self.accelerator.unwrap_model(self.model)
        return model.get_base_model() if isinstance(model, PeftModel) else model
