"""The entropy behind each token, and one prompt pass for all samples of a prompt. TRL hands `generate` no further
arguments, so both are forward hooks on the causal language model, which it calls once per token."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from inspect import signature
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import DynamicCache, GenerationConfig, GenerationMixin
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from trl.distributed import DistributedBackend
from trl.models import unwrap_model_for_generation

from trl_explore.sampling.adapters import keep_learned_prompt

# Rows whose probabilities exist at the same time: with a large vocabulary, those of a whole batch would fill a device.
ENTROPY_ROWS = 64

# What a layer of these keeps is keys and values with the batch dimension first, all of which `reorder_cache` selects.
# Other layers (quantized, linear attention, indexed) keep more, or mark their tensors as static.
CACHE_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)

# Names of the cache in a model's arguments and outputs: transformers renames `past_key_values` to `cache` in 5.24.
CACHE_NAMES = ("cache", "past_key_values")

# All that tells the rows of a prompt pass apart.
ROW_INPUTS = ("input_ids", "attention_mask", "position_ids")

# Adapters of PEFT that mix the tokens of a forward pass. Lily averages its routing over all tokens of a call. X-LoRA
# runs the model without a cache.
MIXING_ADAPTERS = {"LILY": "Lily", "XLORA": "X-LoRA"}


@dataclass
class GenerationRecord:
    """What one call of `generate` did. Padding tokens of the prompt are not counted, except where the model gets no
    two-dimensional attention mask (a static cache)."""

    entropies: list[torch.Tensor] = field(default_factory=list)  # per sampling step, `(B,)` in nats
    prefill_rows: int = 0  # that were asked for
    encoded_rows: int = 0  # that the model encoded
    prefill_tokens: int = 0  # of the rows that were asked for
    encoded_tokens: int = 0  # of the rows that the model encoded

    def token_entropies(self, lengths: list[int]) -> list[list[float]]:
        """Entropies of the first tokens of each row's completion, `[B][lengths_i]`: what follows a row's end is
        padding, and with sharded weights a process takes part in steps of which it keeps nothing. ValueError if the
        record has other rows, or fewer steps than a row has tokens."""
        most = max(lengths, default=0)
        if most == 0:
            return [[] for _ in lengths]
        if most > len(self.entropies):
            raise ValueError(
                f"`lengths` asks for {most} tokens, but {len(self.entropies)} steps were recorded: pass "
                "`entropies=True` to `recorded`, and sample one token per forward pass (no assisted decoding)."
            )
        steps = torch.stack(self.entropies[:most], dim=1)  # (B, T)
        return [row[:length] for row, length in zip(steps.tolist(), lengths, strict=True)]


@contextmanager
def recorded(
    model: nn.Module, *, temperature: float, entropies: bool = True, share_prefill: bool = True
) -> Iterator[GenerationRecord]:
    """
    Record one call of `model.generate`, also within a module around it, and let it encode equal prompts once.

    Sharing changes the numbers only by rounding, as another batch size does. A prompt pass that is not understood
    entirely is left as it is: with a cache that is filled or is no plain `DynamicCache` of full or sliding-window
    attention, with row inputs besides token ids, attention mask and positions, of a multimodal or encoder-decoder
    model, with active dropout, whose noise would be shared as well, and with an adapter of [`whole_row_adapter`].
    Forward passes that a logits processor makes for itself (`guidance_scale`) are neither recorded nor changed.

    Entropies are those of `softmax(logits / temperature)`, without top-k, top-p or penalties. With
    `prefill_chunk_size`, a last chunk of a single token cannot be told from a step, and shifts them by one: record
    them with the prompt in one piece. The record is complete once `generate` has returned. ValueError if the
    temperature is not positive.
    """
    if not temperature > 0:
        raise ValueError(f"`temperature` must be positive, got {temperature}.")
    share_prefill = share_prefill and whole_row_adapter(model) is None
    hooks = _Hooks(temperature=temperature, entropies=entropies, share_prefill=share_prefill)
    inner = language_model(model)
    handles = [
        inner.register_forward_pre_hook(hooks.before, with_kwargs=True),
        inner.register_forward_hook(hooks.after),
    ]
    try:
        yield hooks.record
    finally:
        for handle in handles:
            handle.remove()


def language_model(model: nn.Module) -> Any:
    """The causal language model in a module, which may have adapters around it."""
    return next(module for module in model.modules() if isinstance(module, GenerationMixin))


def cache_argument(model: nn.Module) -> str:
    """
    Return the name of the argument in which a causal language model takes its cache.

    The name depends on the model and not only on the version: a model with its own code may keep the old name.
    """
    new, old = CACHE_NAMES
    return new if new in signature(language_model(model).forward).parameters else old


def given_cache(kwargs: dict[str, Any]) -> tuple[str | None, Any]:
    """Return the name and the value of the cache among the arguments of a forward pass, or None twice."""
    for name in CACHE_NAMES:
        if kwargs.get(name) is not None:
            return name, kwargs[name]
    return None, None


def whole_row_adapter(model: Any) -> str | None:
    """
    Return what an adapter is called that reads more than the hidden state of a token, or None.

    With such an adapter, keys and values depend on the forward pass that computed them: on virtual tokens that PEFT
    puts before a row in every call, on the other tokens of the call, or on tokens that switch the adapter on. Rows
    must then go through `generate`, and through the model, in the calls that TRL makes.
    """
    if not isinstance(model, PeftModel):
        return None
    for config in model.peft_config.values():
        kind = config.peft_type.value if isinstance(config.peft_type, Enum) else str(config.peft_type)
        if config.is_prompt_learning:
            return f"virtual tokens of a prompt-learning adapter ({kind})"
        if kind in MIXING_ADAPTERS:
            return f"a {MIXING_ADAPTERS[kind]} adapter, which mixes the tokens of a call"
        if vars(config).get("alora_invocation_tokens"):
            return "an activated LoRA adapter (`alora_invocation_tokens`), which starts behind certain tokens"
    return None


@contextmanager
def generating_model(trainer: Any, **options: Any) -> Iterator[Any]:
    """The trainer's model with all its parameters, without gradients; every process must enter. `options` are those of
    TRL's `unwrap_model_for_generation`."""
    if "gradient_checkpointing_kwargs" in signature(unwrap_model_for_generation).parameters:
        # Below 1.16, TRL turns checkpointing on again without them.
        options = {"gradient_checkpointing_kwargs": trainer.args.gradient_checkpointing_kwargs, **options}
    unwrapped = unwrap_model_for_generation(
        trainer.model_wrapped,
        trainer.accelerator,
        gather_deepspeed3_params=trainer.args.ds3_gather_for_generation,
        **options,
    )
    full = DistributedBackend(trainer.accelerator).summon_full_params(trainer.model_wrapped, recurse=False)
    with unwrapped as model, torch.no_grad(), full:
        yield model


