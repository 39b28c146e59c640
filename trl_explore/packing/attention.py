"""Attention over packed rows: every token sees what precedes it in its own rows, and nothing of other branches.

It is registered with transformers' `AttentionInterface`; a forward pass without packed rows is the model's own to the
bit. One with `packed_rows=` takes one of three ways:
- On a CPU a segment's keys are seen by all its descendants, which stand in one piece, without a mask. That is one call
  of the flash kernel per segment that has descendants, and a causal one per segment, merged by their log-sum-exp.
- Where a sliding window cuts, or logits are capped, each segment attends to its chain of ancestors under a mask.
- On a GPU it is FlexAttention, whose mask is two comparisons.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trl_explore.rows.layout import PackedRows, Trie

PREFIX = "packed_"
LAYER_TYPES = {"full_attention", "sliding_attention"}
IMPLEMENTATIONS = ("sdpa", "eager", "flex_attention")
BLOCK = 128  # queries and keys of a block of FlexAttention
# A 4D mask goes through transformers' mask making as it is; without elements it cannot be mistaken for a real one.
NO_MASK = torch.empty(1, 1, 0, 0)


def enable_packing(model: PreTrainedModel) -> None:
    """Let an unwrapped model take packed rows; without them it computes what it did before. ValueError if it cannot,
    with the reason, and what to set instead where that helps."""
    config = model.config.to_dict()
    kinds = set(config.get("layer_types") or ()) - LAYER_TYPES
    if kinds or model._is_stateful:
        raise ValueError(
            f"{type(model).__name__} has layers without attention or with one of their own "
            f"({', '.join(sorted(kinds)) or 'recurrent'}), which read rows one after the other"
        )
    if config.get("attention_dropout"):
        raise ValueError(
            f"`attention_dropout={config['attention_dropout']}` drops other tokens for each row: load the model with "
            "`attention_dropout=0.0` (in `model_init_kwargs`)"
        )
    original = model.config._attn_implementation
    if original.startswith(PREFIX):
        return
    if original not in IMPLEMENTATIONS:
        raise ValueError(
            f"the attention implementation {original!r} cannot take a tree of rows: load the model with "
            "`attn_implementation='sdpa'` (in `model_init_kwargs`)"
        )
    name = PREFIX + original
    AttentionInterface.register(name, partial(_attend, original=original))
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[original])
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        raise ValueError(f"{type(model).__name__} does not use the attention interface of transformers")


@contextmanager
def own_attention(model: PreTrainedModel) -> Iterator[None]:
    """Let a model run under its own attention's name, for continuous batching; no backward pass may be due."""
    name = model.config._attn_implementation
    model.set_attn_implementation(name.removeprefix(PREFIX))
    try:
        yield
    finally:
        model.set_attn_implementation(name)


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    original: str,
    packed_rows: PackedRows | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if packed_rows is None:
        if attention_mask is not None and attention_mask.numel() == 0:
            raise ValueError(f"{type(module).__name__} is not told which rows are packed: its model drops arguments")
        own = sys.modules[type(module).__module__]
        attention = ALL_ATTENTION_FUNCTIONS[original] if original != "eager" else vars(own)["eager_attention_forward"]
        return attention(module, query, key, value, attention_mask, **kwargs)
    scale = kwargs.get("scaling") or query.size(-1) ** -0.5
    window, softcap = kwargs.get("sliding_window"), kwargs.get("softcap")
    if torch.is_autocast_enabled(query.device.type):  # rotated queries and keys may be float32
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if query.device.type == "cuda" and query.size(-1) >= 16:  # the least that FlexAttention takes there
        from transformers.integrations.flex_attention import flex_attention_forward

        # Compiled for one length, then for any: torch makes what changes dynamic. To ask for it beforehand fails:
        # `mark_dynamic` on the mask's lengths, which are plain numbers, and `dynamic=True` on `softcap`, which is one.
        mask = block_mask(packed_rows, window)
        return flex_attention_forward(module, query, key, value, mask, scaling=scale, softcap=softcap)
    if window is not None and window > int(packed_rows.position_ids.max()):
        window = None
    fused = query.device.type == "cpu" and query.size(-1) == value.size(-1)
    if fused and window is None and softcap is None:
        out = _TreeAttention.apply(query, key, value, packed_rows.trie, scale)
    else:
        out = masked_attention(query, key, value, packed_rows.trie, scale=scale, window=window, softcap=softcap)
    return out.transpose(1, 2).contiguous(), None


