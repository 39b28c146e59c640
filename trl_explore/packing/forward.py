"""Shared prefixes are computed once: log-probabilities over packed rows, and micro-batches that suit them."""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from accelerate import DistributedType
from peft import PeftModel
from trl.trainer.utils import split_tensor_dict

from trl_explore.compat import moved
from trl_explore.packing.attention import BLOCK, NO_MASK, enable_packing, num_compilations, own_attention
from trl_explore.rows.layout import (
    MIN_SAVED,
    PackedRows,
    check_fits,
    computed_tokens,
    group_rows,
    pack_rows,
    split_rows,
)
from trl_explore.rows.policy import Policy
from trl_explore.rows.streams import RowDict, row_tokens, select_rows
from trl_explore.sampling.generation import whole_row_adapter
from trl_explore.sampling.positions import fixed_rotary_length

SHARDED = (DistributedType.DEEPSPEED, DistributedType.FSDP)
# Tokens of the rows per token computed, from which on a mode packs. Last tokens and short common starts alone are
# not worth another attention: where a window cuts, it keeps more memory than TRL's own pass.
PAYS_FROM = {"on": 1.05, "auto": 1.2}


class PackedForward:
    """Computes what a micro-batch's rows share once, forward and backward. Results come back in TRL's shapes, so that
    losses and metrics stay TRL's; with `mode="off"`, everything is TRL's."""

    min_saved = MIN_SAVED

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.mode = "off"
        self.token_budget: int | None = None
        self.longest: int | None = None  # width of rows up to which positions do not depend on it; None for any

    @property
    def window(self) -> int:
        """
        Number of consecutive micro-batches that may exchange rows.

        Rows of one optimizer step may change places, because their gradients are summed. If TRL computes something
        from a micro-batch alone, all rows stay where TRL put them, so that results are those without packing.
        """
        args = self.policy.args
        return math.gcd(args.steps_per_generation, args.gradient_accumulation_steps) if self.regroups else 1

    @property
    def regroups(self) -> bool:
        """Whether rows of a prompt are moved into one micro-batch."""
        return self.mode != "off" and not looks_at_micro_batches(self.policy.args)

    def enable(
        self, *, ref_model: Any, longest_prompt: Callable[[], int | None], vision: bool, router_loss: bool
    ) -> None:
        """Turn packing on as `shared_prefix_training` says.
        ValueError: with `"on"` if it cannot be; always if `packed_token_budget` cannot hold a row."""
        args = self.policy.args
        try:
            if vision:
                raise ValueError("the rows of a vision-language model also share images: pass a text model")
            if router_loss:
                raise ValueError(
                    "the load-balancing loss counts every token of every row: set `router_aux_loss_coef=0.0`"
                )
            self._check_options()
            for model in filter(None, (self.policy.model, ref_model)):
                enable_packing(unwrapped(self.policy, model))
            self.longest = fixed_rotary_length(unwrapped(self.policy, self.policy.model).config)
            if self.policy.accelerator.distributed_type not in SHARDED:  # whose weights are not in one piece yet
                self._try()
        except ValueError as error:
            message = f"`shared_prefix_training={args.shared_prefix_training!r}` cannot be used: {error}"
            if args.shared_prefix_training == "on":
                raise ValueError(f"{message}; or leave `shared_prefix_training` off.") from None
            warnings.warn(f"{message}. It stays off.", stacklevel=2)
            return
        self.mode, self.token_budget = args.shared_prefix_training, args.packed_token_budget
        if self.token_budget is not None:
            self.check_longest(longest_prompt())
            self._check_passes()

    def check_longest(self, longest: int | None) -> None:
        """Raise ValueError if `packed_token_budget` cannot hold the longest prompt with its completion. None if the
        length of prompts is not known."""
        if longest is not None and self.token_budget is not None:
            check_fits(longest + (self.policy.args.max_completion_length or 0), self.token_budget)

    def _check_passes(self) -> None:
        """Parameters that reentrant checkpointing touches once per pass are reduced over processes as often."""
        args = self.policy.args
        reentrant = (args.gradient_checkpointing_kwargs or {}).get("use_reentrant")
        if args.gradient_checkpointing and reentrant and self.policy.ranks.number > 1:
            raise ValueError(
                f"`packed_token_budget={self.token_budget}` makes several forward passes before a backward "
                "pass, which reentrant gradient checkpointing on several processes does not allow: set "
                "`gradient_checkpointing_kwargs={'use_reentrant': False}`, or leave `packed_token_budget` out."
            )

    def _check_options(self) -> None:
        args, model = self.policy.args, self.policy.model
        if what := moved("shared_prefix_training"):
            raise ValueError(what)
        if args.per_device_train_batch_size == 1:
            raise ValueError("a single row shares nothing: set `per_device_train_batch_size` to at least 2")
        if args.torch_compile:
            raise ValueError("every batch would be compiled anew: set `torch_compile=False`")
        if isinstance(model, PeftModel) and model.active_peft_config.is_prompt_learning:
            raise ValueError("virtual tokens stand before every row: train LoRA, or the whole model")
        if (adapter := whole_row_adapter(model)) is not None:
            raise ValueError(f"the model has {adapter}: train plain LoRA, or the whole model")

    def _try(self) -> None:
        """Compare a few rows: no list of models knows which of them read more than tokens, order and mask."""
        model: Any = self.policy.model
        accelerator = self.policy.accelerator
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(model.config.get_text_config().vocab_size, (3, 12), generator=generator)
        ids = ids.to(accelerator.device)
        ids[1, :8] = ids[0, :8]
        mask = torch.ones_like(ids)
        mask[2, :4] = 0  # a shorter prompt
        found, training = {}, model.training
        model.eval()
        try:
            with torch.no_grad():
                for mode in ("off", "on"):
                    self.mode, self.min_saved = mode, 1
                    found[mode] = self.policy.forward(model, ids, mask, 6)[0].float()
        finally:
            self.mode = "off"
            del self.min_saved
            model.train(training)
        error = (found["on"] - found["off"]).abs().mean().item()
        exact = model.dtype == torch.float32 and accelerator.mixed_precision == "no"
        if error > (1e-3 if exact else 0.1):
            raise ValueError(
                f"{type(unwrapped(self.policy, model)).__name__} gives packed rows other log-probabilities "
                f"({error:.1e} on average): it looks at more than tokens, their order and a mask (learned positions, "
                "attention sinks)"
            )

    def own_attention(self) -> AbstractContextManager:
        """Generation is the model's own: nothing is packed there."""
        return nullcontext() if self.mode == "off" else own_attention(unwrapped(self.policy, self.policy.model))

    def check_lengths(self, prompt_ids: list[list[int]], completion_ids: list[list[int]]) -> None:
        """Raise where a row does not fit into a sequence, before anything is computed of the batch."""
        if self.token_budget is not None:
            longest = max((len(p) + len(c) for p, c in zip(prompt_ids, completion_ids, strict=True)), default=0)
            check_fits(self.policy.ranks.most(longest), self.token_budget)

    def regrouped(self, batches: list[RowDict]) -> list[RowDict]:
        """Return as many micro-batches of the same rows. The rows of a prompt are in as few as possible; none of them
        leaves its [`window`]."""
        grouped: list[RowDict] = []
        for start in range(0, len(batches), self.window):
            grouped += self._grouped(batches[start : start + self.window])
        return grouped

    def _grouped(self, batches: list[RowDict]) -> list[RowDict]:
        rows = {key: v if v.dim() == 0 else torch.cat([b[key] for b in batches]) for key, v in batches[0].items()}
        order = torch.tensor(group_rows(*row_tokens(rows), num_batches=len(batches)))
        return split_tensor_dict(select_rows(rows, order.to(rows["prompt_ids"].device)), len(batches))

    def __call__(
        self,
        own_pass: Callable[..., tuple[Any, Any, Any]],
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        **kwargs: Any,
    ) -> tuple[Any, Any, Any]:
        """Return what `own_pass`, TRL's, returns for these arguments. It is called if packing does not pay."""
        if self._changes_positions(input_ids):
            options = {"batch_size": batch_size, "compute_entropy": compute_entropy, **kwargs}
            return own_pass(model, input_ids, attention_mask, logits_to_keep, **options)
        parts: list[Any] = []
        size = batch_size or len(input_ids)
        batches = list(zip(input_ids.split(size), attention_mask.split(size), strict=True))
        for (ids, mask), packs in zip(batches, self._packs(batches, logits_to_keep), strict=True):
            found = self._packed_logps(model, ids, mask, logits_to_keep, packs)
            if found is None:
                found = own_pass(model, ids, mask, logits_to_keep, compute_entropy=compute_entropy, **kwargs)
            parts.append(found)
        logps, entropies, *_ = zip(*parts, strict=True)
        return torch.cat(logps), torch.cat(entropies) if compute_entropy else None, None

    def _changes_positions(self, input_ids: torch.Tensor) -> bool:
        """
        Return whether the width of the rows changes their rotary factors.

        TRL counts positions from the first column, and packed rows count them from the first token. TRL's own pass is
        then the only one with TRL's factors. Processes that must make equally many passes decide together.
        """
        if self.longest is None:
            return False
        width = input_ids.shape[1]
        return (width if self.token_budget is None else self.policy.ranks.most(width)) > self.longest

    def _packs(self, batches: list[tuple[Any, Any]], width: int) -> list[list[list[int]]]:
        """Rows of each sequence of each batch. Every process makes as many forward passes, because collective calls
        (sharded weights, buffers) belong to them: where others have more sequences, the last ones are of no row."""
        budget = self.token_budget
        if budget is None:
            return [[list(range(len(ids)))] for ids, _ in batches]
        packs = [
            split_rows(computed_tokens(*_sides(ids, mask, width)), budget=budget, min_saved=self.min_saved)
            for ids, mask in batches
        ]
        if self.policy.ranks.number == 1:
            return packs
        most = self.policy.ranks.most(max(map(len, packs)))
        return [found + [[]] * (most - len(found)) for found in packs]

    def _packed_logps(
        self, model: Any, ids: torch.Tensor, mask: torch.Tensor, width: int, packs: list[list[int]]
    ) -> tuple[Any, Any, None] | None:
        """Log-probabilities and entropies `(B, T)`; `None` where TRL's own pass is to compute them."""
        sides = _sides(ids, mask, width)
        options: dict[str, Any] = dict(min_saved=self.min_saved, block=BLOCK if ids.is_cuda else None)
        sequences = [pack_rows(*(side[rows] for side in sides), **options) for rows in packs]
        ratio = sum(rows.num_tokens for rows in sequences) / max(sum(rows.num_unique for rows in sequences), 1)
        # TRL's own pass is one, and its tokens are not bounded: more sequences are packed whatever they share.
        packed = len(packs) > 1 or ratio >= PAYS_FROM[self.mode]
        if torch.is_grad_enabled() and self.policy.model.training:
            # Of this process alone: the main one's are logged, and a gather per pass is not worth the rest.
            self.policy.log_metric("packing/token_ratio", ratio)
            self.policy.log_metric("packing/packed", packed)
            self.policy.log_metric("packing/sequences", len([rows for rows in packs if rows]))
            if ids.is_cuda:  # where attention is compiled
                self.policy.log_metric("packing/compilations", num_compilations())
        if not packed:
            return None
        order = torch.tensor([i for rows in packs for i in rows], device=ids.device).argsort()
        logps, entropies = zip(*(self._sequence_logps(model, rows) for rows in sequences), strict=True)
        without = entropies[0] is None  # the reference has none
        return torch.cat(logps)[order], None if without else torch.cat(entropies)[order], None

    def _sequence_logps(self, model: Any, rows: PackedRows) -> tuple[Any, Any]:
        with _scored_only(unwrapped(self.policy, model), rows.scored), self.policy.accelerator.autocast():
            outputs = model(
                input_ids=rows.input_ids,
                attention_mask=NO_MASK.to(rows.input_ids.device),
                position_ids=rows.position_ids,
                shift_labels=rows.labels,
                fused_lm_head=True,
                packed_rows=rows,
            )
        return rows.unpack(outputs.log_probs), None if outputs.entropy is None else rows.unpack(outputs.entropy)


def looks_at_micro_batches(args: Any) -> bool:
    """
    Return whether TRL's loss computes something from a micro-batch alone.

    `loss_type="bnpo"` and the entropy bonus average over the tokens of a micro-batch. `top_entropy_quantile` chooses
    among them.
    """
    return (
        args.loss_type == "bnpo"
        or args.top_entropy_quantile < 1.0
        or args.entropy_coef != 0.0
        or args.use_adaptive_entropy
    )


def unwrapped(policy: Any, model: Any) -> Any:
    """The causal language model without the wrappers of accelerate and PEFT."""
    model = policy.accelerator.unwrap_model(model)
    return model.get_base_model() if isinstance(model, PeftModel) else model


def _sides(ids: torch.Tensor, mask: torch.Tensor, width: int) -> tuple[torch.Tensor, ...]:
    """Prompts and completions with their masks, as [`pack_rows`] takes them."""
    return ids[:, :-width], mask[:, :-width], ids[:, -width:], mask[:, -width:]


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