def row_entropies(logits: torch.Tensor, *, temperature: float) -> torch.Tensor:
    """Entropy in nats `(B,)` of `softmax(logits / temperature)`, in float32; minus infinity is probability zero."""
    parts = [
        torch.special.entr((part.float() / temperature).softmax(dim=-1)).sum(dim=-1)
        for part in logits.split(ENTROPY_ROWS)
    ]
    return torch.cat(parts) if len(parts) > 1 else parts[0]  # (B,)


def complete(model: Any, prompt_ids: list[list[int]], config: GenerationConfig) -> list[list[int]]:
    """Continue prompts by `generate`, up to the first end token, which is included: `[B][T_i]`. Equal prompts are
    encoded once. The `pad_token_id` of `config` is one token, its `eos_token_id` a list."""
    longest = max(len(ids) for ids in prompt_ids)
    padding = [longest - len(ids) for ids in prompt_ids]
    rows = [[config.pad_token_id] * n + ids for n, ids in zip(padding, prompt_ids, strict=True)]
    real = [[0] * n + [1] * len(ids) for n, ids in zip(padding, prompt_ids, strict=True)]
    input_ids, mask = torch.tensor(rows, device=model.device), torch.tensor(real, device=model.device)  # (B, P)
    keep_learned_prompt(model)
    with recorded(model, temperature=1.0, entropies=False):
        output = model.generate(input_ids=input_ids, attention_mask=mask, generation_config=config)
    completion_ids = []
    for row in output[:, longest:].tolist():
        ends = [position for position, token in enumerate(row) if token in config.eos_token_id]
        completion_ids.append(row[: ends[0] + 1] if ends else row)
    return completion_ids


