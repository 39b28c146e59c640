"""Entropies of the sampled tokens, and one prompt pass for all samples of a prompt.

TRL does not let callers add arguments to its call of `generate`. So both features are forward hooks on the causal
language model, which `generate` calls once per token.
"""

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

# Number of rows whose probabilities are computed at the same time. With a large vocabulary, the probabilities of all
# rows of a batch could fill the memory of a GPU.
ENTROPY_ROWS = 64

# Layers of a cache that keep only keys and values, with the batch dimension first. `reorder_cache` selects rows of
# both. Other layers (quantized, linear attention, indexed) keep further tensors, or mark their tensors as static.
CACHE_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)

# Names of the cache in a model's arguments and outputs: transformers renames `past_key_values` to `cache` in 5.24.
CACHE_NAMES = ("cache", "past_key_values")

# Inputs of a prompt pass that can differ between rows. Rows that agree in all of them have the same outputs.
ROW_INPUTS = ("input_ids", "attention_mask", "position_ids")

# Adapters of PEFT that mix the tokens of a forward pass. Lily averages its routing over all tokens of a call. X-LoRA
# runs the model without a cache.
MIXING_ADAPTERS = {"LILY": "Lily", "XLORA": "X-LoRA"}


@dataclass
class GenerationRecord:
    """
    Entropies and numbers of one call of `generate`.

    Padding tokens are not counted, unless the model gets no two-dimensional attention mask (with a static cache).
    """

    entropies: list[torch.Tensor] = field(default_factory=list)  # per sampling step, `(B,)` in nats
    prefill_rows: int = 0  # rows of the call
    encoded_rows: int = 0  # rows that the model encoded: equal rows count once
    prefill_tokens: int = 0  # prompt tokens of all rows of the call
    encoded_tokens: int = 0  # prompt tokens that the model encoded

    def token_entropies(self, lengths: list[int]) -> list[list[float]]:
        """
        Return the entropies of the first tokens of each row's completion.

        Later steps are dropped: after its end a row is padded, and with sharded weights a process also takes part in
        the steps of other processes.

        Args:
            lengths (`list[int]`):
                Number of tokens of each row's completion, `[B]`.

        Returns:
            `list[list[float]]`: Entropies in nats, `[B][lengths_i]`.

        Raises:
            ValueError: If the record has another number of rows, or fewer steps than a row has tokens.
        """
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
    Record one call of `model.generate`, and let it encode equal prompts once.

    Sharing the prompt pass changes logits only by rounding errors, like another batch size. Prompts are not shared

    - if the cache already has tokens, or is not a plain `DynamicCache` of full or sliding-window attention;
    - if rows have inputs other than token ids, attention mask and positions;
    - if the model is multimodal or has an encoder and a decoder;
    - if dropout is active, because equal prompts would then have the same noise;
    - with an adapter of [`whole_row_adapter`].

    Forward passes that a logits processor makes (`guidance_scale`) are neither recorded nor changed.

    Entropies belong to `softmax(logits / temperature)`, before top-k, top-p and penalties. With `prefill_chunk_size`,
    a last chunk of one token looks like a sampling step and shifts the entropies by one. So do not set
    `prefill_chunk_size` if you need entropies.

    Args:
        model (`nn.Module`):
            Causal language model, or a module that contains one.
        temperature (`float`):
            Temperature of the distribution whose entropy is recorded. Must be positive.
        entropies (`bool`, *optional*, defaults to `True`):
            If `True`, record entropies.
        share_prefill (`bool`, *optional*, defaults to `True`):
            If `True`, encode equal prompts once.

    Yields:
        [`GenerationRecord`]: The record. It is complete as soon as `generate` has returned.

    Raises:
        ValueError: If `temperature` is not positive.
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
    """Return the causal language model in a module. The module may be the model itself, or the model with adapters."""
    return next(module for module in model.modules() if isinstance(module, GenerationMixin))


def cache_argument(model: nn.Module) -> str:
    """
    Return the name of the argument with which a causal language model receives its cache.

    The name depends on the model and not only on the version: a model with its own code may keep the old name.
    """
    new, old = CACHE_NAMES
    if new in signature(language_model(model).forward).parameters:
        return new
    return old


def given_cache(kwargs: dict[str, Any]) -> tuple[str | None, Any]:
    """Return the name and the value of the cache in the arguments of a forward pass, or `(None, None)`."""
    for name in CACHE_NAMES:
        if kwargs.get(name) is not None:
            return name, kwargs[name]
    return None, None