class _TreeAttention(torch.autograd.Function):
    """Exact attention in parts. Attention over several sets of keys is the average of the attentions over each,
    weighted by their log-sum-exp; and the gradient of one part needs of the others only the merged output and
    log-sum-exp, which is what the flash kernel's backward takes."""

    @staticmethod
    def forward(ctx, query, key, value, trie: Trie, scale: float):
        batch, heads, length, width = query.shape
        precise = torch.promote_types(query.dtype, torch.float32)
        out = query.new_empty(batch, length, heads, width, dtype=precise).transpose(1, 2)  # the order of the kernel
        lse = query.new_empty(batch, heads, length, dtype=precise)
        for queries, keys, causal in spans(trie):
            part = query[:, :, queries], key[:, :, keys], value[:, :, keys]
            part_out, part_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *part, is_causal=causal, scale=scale
            )
            if causal:  # the first that these queries see
                out[:, :, queries], lse[:, :, queries] = part_out, part_lse
                continue
            merged = torch.logaddexp(lse[:, :, queries], part_lse)
            share = (part_lse - merged).exp().unsqueeze(-1)
            out[:, :, queries].lerp_(part_out.to(precise), share)
            lse[:, :, queries] = merged
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.trie, ctx.scale = trie, scale
        return out

    @staticmethod
    def backward(ctx, grad_out):
        query, key, value, out, lse = ctx.saved_tensors
        grads = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
        for queries, keys, causal in spans(ctx.trie):
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad_out[:, :, queries],
                query[:, :, queries],
                key[:, :, keys],
                value[:, :, keys],
                out[:, :, queries],
                lse[:, :, queries],
                0.0,
                causal,
                scale=ctx.scale,
            )
            for grad, part, where in zip(grads, parts, (queries, keys, keys), strict=True):
                grad[:, :, where] += part
        return *grads, None, None


def spans(trie: Trie) -> list[tuple[slice, slice, bool]]:
    """Attention in parts without a mask: packed positions of queries and of keys, and whether the part is causal.
    Every causal part stands before the others with its queries."""
    own = [(slice(s.start, s.stop), slice(s.start, s.stop), True) for s in trie.segments]
    above = [(slice(s.stop, s.end), slice(s.start, s.stop), False) for s in trie.segments if s.end > s.stop]
    return own + above


def masked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    trie: Trie,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attention `(1, H, S, D_v)` of each segment to its ancestors and itself, under a mask over their depths. `window`
    counts tokens of a row, the seeing one included; `softcap` bounds logits by a hyperbolic tangent."""
    parts = []
    for i, segment in enumerate(trie.segments):
        chain = trie.chain(i)
        if window is not None:
            chain = [s for s in chain if s.depth + s.stop - s.start > segment.depth - window + 1]
        depths = torch.cat([torch.arange(s.stop - s.start) + s.depth for s in chain])
        keys, values = (_joined([x[:, :, s.start : s.stop] for s in chain]) for x in (key, value))
        queries = query[:, :, segment.start : segment.stop]
        distance = depths[-queries.size(2) :, None] - depths[None, :]
        seen = (distance >= 0) & (distance < (window or len(depths) + segment.depth + 1))
        seen = seen.to(query.device)
        if softcap is None:
            out = nn.functional.scaled_dot_product_attention(
                queries, keys, values, attn_mask=seen, scale=scale, enable_gqa=True
            )
        else:
            groups = query.size(1) // key.size(1)
            keys, values = keys.repeat_interleave(groups, dim=1), values.repeat_interleave(groups, dim=1)
            logits = softcap * torch.tanh(queries @ keys.transpose(2, 3) * (scale / softcap))
            weights = logits.masked_fill(~seen, -torch.inf).softmax(dim=-1, dtype=torch.float32)
            out = weights.to(values.dtype) @ values
        parts.append(out)
    return torch.cat(parts, dim=2)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(parts, dim=2) if len(parts) > 1 else parts[0]  # `cat` copies a single part too


def block_mask(rows: PackedRows, window: int | None) -> Any:
    """FlexAttention's mask of rows padded to whole blocks; `window` as in [`masked_attention`]."""
    if window in rows.block_masks:
        return rows.block_masks[window]
    from torch.nn.attention.flex_attention import BlockMask

    device, depths = rows.input_ids.device, rows.position_ids[0]
    lengths = torch.tensor([s.stop - s.start for s in rows.trie.segments], device=device)
    ends = torch.tensor([s.end for s in rows.trie.segments], device=device).repeat_interleave(lengths)  # (S,)
    beyond = None if window is None else depths - window  # a tensor: each number would be a graph of its own

    def sees(batch, head, q, k):
        # Descendants of a segment stand in one piece, from the segment itself to its end.
        seen = (k <= q) & (q < ends[k])
        return seen if beyond is None else seen & (beyond[q] < depths[k])

    # The same for blocks, out of the extremes of each: a mask over all pairs of tokens grows with their square.
    first = torch.arange(0, len(depths), BLOCK, device=device)
    end, depth = ends.view(-1, BLOCK), depths.view(-1, BLOCK)
    some = first[:, None] < end.amax(1)
    every = first[:, None] + BLOCK <= end.amin(1)
    if window is not None:
        some &= depth.amin(1)[:, None] - depth.amax(1) < window
        every &= depth.amax(1)[:, None] - depth.amin(1) < window
    some, every = some.tril(-1), every.tril(-1)
    own = torch.eye(len(first), dtype=torch.bool, device=device)
    mask = BlockMask.from_kv_blocks(
        *_listed(some & ~every | own), *_listed(some & every), BLOCK_SIZE=BLOCK, mask_mod=sees
    )
    rows.block_masks[window] = mask
    return mask


def num_compilations() -> int:
    """Graphs that torch has compiled in this process so far."""
    from torch._dynamo.utils import counters  # slow to import

    return counters["stats"]["unique_graphs"]


def _listed(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many blocks of keys each block of queries has, and which: those first."""
    order = blocks.int().argsort(dim=1, descending=True, stable=True)
    return blocks.sum(dim=1, dtype=torch.int32)[None, None], order.int()[None, None]