class _Hooks:
    """The two hooks around every forward pass of one `generate`, and what they hand to each other. With a static cache
    `generate` compiles the steps. The hooks stay outside: a list that grows would be a reason to compile each step
    again, and results of a compiled step may be overwritten by the next."""

    def __init__(self, *, temperature: float, entropies: bool, share_prefill: bool) -> None:
        self.record = GenerationRecord()
        self.temperature = temperature
        self.entropies = entropies
        self.share_prefill = share_prefill
        self.encoded_row: torch.Tensor | None = None  # for each row asked for the encoded one, in a shared pass: (B,)
        self.cache_name: str | None = None  # of the current forward pass

    @torch.compiler.disable
    def before(self, model: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        self.encoded_row = None
        if args:  # `generate` passes all inputs by name; this pass is made by a logits processor
            return None
        self.cache_name, cache = given_cache(kwargs)
        record, mask = self.record, kwargs.get("attention_mask")
        new = next(
            kwargs[name]
            for name in ("decoder_input_ids", "input_ids", "inputs_embeds")
            if kwargs.get(name) is not None
        )
        num_rows, num_new = new.shape[:2]
        is_first = record.prefill_rows == 0
        # Without a cache, every step passes the whole row again.
        if not is_first and (num_new == 1 or cache is None):
            return None

        # A prompt can come in several chunks; only the last of them is followed by a token.
        record.entropies.clear()
        keep = None
        if self.share_prefill and _is_understood(model, args, kwargs) and not has_dropout(model):
            keep = _first_of_each(kwargs)
        if isinstance(mask, torch.Tensor) and mask.dim() == 2:
            row_tokens = mask[:, -num_new:].sum(dim=1).tolist()
        else:
            row_tokens = [num_new] * num_rows  # no mask is one without padding
        record.prefill_tokens += sum(row_tokens)
        record.encoded_tokens += sum(row_tokens if keep is None else [row_tokens[i] for i in keep[0]])
        if is_first:
            record.prefill_rows = num_rows
            record.encoded_rows = num_rows if keep is None else len(keep[0])
        if keep is None:
            return None

        first_rows, encoded_row = (torch.tensor(rows, device=new.device) for rows in keep)
        self.encoded_row = encoded_row
        return args, kwargs | {name: kwargs[name].index_select(0, first_rows) for name in _row_inputs(kwargs)}

    @torch.compiler.disable
    def after(self, model: Any, args: tuple, output: Any) -> None:
        if args:
            return
        entropies = row_entropies(output.logits[:, -1], temperature=self.temperature) if self.entropies else None
        if self.encoded_row is not None:
            rows = self.encoded_row.to(output.logits.device)
            output.logits = output.logits.index_select(0, rows)
            # Not `batch_select_indices`: that one needs all layers on one device.
            output[self.cache_name].reorder_cache(rows)
            entropies = None if entropies is None else entropies.index_select(0, rows)
        if entropies is not None:
            self.record.entropies.append(entropies)


def _is_understood(model: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a forward pass is the start of a prompt pass all of whose inputs, states and outputs can be shared."""
    _, cache = given_cache(kwargs)
    ids = kwargs.get("input_ids")
    tensors = [kwargs[name] for name in ROW_INPUTS if kwargs.get(name) is not None]
    others = {name: value for name, value in kwargs.items() if name not in ROW_INPUTS}
    return (
        not args
        and ids is not None
        # Masks of four dimensions belong to static caches, positions of three to multimodal models.
        and all(isinstance(x, torch.Tensor) and x.dim() == 2 and x.shape[1] == ids.shape[1] for x in tensors)
        and all(
            value is None or isinstance(value, bool | int | float | str)
            for name, value in others.items()
            if name not in (*CACHE_NAMES, "cache_position")
        )
        and not others.get("output_attentions")
        and not others.get("output_hidden_states")
        and type(cache) is DynamicCache
        and not cache.offloading
        and all(type(layer) in CACHE_LAYERS for layer in cache.layers)
        and cache.get_seq_length() == 0
        # Multimodal models keep state of the batch outside the cache.
        and model.config.get_text_config(decoder=True) is model.config
    )


def has_dropout(model: Any) -> bool:
    """
    Return whether a forward pass in the present mode draws noise, from dropout or from an adapter.

    TRL generates in training mode, where dropout acts and PVeRA draws the vectors of its adapters.
    """
    if model.training and model.config.to_dict().get("attention_dropout"):
        return True
    for module in model.modules():
        if isinstance(module, nn.Dropout) and module.training and module.p > 0:
            return True
        if module.training and is_noisy_adapter(module):
            return True
    return False


def is_noisy_adapter(module: nn.Module) -> bool:
    """Return whether a layer has a PVeRA adapter, which draws noise in training mode."""
    return "pvera_lambda_d" in dict(module.named_children())


def _row_inputs(kwargs: dict[str, Any]) -> list[str]:
    """Names of the inputs that have one row per row of the batch; a single row of positions is for all of them."""
    num_rows = len(kwargs["input_ids"])
    return [name for name in ROW_INPUTS if kwargs.get(name) is not None and len(kwargs[name]) == num_rows]


def _first_of_each(kwargs: dict[str, Any]) -> tuple[list[int], list[int]] | None:
    """The first row of each kind, equal in all inputs, `[U]`, and each row's kind `[B]`; `None` if none are equal."""
    table = torch.cat([kwargs[name].long() for name in _row_inputs(kwargs)], dim=1).cpu().numpy()  # (B, ...)
    keys = [row.tobytes() for row in table]
    first_rows: dict[bytes, int] = {}
    for i, key in enumerate(keys):
        first_rows.setdefault(key, i)
    if len(first_rows) == len(keys):
        return None
    kinds = {key: kind for kind, key in enumerate(first_rows)}
    return list(first_rows.values()), [kinds[key] for key in keys]