def whole_row_adapter(model: Any) -> str | None:
    """
    Return a description of an adapter that reads more than the hidden state of one token, or None.

    With such an adapter, keys and values depend on the forward pass that computed them: on virtual tokens that PEFT
    puts before a row in every call, on the other tokens of the call, or on tokens that switch the adapter on. So keys
    and values of one call must not be used in another, and rows must not be packed or shared.

    Args:
        model (`Any`):
            Model with its adapters.

    Returns:
        `str` or `None`: Noun for messages, such as "a Lily adapter, which mixes the tokens of a call".
    """
    if not isinstance(model, PeftModel):
        return None
    for config in model.peft_config.values():
        kind = str(config.peft_type)
        if isinstance(config.peft_type, Enum):
            kind = config.peft_type.value
        if config.is_prompt_learning:
            return f"virtual tokens of a prompt-learning adapter ({kind})"
        if kind in MIXING_ADAPTERS:
            return f"a {MIXING_ADAPTERS[kind]} adapter, which mixes the tokens of a call"
        if getattr(config, "alora_invocation_tokens", None):
            return "an activated LoRA adapter (`alora_invocation_tokens`), which starts after certain tokens"
    return None


@contextmanager
def generating_model(trainer: Any, **options: Any) -> Iterator[Any]:
    """
    Yield the trainer's model with all parameters gathered and without gradients. Every process must enter.

    Args:
        trainer (`Any`):
            Trainer whose model is prepared for generation.
        options:
            Further options of TRL's `unwrap_model_for_generation`.
    """
    if "gradient_checkpointing_kwargs" in signature(unwrap_model_for_generation).parameters:
        # TRL before 1.16 has no such argument, and turns gradient checkpointing on again without these options.
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
    """Return the entropy in nats `(B,)` of `softmax(logits / temperature)` for logits `(B, V)`, computed in float32. A
    logit of minus infinity is a token of probability zero."""
    parts = []
    for part in logits.split(ENTROPY_ROWS):
        probs = (part.float() / temperature).softmax(dim=-1)
        parts.append(torch.special.entr(probs).sum(dim=-1))
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts)  # (B,)


def complete(model: Any, prompt_ids: list[list[int]], config: GenerationConfig) -> list[list[int]]:
    """
    Continue prompts with `generate`. Equal prompts are encoded once.

    Args:
        model (`Any`):
            Model on which `generate` is called, with its adapters.
        prompt_ids (`list[list[int]]`):
            Prompts, `[B][P_i]`.
        config ([`~transformers.GenerationConfig`]):
            Sampling options. `pad_token_id` is one token; `eos_token_id` is a list of tokens.

    Returns:
        `list[list[int]]`: Completions `[B][T_i]` up to the first end-of-sequence token, which is included.
    """
    longest = max(map(len, prompt_ids))
    rows, real = [], []
    for ids in prompt_ids:
        num_padding = longest - len(ids)
        rows.append([config.pad_token_id] * num_padding + ids)
        real.append([0] * num_padding + [1] * len(ids))
    input_ids, mask = torch.tensor(rows, device=model.device), torch.tensor(real, device=model.device)  # (B, P)
    keep_learned_prompt(model)
    with recorded(model, temperature=1.0, entropies=False):
        output = model.generate(input_ids=input_ids, attention_mask=mask, generation_config=config)
    completion_ids = []
    for row in output[:, longest:].tolist():
        ids = []
        for token in row:
            ids.append(token)
            if token in config.eos_token_id:
                break
        completion_ids.append(ids)
    return completion_ids


