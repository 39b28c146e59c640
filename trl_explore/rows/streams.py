"""Streams: training rows in addition to the main rows, with their own micro-batches and normalizers.

The *main rows* of a generation batch are GRPO's: `num_generations` completions of each prompt. A *stream* is a second
set of rows of the same generation batch that a method adds and trains with TRL's loss, for example the branches of
DEEP-GRPO (the stream `aux`). It has a name, which begins the names of its metrics (`aux/reward`), and a weight.

The loss of a stream is the mean over the rows or tokens of this stream, depending on the loss type, multiplied by its
weight. It is added to the loss of the main rows. So the number of rows that a method adds does not change the weight
of the main rows. TRL's loss divides by the rows or tokens of one micro-batch. [`stream_scale`] turns that into the
mean over the stream's rows of the whole generation batch.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

from trl_explore.rows.layout import group_rows

RowDict = dict[str, Any]

# Divisor of TRL's loss by loss type: rows of the micro-batch, its trained tokens, or `num_items_in_batch`.
LOSS_NORMALISERS = {
    "grpo": "rows",
    "sapo": "rows",
    "luspo": "rows",
    "dr_grpo": "rows",
    "bnpo": "tokens",
    "dapo": "items",
    "cispo": "items",
    "vespo": "items",
}


@contextmanager
def kept_randomness(device: torch.device, *, seed: int | None = None) -> Iterator[None]:
    """
    Restore the global random state of the CPU and of `device` at the end of the block.

    A forward pass in training mode can use random numbers, for example for LoRA's dropout. With `seed`, the random
    state is set to this seed at the start of the block.
    """
    devices, device_type = [device], device.type
    if device.type == "cpu":
        devices, device_type = [], "cuda"  # `fork_rng` always keeps the state of the CPU
    with torch.random.fork_rng(devices=devices, device_type=device_type):
        if seed is not None:
            # `torch.manual_seed` would be slow: it formats the stack for each kind of accelerator that is not in use.
            torch.default_generator.manual_seed(seed)
            for used in devices:
                torch.get_device_module(used).manual_seed(seed)
        yield


@dataclass
class StreamTotals:
    """Numbers of rows and tokens of a stream, over all processes and the whole generation batch."""

    num_rows: int  # rows that the mean includes
    num_tokens: int  # trained tokens of these rows
    num_batch_tokens: int | None = None  # trained tokens before rows were dropped; None if none were dropped


def check_loss_type(loss_type: str) -> None:
    """Raise a ValueError if the divisor of this loss type is unknown, so that streams cannot be scaled."""
    if loss_type not in LOSS_NORMALISERS:
        raise ValueError(
            f"`loss_type={loss_type!r}` cannot carry extra streams of rows: it is not known what it divides by. "
            f"Choose one of {', '.join(sorted(LOSS_NORMALISERS))}."
        )


def stream_scale(loss_type: str, rows: RowDict, totals: StreamTotals, *, num_slots: int) -> float:
    """
    Return the factor that turns TRL's mean over a micro-batch into its share of the stream's mean.

    Args:
        loss_type (`str`):
            TRL's loss type.
        rows (`dict`):
            Rows of the micro-batch.
        totals ([`StreamTotals`]):
            Numbers of rows and tokens of the stream.
        num_slots (`int`):
            Number of micro-batches that are averaged: `steps_per_generation * num_processes`.

    Returns:
        `float`: The factor. 1 for losses that divide by `num_items_in_batch`.
    """
    normaliser = LOSS_NORMALISERS[loss_type]
    if normaliser == "rows":
        return rows["completion_ids"].size(0) * num_slots / max(totals.num_rows, 1)
    if normaliser == "tokens" and totals.num_batch_tokens is not None:
        # TRL gives all micro-batches the same weight. If rows are dropped, the tokens of the others must count more.
        kept = max(int(loss_mask(rows).sum()), 1) / max(int(rows["num_tokens"].sum()), 1)
        return kept * totals.num_batch_tokens / max(totals.num_tokens, 1)
    if normaliser == "tokens":
        return max(int(loss_mask(rows).sum()), 1) * num_slots / max(totals.num_tokens, 1)
    return 1.0


def loss_mask(rows: RowDict) -> torch.Tensor:
    """Return the mask of the tokens that TRL's loss trains, `(B, T)`."""
    if "tool_mask" in rows:
        return rows["completion_mask"] * rows["tool_mask"]
    return rows["completion_mask"]


def select_rows(rows: RowDict, index: torch.Tensor) -> RowDict:
    """Return the rows `index`, `(M,)`, of every entry. 0-dimensional entries stay unchanged."""
    selected = {}
    for key, value in rows.items():
        selected[key] = value if value.dim() == 0 else value[index]
    return selected


def row_tokens(rows: RowDict) -> tuple[list[list[int]], list[list[int]]]:
    """Return prompts `[B][P_i]` and completions `[B][T_i]` without padding."""
    return (
        _without_padding(rows["prompt_ids"], rows["prompt_mask"]),
        _without_padding(rows["completion_ids"], rows["completion_mask"]),
    )


def _without_padding(ids: torch.Tensor, mask: torch.Tensor) -> list[list[int]]:
    return [row[real].tolist() for row, real in zip(ids, mask.bool(), strict=True)]


def mask_rows(rows: RowDict, keep: torch.Tensor) -> RowDict:
    """Return a shallow copy whose `tool_mask` is 0 for the rows that are False in `keep`, `(B,)`. These rows stay in
    the batch, but not in the loss."""
    tool_mask = rows.get("tool_mask", torch.ones_like(rows["completion_mask"]))
    return {**rows, "tool_mask": tool_mask * keep.unsqueeze(1).to(tool_mask.dtype)}


