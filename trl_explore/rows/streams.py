"""Streams of training rows beside the main one: their micro-batches, and each stream's own normaliser.

A stream is a mean over its own rows or tokens, whichever the loss type averages over, so that the number of rows a
method happens to add never changes how strongly the main stream learns. TRL's loss divides by what it sees in the
micro-batch it is given; the factors below turn that into the stream's own mean over the whole generation batch.
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

# What TRL's loss divides by, per loss type: the rows of the micro-batch, its trained tokens, or `num_items_in_batch`.
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
    """Leave the global random state, CPU and `device`, as it was: forward passes in training draw LoRA's dropout. With
    `seed` it begins there meanwhile."""
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cuda"):
        if seed is not None:
            # `torch.manual_seed` formats the stack for each kind of accelerator that is not in use.
            torch.default_generator.manual_seed(seed)
            for used in devices:
                torch.get_device_module(used).manual_seed(seed)
        yield


@dataclass
class StreamTotals:
    """What a stream is averaged over, over all processes and the whole generation batch."""

    num_rows: int  # that count
    num_tokens: int  # trained ones of those rows
    num_batch_tokens: int | None = None  # of all rows, where some were taken out but weights stay


def check_loss_type(loss_type: str) -> None:
    """ValueError if TRL's loss of that type cannot carry further streams: its normaliser is not known."""
    if loss_type not in LOSS_NORMALISERS:
        raise ValueError(
            f"`loss_type={loss_type!r}` cannot carry extra streams of rows: it is not known what it divides by. "
            f"Choose one of {', '.join(sorted(LOSS_NORMALISERS))}."
        )


def stream_scale(loss_type: str, rows: RowDict, totals: StreamTotals, *, num_slots: int) -> float:
    """Factor that turns TRL's mean over a micro-batch into its share of the stream's mean; 1 for losses that divide by
    `num_items_in_batch`. The optimiser step averages over `num_slots = steps_per_generation * num_processes`."""
    normaliser = LOSS_NORMALISERS[loss_type]
    if normaliser == "rows":
        return rows["completion_ids"].size(0) * num_slots / max(totals.num_rows, 1)
    if normaliser == "tokens" and totals.num_batch_tokens is not None:
        # TRL weighs micro-batches alike, however many tokens they have; rows that leave make the rest count more.
        kept = max(int(loss_mask(rows).sum()), 1) / max(int(rows["num_tokens"].sum()), 1)
        return kept * totals.num_batch_tokens / max(totals.num_tokens, 1)
    if normaliser == "tokens":
        return max(int(loss_mask(rows).sum()), 1) * num_slots / max(totals.num_tokens, 1)
    return 1.0


def loss_mask(rows: RowDict) -> torch.Tensor:
    """1 on the tokens that TRL's loss trains, `(B, T)`."""
    return rows["completion_mask"] * rows["tool_mask"] if "tool_mask" in rows else rows["completion_mask"]


def select_rows(rows: RowDict, index: torch.Tensor) -> RowDict:
    """Rows `index`, `(M,)`, of every per-row entry; 0-dimensional entries stay as they are."""
    return {key: value if value.dim() == 0 else value[index] for key, value in rows.items()}


def row_tokens(rows: RowDict) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts `[B][P_i]` and completions `[B][T_i]` without padding."""
    prompts, completions = (
        [ids[real].tolist() for ids, real in zip(rows[f"{part}_ids"], rows[f"{part}_mask"].bool(), strict=True)]
        for part in ("prompt", "completion")
    )
    return prompts, completions


def mask_rows(rows: RowDict, keep: torch.Tensor) -> RowDict:
    """A shallow copy whose `tool_mask` is 0 on rows outside `keep`, `(B,)`: out of the loss, not of the batch."""
    tool_mask = rows.get("tool_mask", torch.ones_like(rows["completion_mask"]))
    return {**rows, "tool_mask": tool_mask * keep.unsqueeze(1).to(tool_mask.dtype)}


def trim_padding(rows: RowDict) -> RowDict:
    """A shallow copy without columns that hold no token (prompts padded left, completions right): a micro-batch of
    short rows need not pay for the longest row of the generation batch."""
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
    """Rows of several batches as one, padded as TRL pads: prompts on the left, all else on the right. 0-dimensional
    entries are those of the first."""
    merged = dict(parts[0])
    wide = {part: max(rows[f"{part}_ids"].shape[1] for rows in parts) for part in ("prompt", "completion")}
    if any(rows["advantages"].dim() == 2 for rows in parts):
        parts = [{**rows, "advantages": _per_token(rows)} for rows in parts]
    masked = any("tool_mask" in rows for rows in parts)
    for key in [*merged, *["tool_mask"] * (masked and "tool_mask" not in merged)]:
        values = [rows[key] if key in rows else torch.ones_like(rows["completion_mask"]) for rows in parts]
        if values[0].dim() == 0:
            continue
        fill = pad_id if key.endswith("_ids") else 0
        if key in ("prompt_ids", "prompt_mask"):
            values = [pad(value, (wide["prompt"] - value.shape[1], 0), value=fill) for value in values]
        elif all(  # of every part: vLLM's ratio of a sequence, `(B, 1)`, is as wide as completions of one token
            v.shape[1:] == rows["completion_ids"].shape[1:] for v, rows in zip(values, parts, strict=True)
        ):
            values = [pad(value, (0, wide["completion"] - value.shape[1]), value=fill) for value in values]
        merged[key] = torch.cat(values)
    return merged


def _per_token(rows: RowDict) -> torch.Tensor:
    """Advantages `(B, T)` of rows that may have one each."""
    advantages = rows["advantages"]
    return advantages if advantages.dim() == 2 else advantages[:, None].repeat(1, rows["completion_ids"].shape[1])


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
    Deal rows out in turn to micro-batches.

    Args:
        rows (`dict`):
            Rows of a stream `[B]`.
        keep (`torch.Tensor`):
            Rows that are trained, `(B,)`.
        num_rows (`int`):
            Number of rows to deal. Copies outside the loss fill up to it. It is the same on every process, because all
            processes must run the same forward passes.
        num_steps (`int`):
            Number of micro-batches.
        max_rows (`int`):
            Most rows of one part. A micro-batch is a list of parts.
        together (`bool`, *optional*, defaults to `False`):
            Whether rows of one prompt go to one micro-batch while there is room.
        window (`int`, *optional*):
            Number of consecutive micro-batches that may exchange rows with `together`; None for all.
        trim (`bool`, *optional*, defaults to `True`):
            Whether a part loses the columns that hold none of its tokens.

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
    order = torch.arange(len(index)).view(rows_per_step, num_steps).T  # (num_steps, rows_per_step)
    if together:
        order = torch.cat([_grouped(dealt, part) for part in order.split(window or num_steps)])
    steps = []
    for of_step in order.to(kept.device):
        parts = [select_rows(dealt, part) for part in of_step.split(max_rows)]
        steps.append([trim_padding(part) if trim else part for part in parts])
    return steps


def _grouped(rows: RowDict, order: torch.Tensor) -> torch.Tensor:
    """Return the same row numbers `(S, R)` with the rows of a prompt in as few of the S micro-batches as possible."""
    places = order.flatten()
    tokens = row_tokens(select_rows(rows, places.to(rows["prompt_ids"].device)))
    return places[torch.tensor(group_rows(*tokens, num_batches=len(order)))].view(order.shape)