class _Hooks:
    """
    Hooks before and after every forward pass of one call of `generate`, and the state that they share.

    With a static cache, `generate` compiles the sampling steps. The hooks are excluded from compilation for two
    reasons: a growing list would make torch compile every step again, and the next compiled step may overwrite the
    results of the last one.
    """

    def __init__(self, *, temperature: float, entropies: bool, share_prefill: bool) -> None:
        self.record = GenerationRecord()
        self.temperature = temperature
        self.entropies = entropies
        self.share_prefill = share_prefill
        # In a shared prompt pass: for each row of the call, the index of its encoded row, (B,).
        self.encoded_row: torch.Tensor | None = None
        self.cache_name: str | None = None  # argument of the current forward pass that has the cache

    @torch.compiler.disable
    def before(self, model: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        self.encoded_row = None
        if args:  # `generate` passes all inputs by name, so this is a forward pass of a logits processor
            return None
        self.cache_name, cache = given_cache(kwargs)
        record, mask = self.record, kwargs.get("attention_mask")
        inputs = _token_inputs(kwargs)
        num_rows, num_new = inputs.shape[:2]
        is_first = record.prefill_rows == 0
        is_sampling_step = num_new == 1 or cache is None  # without a cache, each step passes the whole row again
        if is_sampling_step and not is_first:
            return None

        # A prompt can come in several chunks. Only the last chunk is followed by a sampled token, so forget the
        # entropies of the chunks before it.
        record.entropies.clear()
        if isinstance(mask, torch.Tensor) and mask.dim() == 2:
            row_tokens = mask[:, -num_new:].sum(dim=1).tolist()
        else:
            row_tokens = [num_new] * num_rows  # a call without a mask has no padding
        distinct = None
        if self.share_prefill and _can_be_shared(model, args, kwargs) and not has_dropout(model):
            distinct = _distinct_rows(kwargs)
        if distinct is None:
            first_rows = list(range(num_rows))
        else:
            first_rows = distinct[0]
        record.prefill_tokens += sum(row_tokens)
        record.encoded_tokens += sum(row_tokens[i] for i in first_rows)
        if is_first:
            record.prefill_rows = num_rows
            record.encoded_rows = len(first_rows)
        if distinct is None:
            return None

        self.encoded_row = torch.tensor(distinct[1], device=inputs.device)
        selected = torch.tensor(first_rows, device=inputs.device)
        shared = {name: kwargs[name].index_select(0, selected) for name in _row_inputs(kwargs)}
        return args, kwargs | shared

    @torch.compiler.disable
    def after(self, model: Any, args: tuple, output: Any) -> None:
        if args:
            return
        entropies = None
        if self.entropies:
            entropies = row_entropies(output.logits[:, -1], temperature=self.temperature)
        if self.encoded_row is not None:
            rows = self.encoded_row.to(output.logits.device)
            output.logits = output.logits.index_select(0, rows)
            # `batch_select_indices` would need all layers on one device; `reorder_cache` does not.
            output[self.cache_name].reorder_cache(rows)
            if entropies is not None:
                entropies = entropies.index_select(0, rows)
        if entropies is not None:
            self.record.entropies.append(entropies)


def _token_inputs(kwargs: dict[str, Any]) -> torch.Tensor:
    """Return the new tokens of a forward pass `(B, L)`, or their embeddings `(B, L, D)`."""
    for name in ("decoder_input_ids", "input_ids", "inputs_embeds"):
        if kwargs.get(name) is not None:
            return kwargs[name]
    raise ValueError("the forward pass has no tokens")


def _can_be_shared(model: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Return whether a forward pass starts a prompt pass in which equal rows can share all inputs, states and
    outputs. The conditions are listed in [`recorded`]."""
    _, cache = given_cache(kwargs)
    ids = kwargs.get("input_ids")
    if args or ids is None:
        return False
    for name, value in kwargs.items():
        if name in ROW_INPUTS:
            # Masks of four dimensions belong to static caches, positions of three to multimodal models.
            if value is not None and not _has_shape_of(ids, value):
                return False
        elif name not in (*CACHE_NAMES, "cache_position"):
            if value is not None and not isinstance(value, bool | int | float | str):
                return False
    if kwargs.get("output_attentions") or kwargs.get("output_hidden_states"):
        return False
    if type(cache) is not DynamicCache or cache.offloading:
        return False
    # `get_seq_length` raises if no layer is an attention layer, as in Mamba. So look at the layers first.
    if not all(type(layer) in CACHE_LAYERS for layer in cache.layers) or cache.get_seq_length() > 0:
        return False
    # Multimodal models, which have a text configuration of their own, keep state of the batch outside the cache.
    return model.config.get_text_config(decoder=True) is model.config


def _has_shape_of(ids: torch.Tensor, value: Any) -> bool:
    """Return whether `value` is a tensor with two dimensions and one column per token of `ids`."""
    return isinstance(value, torch.Tensor) and value.dim() == 2 and value.shape[1] == ids.shape[1]


def has_dropout(model: Any) -> bool:
    """
    Return whether a forward pass adds random noise in the current mode of the model.

    TRL generates in training mode. In that mode dropout is active, and PVeRA samples the vectors of its adapters.
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
    """Return whether a layer has a PVeRA adapter, which adds random noise in training mode."""
    return "pvera_lambda_d" in dict(module.named_children())


def _row_inputs(kwargs: dict[str, Any]) -> list[str]:
    """Return the names of the inputs with one row per row of the batch. Positions may have a single row for all."""
    names = []
    for name in ROW_INPUTS:
        value = kwargs.get(name)
        if value is not None and len(value) == len(kwargs["input_ids"]):
            names.append(name)
    return names


def _distinct_rows(kwargs: dict[str, Any]) -> tuple[list[int], list[int]] | None:
    """
    Find rows that are equal in all inputs.

    Returns:
        `tuple[list[int], list[int]]` or `None`: Indices of the distinct rows `[U]`, and for each row of the batch its
        position in that list, `[B]`. None if all rows differ.
    """
    table = torch.cat([kwargs[name].long() for name in _row_inputs(kwargs)], dim=1).cpu().numpy()  # (B, ...)
    first_rows: list[int] = []
    position_of: dict[bytes, int] = {}  # by the bytes of a row
    positions: list[int] = []
    for i, row in enumerate(table):
        key = row.tobytes()
        if key not in position_of:
            position_of[key] = len(first_rows)
            first_rows.append(i)
        positions.append(position_of[key])
    if len(first_rows) == len(table):
        return None
    return first_rows, positions
