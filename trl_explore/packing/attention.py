"""Attention over packed rows: a token attends to the earlier tokens of its own rows, and not to other branches.

`rows/layout.py` describes packed rows: a trie of segments, which are runs of tokens without a branching. The functions
here are registered with transformers' `AttentionInterface`. A forward pass without packed rows has exactly the same
results as before. A forward pass with `packed_rows=` is computed in one of three ways:
- On a GPU, FlexAttention computes the attention if the head size is at least 16. Its mask consists of two
  comparisons, and one more with a window.
- On a CPU, without a sliding window and without soft-capping, `_TreeAttention` needs no mask. All descendants of a
  segment are consecutive, and attend to all its keys. There is one call of the flash kernel per segment for its
  descendants, and one causal call per segment for itself. Their results are merged by their log-sum-exp.
- In all other cases, `masked_attention` lets each segment attend to its chain of ancestors, with a mask.
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
BLOCK = 128  # number of queries, and of keys, of a block of FlexAttention
# Transformers passes a mask with four dimensions to the attention unchanged. This one has no elements, so that no code
# can mistake it for a real mask.
NO_MASK = torch.empty(1, 1, 0, 0)


def enable_packing(model: PreTrainedModel) -> None:
    """
    Let a model accept packed rows. Forward passes without packed rows do not change.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            Unwrapped model.

    Raises:
        ValueError: If the model does not allow it. The message has the reason and, if there is one, a setting that
            helps.
    """
    config = model.config.to_dict()
    unsupported = set(config.get("layer_types") or ()) - LAYER_TYPES
    if unsupported or model._is_stateful:
        raise ValueError(
            f"{type(model).__name__} has layers without full or sliding-window attention "
            f"({', '.join(sorted(unsupported)) or 'recurrent'}), which do not accept packed rows"
        )
    if config.get("attention_dropout"):
        raise ValueError(
            f"`attention_dropout={config['attention_dropout']}` drops different tokens in each row: load the model "
            "with `attention_dropout=0.0` (in `model_init_kwargs`)"
        )
    original = model.config._attn_implementation
    if original.startswith(PREFIX):  # packing is already enabled
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
    """Restore the model's original attention inside the `with` block, because continuous batching requires it.

    The block must not contain the backward pass of an earlier forward pass: gradient checkpointing would repeat that
    forward pass with the original attention.
    """
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
            raise ValueError(f"{type(module).__name__} does not get `packed_rows`: its model drops arguments")
        if original == "eager":  # each model has its own eager attention
            attention = sys.modules[type(module).__module__].eager_attention_forward
        else:
            attention = ALL_ATTENTION_FUNCTIONS[original]
        return attention(module, query, key, value, attention_mask, **kwargs)
    scale = kwargs.get("scaling") or query.size(-1) ** -0.5
    window, softcap = kwargs.get("sliding_window"), kwargs.get("softcap")
    if torch.is_autocast_enabled(query.device.type):  # rotary positions may have made queries and keys float32
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if query.device.type == "cuda" and query.size(-1) >= 16:  # FlexAttention needs a head size of at least 16
        from transformers.integrations.flex_attention import flex_attention_forward

        # torch compiles twice: for the first length, and for all lengths when a second length occurs. It cannot
        # compile for all lengths at once. `mark_dynamic` does not accept the lengths of the mask, and `dynamic=True`
        # does not accept `softcap`, because both are plain numbers.
        mask = block_mask(packed_rows, window)
        return flex_attention_forward(module, query, key, value, mask, scaling=scale, softcap=softcap)
    if window is not None and window > int(packed_rows.position_ids.max()):  # it covers the longest row
        window = None
    fused = query.device.type == "cpu" and query.size(-1) == value.size(-1)
    if fused and window is None and softcap is None:
        out = _TreeAttention.apply(query, key, value, packed_rows.trie, scale)
    else:
        out = masked_attention(query, key, value, packed_rows.trie, scale=scale, window=window, softcap=softcap)
    return out.transpose(1, 2).contiguous(), None


class _TreeAttention(torch.autograd.Function):
    """
    Exact attention, computed in parts with the flash kernel for CPUs.

    Attention over several sets of keys is the weighted average of the attention over each set. The weights follow from
    the log-sum-exp of each set. The backward function of the flash kernel takes an output and its log-sum-exp. If it
    gets the merged output and log-sum-exp, it returns the exact gradient of one part.
    """

    @staticmethod
    def forward(ctx, query, key, value, trie: Trie, scale: float):
        batch, heads, length, width = query.shape
        precise = torch.promote_types(query.dtype, torch.float32)
        # The memory order is the same as in the kernel's output.
        out = query.new_empty(batch, length, heads, width, dtype=precise).transpose(1, 2)
        lse = query.new_empty(batch, heads, length, dtype=precise)
        for queries, keys, causal in spans(trie):
            part = query[:, :, queries], key[:, :, keys], value[:, :, keys]
            part_out, part_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *part, is_causal=causal, scale=scale
            )
            if causal:  # the first part of these queries
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
    """
    Divide attention over a trie into parts that need no mask.

    A segment's own tokens are at positions `start` to `stop`, and its descendants at positions `stop` to `end`.

    Returns:
        `list[tuple[slice, slice, bool]]`: Packed positions of the queries and of the keys of each part, and True if
        the part is causal. The causal part of a query comes before its other parts.
    """
    itself, descendants = [], []
    for segment in trie.segments:
        own = slice(segment.start, segment.stop)
        itself.append((own, own, True))
        if segment.end > segment.stop:
            descendants.append((slice(segment.stop, segment.end), own, False))
    return itself + descendants


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
    """
    Compute attention of each segment to itself and its ancestors, with a mask.

    Args:
        query (`torch.Tensor`):
            Queries `(1, H, S, D)`.
        key (`torch.Tensor`):
            Keys `(1, H_kv, S, D)`.
        value (`torch.Tensor`):
            Values `(1, H_kv, S, D_v)`.
        trie ([`~trl_explore.rows.layout.Trie`]):
            Segments of the packed rows.
        scale (`float`):
            Factor of the logits.
        window (`int`, *optional*):
            Number of tokens of a row that a token attends to, including the token itself. None for all tokens.
        softcap (`float`, *optional*):
            Bound of the logits: they become `softcap * tanh(logits / softcap)`.

    Returns:
        `torch.Tensor`: Attention outputs `(1, H, S, D_v)`.
    """
    parts = []
    for i, segment in enumerate(trie.segments):
        chain = trie.chain(i)
        if window is not None:  # drop ancestors that end before the window of the segment's first token
            window_start = segment.depth - window + 1
            chain = [s for s in chain if s.depth + s.stop - s.start > window_start]
        depths = torch.cat([torch.arange(s.stop - s.start) + s.depth for s in chain])
        keys = _joined([key[:, :, s.start : s.stop] for s in chain])
        values = _joined([value[:, :, s.start : s.stop] for s in chain])
        queries = query[:, :, segment.start : segment.stop]
        distance = depths[-queries.size(2) :, None] - depths[None, :]
        seen = distance >= 0
        if window is not None:
            seen &= distance < window
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
    """Concatenate tensors along the tokens. Do not copy a single tensor."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, dim=2)