def trim_padding(rows: RowDict) -> RowDict:
    """Return a shallow copy without the columns that contain only padding. Without trimming, a micro-batch of short
    rows would cost as much as the longest row of the generation batch. Prompts are padded on the left, completions on
    the right."""
    num_prompt = rows["prompt_mask"].size(1)
    num_completion = rows["completion_ids"].size(1)
    longest_prompt = max(int(rows["prompt_mask"].sum(dim=1).max()), 1)
    longest_completion = max(int(rows["completion_mask"].sum(dim=1).max()), 1)
    trimmed = {}
    for key, value in rows.items():
        if key in ("prompt_ids", "prompt_mask"):
            trimmed[key] = value[:, num_prompt - longest_prompt :]
        elif value.dim() == 2 and value.size(1) == num_completion:
            trimmed[key] = value[:, :longest_completion]
        else:
            trimmed[key] = value
    return trimmed


def merge_rows(parts: Sequence[RowDict], *, pad_id: int) -> RowDict:
    """Return the rows of several batches as one batch, padded like TRL: prompts on the left, other entries on the
    right. 0-dimensional entries are taken from the first batch."""
    merged = dict(parts[0])
    prompt_width = max(rows["prompt_ids"].shape[1] for rows in parts)
    completion_width = max(rows["completion_ids"].shape[1] for rows in parts)
    if any(rows["advantages"].dim() == 2 for rows in parts):
        parts = [{**rows, "advantages": _per_token(rows)} for rows in parts]
    keys = list(merged)
    if "tool_mask" not in merged and any("tool_mask" in rows for rows in parts):
        keys.append("tool_mask")
    for key in keys:
        values = []
        for rows in parts:  # only `tool_mask` can be missing
            values.append(rows[key] if key in rows else torch.ones_like(rows["completion_mask"]))
        if values[0].dim() == 0:
            continue
        fill = pad_id if key.endswith("_ids") else 0
        if key in ("prompt_ids", "prompt_mask"):
            values = [pad(value, (prompt_width - value.shape[1], 0), value=fill) for value in values]
        elif _is_per_token(values, parts):
            values = [pad(value, (0, completion_width - value.shape[1]), value=fill) for value in values]
        merged[key] = torch.cat(values)
    return merged


def _is_per_token(values: Sequence[torch.Tensor], parts: Sequence[RowDict]) -> bool:
    """Return whether an entry has one value per completion token in all batches. Check all of them: vLLM's importance
    ratio of a sequence, `(B, 1)`, looks like an entry per token in a batch whose completions have one token."""
    for value, rows in zip(values, parts, strict=True):
        if value.shape[1:] != rows["completion_ids"].shape[1:]:
            return False
    return True


def _per_token(rows: RowDict) -> torch.Tensor:
    """Return the advantages per token, `(B, T)`. Advantages per row are repeated for every token."""
    advantages = rows["advantages"]
    if advantages.dim() == 2:
        return advantages
    return advantages[:, None].repeat(1, rows["completion_ids"].shape[1])


def split_stream(
    rows: RowDict,
    keep: torch.Tensor,
    *,
    num_rows: int,
    num_steps: int,
    max_rows: int,
    together: bool = False,
    window: int | None = None,
    trim: bool = True,
) -> list[list[RowDict]]:
    """
    Distribute rows over micro-batches, one row after another.

    Args:
        rows (`dict`):
            Rows of a stream, `[B]`.
        keep (`torch.Tensor`):
            Mask of the rows that are trained, `(B,)`.
        num_rows (`int`):
            Number of rows to distribute, the same on every process, because all processes must run the same forward
            passes. Missing rows are filled up with copies of a row whose loss mask is 0.
        num_steps (`int`):
            Number of micro-batches.
        max_rows (`int`):
            Largest number of rows of one part. A micro-batch is a list of parts.
        together (`bool`, *optional*, defaults to `False`):
            If True, rows of one prompt go to the same micro-batch while it has room.
        window (`int`, *optional*):
            Number of consecutive micro-batches that may exchange rows with `together`; None for all.
        trim (`bool`, *optional*, defaults to `True`):
            If True, remove the columns of a part that contain only padding.

    Returns:
        `list[list[dict]]`: Parts of each micro-batch.
    """
    if num_rows == 0:
        return [[] for _ in range(num_steps)]
    rows_per_step = math.ceil(num_rows / num_steps)
    kept = keep.nonzero().squeeze(1)
    num_fill = rows_per_step * num_steps - len(kept)
    index = torch.cat([kept, torch.zeros(num_fill, dtype=kept.dtype, device=kept.device)])
    real = torch.arange(len(index), device=kept.device) < len(kept)
    dealt = mask_rows(select_rows(rows, index), real)
    # Row i goes to micro-batch i % num_steps. So filler rows, which come last, are spread over the micro-batches.
    order = torch.arange(len(index)).view(rows_per_step, num_steps).T  # (num_steps, rows_per_step)
    if together:
        order = torch.cat([_grouped(dealt, part) for part in order.split(window or num_steps)])
    steps = []
    for of_step in order.to(kept.device):
        parts = [select_rows(dealt, part) for part in of_step.split(max_rows)]
        if trim:
            parts = [trim_padding(part) for part in parts]
        steps.append(parts)
    return steps


def _grouped(rows: RowDict, order: torch.Tensor) -> torch.Tensor:
    """Return the same row numbers `(S, R)` with the rows of a prompt in as few of the S micro-batches as possible."""
    places = order.flatten()
    tokens = row_tokens(select_rows(rows, places.to(rows["prompt_ids"].device)))
    return places[torch.tensor(group_rows(*tokens, num_batches=len(order)))].view(order.shape)
