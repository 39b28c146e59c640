"""Shared prefixes are computed once: the forward pass of log-probabilities over packed rows."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import PeftModel

from trl_explore.packed_attention import NO_MASK, enable_packing
from trl_explore.packing import MIN_SAVED, PackedRows, pack_rows

from .streams import StreamTrainer


class PackedTrainer(StreamTrainer):
    """
    [`~trl.GRPOTrainer`] that computes what the rows of a micro-batch share once, forward and backward.

    Log-probabilities and entropies come back in TRL's shapes, so that losses, KL terms, importance ratios and metrics
    stay TRL's. `shared_prefix_training="off"` leaves TRL's own pass.
    """

    shared_prefix_training = "off"
    min_saved = MIN_SAVED
    rows_stay_apart = False  # while hidden states are watched row by row

    def __init__(self, *, args, **kwargs):
        super().__init__(args=args, **kwargs)
        if args.shared_prefix_training == "off":
            return
        for model in filter(None, (self.model, self.ref_model)):
            enable_packing(_language_model(model))
        self.shared_prefix_training = args.shared_prefix_training

    def _get_per_token_logps_and_entropies(
        self,
        model,
        input_ids,
        attention_mask,
        logits_to_keep,
        batch_size=None,
        compute_entropy=False,
        **kwargs,
    ):
        arguments = model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy
        if self.shared_prefix_training == "off" or self.rows_stay_apart:
            return super()._get_per_token_logps_and_entropies(*arguments, **kwargs)
        logps, entropies = [], []
        size = batch_size or len(input_ids)
        for ids, mask in zip(input_ids.split(size), attention_mask.split(size), strict=True):
            prompt, completion = slice(None, -logits_to_keep), slice(-logits_to_keep, None)
            rows = pack_rows(
                ids[:, prompt], mask[:, prompt], ids[:, completion], mask[:, completion], min_saved=self.min_saved
            )
            outputs = self._forward_packed(model, rows)
            logps.append(rows.unpack(outputs.log_probs))
            if compute_entropy:
                entropies.append(rows.unpack(outputs.entropy))
        return torch.cat(logps), torch.cat(entropies) if compute_entropy else None, None

    def _forward_packed(self, model, rows: PackedRows) -> Any:
        language_model = _language_model(self.accelerator.unwrap_model(model))
        with _scored_only(language_model, rows.scored), self.accelerator.autocast():
            return model(
                input_ids=rows.input_ids,
                attention_mask=NO_MASK.to(rows.input_ids.device),
                position_ids=rows.position_ids,
                shift_labels=rows.labels,
                fused_lm_head=True,
                packed_rows=rows,
            )


def _language_model(model: Any) -> Any:
    return model.get_base_model() if isinstance(model, PeftModel) else model


@contextmanager
def _scored_only(model: Any, scored: torch.Tensor) -> Iterator[None]:
    """Let the LM head see one hidden state for every token that is scored: a position may predict several."""

    def select(module: Any, args: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state[:, scored]
        return output

    handle = model.base_model.register_forward_hook(select)
    try:
        yield
    finally:
        handle.remove()