def block_mask(rows: PackedRows, window: int | None) -> Any:
    """Return the mask of FlexAttention for rows that are padded to whole blocks. For `window` see
    [`masked_attention`]."""
    if window in rows.block_masks:
        return rows.block_masks[window]
    from torch.nn.attention.flex_attention import BlockMask

    device, depths = rows.input_ids.device, rows.position_ids[0]
    lengths = torch.tensor([s.stop - s.start for s in rows.trie.segments], device=device)
    ends = torch.tensor([s.end for s in rows.trie.segments], device=device).repeat_interleave(lengths)  # (S,)
    # With a window, a query sees only keys deeper than this. It is a tensor, because torch would compile a graph for
    # every number.
    deepest_unseen = None
    if window is not None:
        deepest_unseen = depths - window

    def sees(batch, head, q, k):
        # A segment and its descendants are consecutive, up to the segment's end.
        seen = (k <= q) & (q < ends[k])
        return seen if deepest_unseen is None else seen & (deepest_unseen[q] < depths[k])

    # FlexAttention skips a pair of blocks if no query sees a key (`some` is False). It does not call `sees` if every
    # query sees every key (`every`). Both follow from the extremes of the blocks, because a mask over all pairs of
    # tokens would need memory that grows with the square of their number. If `some` is True without need, `sees`
    # still decides.
    first = torch.arange(0, len(depths), BLOCK, device=device)  # first position of each block
    end, depth = ends.view(-1, BLOCK), depths.view(-1, BLOCK)
    some = first[:, None] < end.amax(1)
    every = first[:, None] + BLOCK <= end.amin(1)
    if window is not None:
        some &= depth.amin(1)[:, None] - depth.amax(1) < window
        every &= depth.amax(1)[:, None] - depth.amin(1) < window
    # Keys in later blocks are never seen. Inside a block, `sees` always decides.
    some, every = some.tril(-1), every.tril(-1)
    own = torch.eye(len(first), dtype=torch.bool, device=device)
    mask = BlockMask.from_kv_blocks(
        *_listed((some & ~every) | own), *_listed(some & every), BLOCK_SIZE=BLOCK, mask_mod=sees
    )
    rows.block_masks[window] = mask
    return mask


def num_compilations() -> int:
    """Return the number of graphs that torch has compiled in this process."""
    from torch._dynamo.utils import counters  # slow to import

    return counters["stats"]["unique_graphs"]


def _listed(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the number of key blocks that each query block sees, and the key blocks, sorted so that these are first.
    FlexAttention expects masks in this form."""
    order = blocks.int().argsort(dim=1, descending=True, stable=True)
    return blocks.sum(dim=1, dtype=torch.int32)[None, None], order.int()[None, None]
