"""Shared prefixes are computed once: log-probabilities over packed rows, and micro-batches that suit them."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import PeftModel
from trl.trainer.utils import split_tensor_dict

from trl_explore.packed_attention import BLOCK, NO_MASK, enable_packing, own_attention
from trl_explore.packing import MIN_SAVED, group_rows, pack_rows
from trl_explore.streams import RowDict, row_tokens, select_rows

from .streams import StreamTrainer

PAYS_FROM = 1.2  # tokens of the rows per token computed, from which on "auto" packs


class PackedTrainer(StreamTrainer):
    """
    [`~trl.GRPOTrainer`] that computes what the rows of a micro-batch share once, forward and backward.

    Log-probabilities and entropies come back in TRL's shapes, so that losses, KL terms, importance ratios and metrics
    stay TRL's. With `shared_prefix_training="off"`, everything is TRL's.
    """

    shared_prefix_training = "off"
    min_saved = MIN_SAVED
    rows_stay_apart = False  # while hidden states are watched row by row

    def __init__(self, *, args, **kwargs):
        super().__init__(args=args, **kwargs)
        mode = args.shared_prefix_training
        if mode == "off":
            return
        try:
            self._enable_packing()
        except ValueError as error:
            message = f"`shared_prefix_training={mode!r}` cannot be used: {error}"
            if mode == "on":
                raise ValueError(f"{message}; or leave `shared_prefix_training` off.") from None
            warnings.warn(f"{message}. It stays off.", stacklevel=2)
            return
        self.shared_prefix_training, self.trees_stay_together = mode, True

    def _enable_packing(self) -> None:
        if self._is_vlm:
            raise ValueError("the rows of a vision-language model also share images: pass a text model")
        if self.aux_loss_enabled:
            raise ValueError("the load-balancing loss counts every token of every row: set `router_aux_loss_coef=0.0`")
        if self.args.per_device_train_batch_size == 1:
            raise ValueError("a single row shares nothing: set `per_device_train_batch_size` to at least 2")
        if self.args.torch_compile:
            raise ValueError("every batch would be compiled anew: set `torch_compile=False`")
        if isinstance(self.model, PeftModel) and self.model.active_peft_config.is_prompt_learning:
            raise ValueError("virtual tokens stand before every row: train LoRA, or the whole model")
        for model in filter(None, (self.model, self.ref_model)):
            enable_packing(self._unwrapped(model))
        if not self.is_fsdp_enabled and not self.is_deepspeed_enabled:  # where weights are not in one piece yet
            self._try_packing()

    def _try_packing(self) -> None:
        """Compare a few rows: no list of models knows which of them read more than tokens, order and mask."""
        model: Any = self.model
        size, device = model.config.get_text_config().vocab_size, self.accelerator.device
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(size, (3, 12), generator=generator).to(device)
        ids[1, :8] = ids[0, :8]
        mask = torch.ones_like(ids)
        mask[2, :4] = 0  # a shorter prompt
        found, training = {}, model.training
        model.eval()
        try:
            with torch.no_grad():
                for mode in ("off", "on"):
                    self.shared_prefix_training, self.min_saved = mode, 1
                    found[mode] = self._get_per_token_logps_and_entropies(model, ids, mask, 6)[0].float()
        finally:
            del self.shared_prefix_training, self.min_saved
            model.train(training)
        error = (found["on"] - found["off"]).abs().mean().item()
        exact = model.dtype == torch.float32 and self.accelerator.mixed_precision == "no"
        if error > (1e-3 if exact else 0.1):
            raise ValueError(
                f"{type(self._unwrapped(model)).__name__} gives packed rows other log-probabilities ({error:.1e} on "
                "average): it looks at more than tokens, their order and a mask (learned positions, attention sinks)"
            )

    # ---------------------------------------------------------------------------------------------- seams into TRL

    def _generate_single_turn(self, *args, **kwargs):
        if self.shared_prefix_training == "off":
            return super()._generate_single_turn(*args, **kwargs)
        with own_attention(self._unwrapped(self.model)):
            return super()._generate_single_turn(*args, **kwargs)

    def _prepare_inputs(self, generation_batch):
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if not self.trees_stay_together or self._buffered_inputs is before:
            return inputs
        self._buffered_inputs = _regroup(self._buffered_inputs)
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

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
        if self.shared_prefix_training == "off" or self.rows_stay_apart:
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy, **kwargs
            )
        parts: list[Any] = []
        size = batch_size or len(input_ids)
        for ids, mask in zip(input_ids.split(size), attention_mask.split(size), strict=True):
            found = self._packed_logps(model, ids, mask, logits_to_keep)
            if found is None:
                found = super()._get_per_token_logps_and_entropies(
                    model, ids, mask, logits_to_keep, compute_entropy=compute_entropy, **kwargs
                )
            parts.append(found)
        logps, entropies, *_ = zip(*parts, strict=True)
        return torch.cat(logps), torch.cat(entropies) if compute_entropy else None, None

    def _packed_logps(self, model, ids, mask, width: int) -> tuple[Any, Any, None] | None:
        """Log-probabilities and entropies `(B, T)`; `None` where it does not pay."""
        rows = pack_rows(
            ids[:, :-width],
            mask[:, :-width],
            ids[:, -width:],
            mask[:, -width:],
            min_saved=self.min_saved,
            multiple_of=BLOCK if ids.is_cuda else 1,
        )
        packs = self.shared_prefix_training == "on" or rows.token_ratio >= PAYS_FROM
        if torch.is_grad_enabled() and self._is_training:
            # Of this process alone: the main one's are logged, and a gather per pass is not worth the rest.
            self._metrics["train"]["packing/token_ratio"].append(rows.token_ratio)
            self._metrics["train"]["packing/packed"].append(float(packs))
        if not packs:
            return None
        with _scored_only(self._unwrapped(model), rows.scored), self.accelerator.autocast():
            outputs = model(
                input_ids=rows.input_ids,
                attention_mask=NO_MASK.to(ids.device),
                position_ids=rows.position_ids,
                shift_labels=rows.labels,
                fused_lm_head=True,
                packed_rows=rows,
            )
        entropies = None if outputs.entropy is None else rows.unpack(outputs.entropy)  # the reference has none
        return rows.unpack(outputs.log_probs), entropies, None

    def _unwrapped(self, model: Any) -> Any:
        """The causal language model without the wrappers of accelerate and PEFT."""
        model = self.accelerator.unwrap_model(model)
        return model.get_base_model() if isinstance(model, PeftModel) else model


def _regroup(batches: list[RowDict]) -> list[RowDict]:
    """The same rows in as many micro-batches, with the rows of a prompt in as few as possible."""
    rows = {key: v if v.dim() == 0 else torch.cat([b[key] for b in batches]) for key, v in batches[0].items()}
    order = torch.tensor(group_rows(*row_tokens(rows), num_batches=len(batches)))
    return split_tensor_dict(select_rows(rows, order.to(rows["prompt_ids"].device)), len(batches))


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
