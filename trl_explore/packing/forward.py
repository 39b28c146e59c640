"""Log-probabilities from packed rows, which contain shared prefixes once, and regrouping of micro-batches."""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

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
from trl_explore.sampling.sampler import without_dropout

if TYPE_CHECKING:
    from trl_explore.trainers.config import ExplorationConfig

SHARDED = (DistributedType.DEEPSPEED, DistributedType.FSDP)
# Smallest ratio of row tokens to computed tokens for which rows are packed, by mode. If rows share only a few tokens,
# packing does not pay: with a sliding window, it needs more memory than TRL's pass.
PAYS_FROM = {"on": 1.05, "auto": 1.2}


class PackedForward:
    """
    Computes the shared prefixes of a micro-batch's rows only once, in the forward and in the backward pass.

    Results have the same shapes as TRL's, so TRL computes losses and metrics from them. With `mode="off"`, the trainer
    calls TRL's own pass instead of this object.

    Args:
        policy ([`~trl_explore.rows.policy.Policy`]):
            The trainer.

    Attributes:
        mode (`str`):
            `"off"`, `"on"` or `"auto"`; see the field `shared_prefix_training`.
        token_budget (`int` or `None`):
            Most tokens of one sequence; see the field `packed_token_budget`.
        longest (`int` or `None`):
            Largest number of columns of padded rows with which the model uses its usual rotary factors. With more
            columns, the factors change. None if they never change. See
            [`~trl_explore.sampling.positions.fixed_rotary_length`].
        min_saved (`int`):
            Least number of tokens that a shared segment saves. Shorter common prefixes are repeated.
    """

    min_saved = MIN_SAVED

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.mode = "off"
        self.token_budget: int | None = None
        self.longest: int | None = None

    @property
    def window(self) -> int:
        """
        Number of consecutive micro-batches that may exchange rows.

        Rows of one optimizer step may change places, because their gradients are summed. But if TRL computes a value
        from each micro-batch alone, all rows keep their places, so that packing does not change results.
        """
        if not self.regroups:
            return 1
        args = self.policy.args
        # A window is inside one generation batch, which holds the rows, and inside one optimizer step.
        return math.gcd(args.steps_per_generation, args.gradient_accumulation_steps)

    @property
    def regroups(self) -> bool:
        """True if rows of a prompt are moved into the same micro-batch."""
        return self.mode != "off" and not looks_at_micro_batches(self.policy.args)

    def enable(
        self, *, ref_model: Any, longest_prompt: Callable[[], int | None], vision: bool, router_loss: bool
    ) -> None:
        """
        Turn packing on, depending on the field `shared_prefix_training`.

        With `"auto"`, warn if the model or an option does not allow packing, and leave it off.

        Args:
            ref_model (`Any`, *optional*):
                Reference model.
            longest_prompt (`Callable[[], int | None]`):
                Function that returns the number of tokens of the longest prompt, or None if it is not known.
            vision (`bool`):
                True for a vision-language model.
            router_loss (`bool`):
                True if the loss includes the load-balancing loss of a mixture of experts.

        Raises:
            ValueError: With `"on"`, if the model or an option does not allow packing. In all modes, if the longest
                prompt with its completion does not fit into `packed_token_budget`, or if several processes use the
                budget with reentrant gradient checkpointing.
        """
        args = self.policy.args
        try:
            if vision:
                raise ValueError("the rows of a vision-language model also share images: pass a text model")
            if router_loss:
                raise ValueError(
                    "the load-balancing loss counts every token of every row: set `router_aux_loss_coef=0.0`"
                )
            self._check_options()
            enable_packing(unwrapped(self.policy, self.policy.model))
            if ref_model is not None:
                enable_packing(unwrapped(self.policy, ref_model))
            self.longest = fixed_rotary_length(unwrapped(self.policy, self.policy.model).config)
            if self.policy.accelerator.distributed_type not in SHARDED:  # sharded weights are not gathered yet
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
        """Raise a ValueError if a prompt of `longest` tokens with its completion does not fit into
        `packed_token_budget`. Do nothing if `longest` is None."""
        if longest is not None and self.token_budget is not None:
            check_fits(longest + (self.policy.args.max_completion_length or 0), self.token_budget)

    def _check_passes(self) -> None:
        """Raise a ValueError for reentrant gradient checkpointing on several processes. With it, every forward pass
        triggers a gradient reduction of its own, but DDP allows only one per step."""
        args = self.policy.args
        reentrant = (args.gradient_checkpointing_kwargs or {}).get("use_reentrant")
        if args.gradient_checkpointing and reentrant and self.policy.ranks.number > 1:
            raise ValueError(
                f"`packed_token_budget={self.token_budget}` makes several forward passes before a backward "
                "pass, which reentrant gradient checkpointing on several processes does not allow: set "
                "`gradient_checkpointing_kwargs={'use_reentrant': False}`, or leave `packed_token_budget` out."
            )

    def _check_options(self) -> None:
        """Raise a ValueError if an option does not allow packing."""
        args, model = self.policy.args, self.policy.model
        if difference := moved("shared_prefix_training"):
            raise ValueError(difference)
        if args.per_device_train_batch_size == 1:
            raise ValueError("a single row shares nothing: set `per_device_train_batch_size` to at least 2")
        if args.torch_compile:
            raise ValueError("every batch would be compiled again: set `torch_compile=False`")
        if isinstance(model, PeftModel) and model.active_peft_config.is_prompt_learning:
            raise ValueError("virtual tokens precede every row: train LoRA, or the whole model")
        if (adapter := whole_row_adapter(model)) is not None:
            raise ValueError(f"the model has {adapter}: train plain LoRA, or the whole model")

    def _try(self) -> None:
        """
        Compare the log-probabilities of a few random rows with and without packing. Raise a ValueError if they differ.

        Some models read more than tokens, their order and a mask. No list of models says which, so try it.
        """
        model: Any = self.policy.model
        accelerator = self.policy.accelerator
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(model.config.get_text_config().vocab_size, (3, 12), generator=generator)
        ids = ids.to(accelerator.device)
        ids[1, :8] = ids[0, :8]  # two rows share the prompt of 6 tokens, and 2 completion tokens
        mask = torch.ones_like(ids)
        mask[2, :4] = 0  # a shorter prompt
        width = 6  # number of completion tokens
        found = {}
        try:
            # Not `model.eval()`: bitsandbytes would repack 4-bit weights, which a CPU cannot train afterwards.
            with torch.no_grad(), without_dropout(model):
                for mode in ("off", "on"):
                    self.mode, self.min_saved = mode, 1
                    found[mode] = self.policy.forward(model, ids, mask, width)[0].float()
        finally:
            self.mode = "off"
            del self.min_saved  # the class has the default
        error = (found["on"] - found["off"]).abs().mean().item()
        exact = model.dtype == torch.float32 and accelerator.mixed_precision == "no"
        tolerance = 1e-3 if exact else 0.1
        if error > tolerance:
            raise ValueError(
                f"{type(unwrapped(self.policy, model)).__name__} gives packed rows other log-probabilities "
                f"(difference {error:.1e} on average): it reads more than tokens, their order and a mask (learned "
                "positions, attention sinks)"
            )

    def own_attention(self) -> AbstractContextManager:
        """Give the model its original attention for generation, where no rows are packed."""
        if self.mode == "off":
            return nullcontext()
        return own_attention(unwrapped(self.policy, self.policy.model))

    def check_lengths(self, prompt_ids: list[list[int]], completion_ids: list[list[int]]) -> None:
        """Raise a ValueError if a row of a new batch has more tokens than `packed_token_budget`. Every process must
        call this."""
        if self.token_budget is not None:
            longest = 0
            for prompt, completion in zip(prompt_ids, completion_ids, strict=True):
                longest = max(longest, len(prompt) + len(completion))
            check_fits(self.policy.ranks.most(longest), self.token_budget)

    def regrouped(self, batches: list[RowDict]) -> list[RowDict]:
        """
        Exchange rows between micro-batches, so that the rows of a prompt are in as few micro-batches as possible.

        Args:
            batches (`list[RowDict]`):
                Micro-batches of a generation batch.

        Returns:
            `list[RowDict]`: The same number of micro-batches with the same rows. Each row stays in its [`window`].
        """
        grouped: list[RowDict] = []
        for start in range(0, len(batches), self.window):
            grouped += self._grouped(batches[start : start + self.window])
        return grouped

    def _grouped(self, batches: list[RowDict]) -> list[RowDict]:
        """Exchange rows between the micro-batches of one window."""
        rows: RowDict = {}
        for key, value in batches[0].items():
            if value.dim() == 0:  # one number for the whole generation batch
                rows[key] = value
            else:
                rows[key] = torch.cat([batch[key] for batch in batches])
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
        """
        Compute the log-probabilities of completions from packed rows. If packing does not pay, call TRL's own pass.

        Args:
            own_pass (`Callable`):
                TRL's `_get_per_token_logps_and_entropies`.
            model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy, kwargs:
                Arguments of `own_pass`.

        Returns:
            `tuple`: Log-probabilities `(B, T)`; entropies `(B, T)`, or None without `compute_entropy`; None. TRL's
            third value belongs to the load-balancing loss, with which packing is not allowed.
        """
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
        if not compute_entropy:
            return torch.cat(logps), None, None
        return torch.cat(logps), torch.cat(entropies), None

    def _changes_positions(self, input_ids: torch.Tensor) -> bool:
        """
        Return whether the rows are so long that their rotary factors depend on the number of columns.

        TRL counts positions from the first column, and packed rows count them from the first token. Packed rows would
        then get other factors, so TRL's own pass must compute them. With a token budget, all processes must make the
        same number of forward passes, so they decide together.
        """
        if self.longest is None:
            return False
        width = input_ids.shape[1]
        if self.token_budget is not None:
            width = self.policy.ranks.most(width)
        return width > self.longest

    def _packs(self, batches: list[tuple[Any, Any]], width: int) -> list[list[list[int]]]:
        """
        Distribute the rows of batches over sequences.

        All processes get the same number of sequences, because forward passes can contain collective calls (sharded
        weights, buffers). If other processes have more sequences, the last sequences of this process have no rows.

        Args:
            batches (`list[tuple]`):
                Token ids and masks of each batch, both `(B, L)`.
            width (`int`):
                Number of completion tokens in the padded rows.

        Returns:
            `list[list[list[int]]]`: For each batch, a list of sequences. A sequence is a list of row indices.
        """
        packs: list[list[list[int]]] = []
        if self.token_budget is None:
            for ids, _ in batches:
                packs.append([list(range(len(ids)))])
            return packs
        for ids, mask in batches:
            tokens = computed_tokens(*_sides(ids, mask, width))
            packs.append(split_rows(tokens, budget=self.token_budget, min_saved=self.min_saved))
        if self.policy.ranks.number == 1:
            return packs
        most = self.policy.ranks.most(max(map(len, packs)))
        return [sequences + [[]] * (most - len(sequences)) for sequences in packs]

    def _packed_logps(
        self, model: Any, ids: torch.Tensor, mask: torch.Tensor, width: int, packs: list[list[int]]
    ) -> tuple[Any, Any, None] | None:
        """
        Compute log-probabilities from packed rows.

        Args:
            model (`Any`):
                Model in training, or reference model.
            ids (`torch.Tensor`):
                Token ids `(B, L)`.
            mask (`torch.Tensor`):
                Attention mask `(B, L)`.
            width (`int`):
                Number T of completion tokens in the padded rows.
            packs (`list[list[int]]`):
                Numbers of the rows in each sequence.

        Returns:
            `tuple` or `None`: Log-probabilities `(B, T)`; entropies `(B, T)` or None; None. If packing does not pay,
            the result is None instead of a tuple.
        """
        prompts, prompt_mask, completions, completion_mask = _sides(ids, mask, width)
        block = BLOCK if ids.is_cuda else None
        sequences = []
        for rows in packs:
            sequence = pack_rows(
                prompts[rows],
                prompt_mask[rows],
                completions[rows],
                completion_mask[rows],
                min_saved=self.min_saved,
                block=block,
            )
            sequences.append(sequence)
        num_tokens = sum(sequence.num_tokens for sequence in sequences)
        num_computed = sum(sequence.num_unique for sequence in sequences)
        ratio = num_tokens / max(num_computed, 1)
        # TRL's pass cannot keep the token budget. So pack several sequences even if they share few tokens.
        packed = len(packs) > 1 or ratio >= PAYS_FROM[self.mode]
        if torch.is_grad_enabled() and self.policy.model.training:
            # TRL logs the values of the main process. A mean over processes would cost a gather in every pass.
            self.policy.log_metric("packing/token_ratio", ratio)
            self.policy.log_metric("packing/packed", packed)
            self.policy.log_metric("packing/sequences", sum(len(rows) > 0 for rows in packs))
            if ids.is_cuda:  # only there attention is compiled
                self.policy.log_metric("packing/compilations", num_compilations())
        if not packed:
            return None
        logps, entropies, numbers = [], [], []
        for rows, sequence in zip(packs, sequences, strict=True):
            sequence_logps, sequence_entropies = self._sequence_logps(model, sequence)
            logps.append(sequence_logps)
            entropies.append(sequence_entropies)
            numbers += rows
        order = torch.tensor(numbers, device=ids.device).argsort()  # back to the order of `ids`
        if entropies[0] is None:  # the reference model returns no entropies
            return torch.cat(logps)[order], None, None
        return torch.cat(logps)[order], torch.cat(entropies)[order], None

    def _sequence_logps(self, model: Any, rows: PackedRows) -> tuple[Any, Any]:
        """Return log-probabilities and entropies, if the model computes them, of the rows of one sequence."""
        with _scored_only(unwrapped(self.policy, model), rows.scored), self.policy.accelerator.autocast():
            outputs = model(
                input_ids=rows.input_ids,
                attention_mask=NO_MASK.to(rows.input_ids.device),
                position_ids=rows.position_ids,
                shift_labels=rows.labels,
                fused_lm_head=True,
                packed_rows=rows,
            )
        logps = rows.unpack(outputs.log_probs)
        if outputs.entropy is None:
            return logps, None
        return logps, rows.unpack(outputs.entropy)


