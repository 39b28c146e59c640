"""Shared prefixes are computed once: log-probabilities over packed rows, and micro-batches that suit them."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import PeftModel
from trl.trainer.utils import split_tensor_dict

from trl_explore.packing.attention import BLOCK, NO_MASK, enable_packing, own_attention
from trl_explore.packing.layout import (
    MIN_SAVED,
    PackedRows,
    check_fits,
    computed_tokens,
    group_rows,
    pack_rows,
    split_rows,
)
from trl_explore.rows.streams import RowDict, row_tokens, select_rows

from .streams import StreamTrainer

# Tokens of the rows per token computed, from which on a mode packs. Last tokens and short common starts alone are
# not worth another attention: where a window cuts, it keeps more memory than TRL's own pass.
PAYS_FROM = {"on": 1.05, "auto": 1.2}


class PackedTrainer(StreamTrainer):
    """
    [`~trl.GRPOTrainer`] that computes what the rows of a micro-batch share once, forward and backward.

    Log-probabilities and entropies come back in TRL's shapes, so that losses, KL terms, importance ratios and metrics
    stay TRL's. With `shared_prefix_training="off"`, everything is TRL's.
    """

    shared_prefix_training = "off"
    packed_token_budget: int | None = None
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
        self.packed_token_budget = args.packed_token_budget
        if self.packed_token_budget is not None:
            self._check_budget()

    def _check_budget(self) -> None:
        longest = self._longest_prompt()
        if longest is not None:
            check_fits(longest + (self.max_completion_length or 0), self.args.packed_token_budget)
        self._check_passes()

    def _check_passes(self) -> None:
        """Parameters that reentrant checkpointing touches once per pass are reduced over processes as often."""
        reentrant = (self.args.gradient_checkpointing_kwargs or {}).get("use_reentrant")
        if self.args.gradient_checkpointing and reentrant and self.accelerator.num_processes > 1:
            raise ValueError(
                f"`packed_token_budget={self.packed_token_budget}` makes several forward passes before a backward "
                "pass, which reentrant gradient checkpointing on several processes does not allow: set "
                "`gradient_checkpointing_kwargs={'use_reentrant': False}`, or leave `packed_token_budget` out."
            )

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

    def _generate(self, prompts):
        result = super()._generate(prompts)
        if self.packed_token_budget is not None:  # before anything is computed of these rows
            longest = max((len(p) + len(c) for p, c in zip(*result[:2], strict=True)), default=0)
            check_fits(self._max_over_processes(longest), self.packed_token_budget)
        return result

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
        batches = list(zip(input_ids.split(size), attention_mask.split(size), strict=True))
        for (ids, mask), packs in zip(batches, self._packs(batches, logits_to_keep), strict=True):
            found = self._packed_logps(model, ids, mask, logits_to_keep, packs)
            if found is None:
                found = super()._get_per_token_logps_and_entropies(
                    model, ids, mask, logits_to_keep, compute_entropy=compute_entropy, **kwargs
                )
            parts.append(found)
        logps, entropies, *_ = zip(*parts, strict=True)
        return torch.cat(logps), torch.cat(entropies) if compute_entropy else None, None

    def _packs(self, batches: list[tuple[Any, Any]], width: int) -> list[list[list[int]]]:
        """
        The rows of each sequence of each batch. Every process makes as many forward passes, because collective calls
        (sharded weights, buffers) belong to them: where others have more sequences, the last ones are of no row.
        """
        budget = self.packed_token_budget
        if budget is None:
            return [[list(range(len(ids)))] for ids, _ in batches]
        packs = [
            split_rows(computed_tokens(*_sides(ids, mask, width)), budget=budget, min_saved=self.min_saved)
            for ids, mask in batches
        ]
        if self.accelerator.num_processes == 1:
            return packs
        most = self._max_over_processes(max(map(len, packs)))
        return [found + [[]] * (most - len(found)) for found in packs]

    def _packed_logps(self, model, ids, mask, width: int, packs: list[list[int]]) -> tuple[Any, Any, None] | None:
        """Log-probabilities and entropies `(B, T)`; `None` where TRL's own pass is to compute them."""
        sides = _sides(ids, mask, width)
        options: dict[str, Any] = dict(min_saved=self.min_saved, multiple_of=BLOCK if ids.is_cuda else 1)
        sequences = [pack_rows(*(side[rows] for side in sides), **options) for rows in packs]
        ratio = sum(rows.num_tokens for rows in sequences) / max(sum(rows.num_unique for rows in sequences), 1)
        # TRL's own pass is one, and its tokens are not bounded: more sequences are packed whatever they share.
        packed = len(packs) > 1 or ratio >= PAYS_FROM[self.shared_prefix_training]
        if torch.is_grad_enabled() and self._is_training:
            # Of this process alone: the main one's are logged, and a gather per pass is not worth the rest.
            metrics = self._metrics["train"]
            metrics["packing/token_ratio"].append(ratio)
            metrics["packing/packed"].append(float(packed))
            metrics["packing/sequences"].append(float(len([rows for rows in packs if rows])))
        if not packed:
            return None
        order = torch.tensor([i for rows in packs for i in rows], device=ids.device).argsort()
        logps, entropies = zip(*(self._sequence_logps(model, rows) for rows in sequences), strict=True)
        without = entropies[0] is None  # the reference has none
        return torch.cat(logps)[order], None if without else torch.cat(entropies)[order], None

    def _sequence_logps(self, model: Any, rows: PackedRows) -> tuple[Any, Any]:
        with _scored_only(self._unwrapped(model), rows.scored), self.accelerator.autocast():
            outputs = model(
                input_ids=rows.input_ids,
                attention_mask=NO_MASK.to(rows.input_ids.device),
                position_ids=rows.position_ids,
                shift_labels=rows.labels,
                fused_lm_head=True,
                packed_rows=rows,
            )
        return rows.unpack(outputs.log_probs), None if outputs.entropy is None else rows.unpack(outputs.entropy)

    def _unwrapped(self, model: Any) -> Any:
        """The causal language model without the wrappers of accelerate and PEFT."""
        model = self.accelerator.unwrap_model(model)
        return model.get_base_model() if isinstance(model, PeftModel) else model


def _sides(ids: torch.Tensor, mask: torch.Tensor, width: int) -> tuple[torch.Tensor, ...]:
    """Prompts and completions with their masks, as [`pack_rows`] takes them."""
    return ids[:, :-width], mask[:, :-width], ids[:, -width:], mask[:, -width:]


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