def looks_at_micro_batches(args: "ExplorationConfig") -> bool:
    """
    Return whether TRL's loss computes a value from each micro-batch alone.

    `loss_type="bnpo"` and the entropy bonus average over the tokens of a micro-batch. `top_entropy_quantile` selects
    tokens of a micro-batch.
    """
    return (
        args.loss_type == "bnpo"
        or args.top_entropy_quantile < 1.0
        or args.entropy_coef != 0.0
        or args.use_adaptive_entropy
    )


def unwrapped(policy: Any, model: Any) -> Any:
    """Return the causal language model without the wrappers of accelerate and PEFT."""
    model = policy.accelerator.unwrap_model(model)
    if isinstance(model, PeftModel):
        return model.get_base_model()
    return model


def _sides(ids: torch.Tensor, mask: torch.Tensor, width: int) -> tuple[torch.Tensor, ...]:
    """Divide padded rows into prompts, their masks, completions of `width` columns, and their masks."""
    return ids[:, :-width], mask[:, :-width], ids[:, -width:], mask[:, -width:]


@contextmanager
def _scored_only(model: Any, scored: torch.Tensor) -> Iterator[None]:
    """
    Pass only the hidden states at the positions `scored` to the LM head inside the `with` block.

    `scored` has one entry per completion token. A position occurs several times if different tokens follow it.
    """

    def select(module: Any, args: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state[:, scored]
        return output

    handle = model.base_model.register_forward_hook(select)
    try:
        yield
    finally:
        handle.remove()
