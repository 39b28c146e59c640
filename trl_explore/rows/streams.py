"""Streams of training rows beside the main one: their micro-batches, and each stream's own normaliser.

A stream is a mean over its own rows or tokens, whichever the loss type averages over, so that the number of rows a
method happens to add never changes how strongly the main stream learns. TRL's loss divides by what it sees in the
micro-batch it is given; the factors below turn that into the stream's own mean over the whole generation batch.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from trl_explore.packing.layout import group_rows

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
def kept_randomness(device: torch.device) -> Iterator[None]:
    """
    Leave the global random state as it was, whatever is drawn meanwhile: forward passes in training mode draw the
    dropout of LoRA.

    Args:
        device (`torch.device`):
            Device of the model, whose random state is kept beside that of the CPU.
    """
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cuda"):
        yield


@dataclass
class StreamTotals:
    """
    What a stream is averaged over.

    Args:
        num_rows (`int`):
            Rows that count, over all processes and the whole generation batch.
        num_tokens (`int`):
            Trained tokens of those rows.
        num_batch_tokens (`int`, *optional*):
            Trained tokens of all rows, where those that do not count were taken out of micro-batches that keep their
            weight.
    """

    num_rows: int
    num_tokens: int
    num_batch_tokens: int | None = None


def check_loss_type(loss_type: str) -> None:
    """
    Refuse a loss type whose normaliser is not known.

    Args:
        loss_type (`str`):
            `loss_type` of the training configuration.

    Raises:
        ValueError: If TRL's loss of that type cannot carry further streams.
    """
    if loss_type not in LOSS_NORMALISERS:
        raise ValueError(
            f"`loss_type={loss_type!r}` cannot carry extra streams of rows: it is not known what it divides by. "
            f"Choose one of {', '.join(sorted(LOSS_NORMALISERS))}."
        )


def stream_scale(loss_type: str, rows: RowDict, totals: StreamTotals, *, num_slots: int) -> float:
    """
    Factor that turns TRL's mean over a micro-batch into this micro-batch's share of the stream's mean.

    Args:
        loss_type (`str`):
            `loss_type` of the training configuration.
        rows (`dict`):
            The micro-batch as TRL's loss receives it; `num_tokens` are its rows' trained tokens before any was taken
            out.
        totals ([`StreamTotals`]):
            What the stream is averaged over.
        num_slots (`int`):
            Micro-batches of the generation batch over all processes (`steps_per_generation * num_processes`); the
            optimiser step averages over them.

    Returns:
        `float`: The factor; 1 for loss types that divide by `num_items_in_batch`.
    """
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
    """
    Tokens that TRL's loss trains.

    Args:
        rows (`dict`):
            Rows as TRL's loss receives them.

    Returns:
        `torch.Tensor`: Shape `(B, T)`, 1 on trained tokens.
    """
    return rows["completion_mask"] * rows["tool_mask"] if "tool_mask" in rows else rows["completion_mask"]


def select_rows(rows: RowDict, index: torch.Tensor) -> RowDict:
    """
    Pick rows from every per-row entry; 0-dimensional entries stay as they are.

    Args:
        rows (`dict`):
            Rows as TRL's loss receives them.
        index (`torch.Tensor`):
            Row indices of shape `(M,)`.

    Returns:
        `dict`: The same keys with M rows.
    """
    return {key: value if value.dim() == 0 else value[index] for key, value in rows.items()}


def row_tokens(rows: RowDict) -> tuple[list[list[int]], list[list[int]]]:
    """
    Tokens of rows without padding.

    Args:
        rows (`dict`):
            Rows as TRL's loss receives them.

    Returns:
        `tuple[list[list[int]], list[list[int]]]`: Prompts `[B][P_i]` and completions `[B][T_i]`.
    """
    prompts, completions = (
        [ids[real].tolist() for ids, real in zip(rows[f"{part}_ids"], rows[f"{part}_mask"].bool(), strict=True)]
        for part in ("prompt", "completion")
    )
    return prompts, completions


def mask_rows(rows: RowDict, keep: torch.Tensor) -> RowDict:
    """
    Take rows out of the loss without taking them out of the batch.

    Args:
        rows (`dict`):
            Rows as TRL's loss receives them.
        keep (`torch.Tensor`):
            Boolean mask of shape `(B,)`.

    Returns:
        `dict`: A shallow copy whose `tool_mask` is 0 on the other rows.
    """
    tool_mask = rows.get("tool_mask", torch.ones_like(rows["completion_mask"]))
    return {**rows, "tool_mask": tool_mask * keep.unsqueeze(1).to(tool_mask.dtype)}


def trim_padding(rows: RowDict) -> RowDict:
    """
    Cut the columns in which no row of the micro-batch has a token.

    A stream's rows are padded to the longest of the generation batch; a micro-batch of short rows need not pay for it.

    Args:
        rows (`dict`):
            Rows as TRL's loss receives them; prompts padded left, completions right.

    Returns:
        `dict`: A shallow copy with narrower tensors.
    """
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


def split_stream(
    rows: RowDict,
    keep: torch.Tensor,
    *,
    num_rows: int,
    num_steps: int,
    max_rows: int,
    together: bool = False,
) -> list:
    """
    Deal the rows of a stream out to the micro-batches of the generation batch.

    Rows are dealt in turn, so that siblings spread evenly and every micro-batch gets the same number; or siblings stay
    together. Missing rows are filled with copies that are masked out of the loss, because every process must run the
    same forward passes.

    Args:
        rows (`dict`):
            The stream's rows on this process, as TRL's loss receives them.
        keep (`torch.Tensor`):
            Boolean mask of shape `(B,)`: the rows to train.
        num_rows (`int`):
            Rows to reach on every process, at least the number kept here.
        num_steps (`int`):
            Micro-batches per generation batch (`steps_per_generation`).
        max_rows (`int`):
            Largest number of rows for one forward pass.
        together (`bool`, *optional*, defaults to `False`):
            Whether rows of one prompt go to one micro-batch while there is room.

    Returns:
        `list[list[dict]]`: For each micro-batch, its parts of at most `max_rows` rows.
    """
    if num_rows == 0:
        return [[] for _ in range(num_steps)]
    rows_per_step = math.ceil(num_rows / num_steps)
    kept = keep.nonzero().squeeze(1)
    num_fill = rows_per_step * num_steps - len(kept)
    index = torch.cat([kept, torch.zeros(num_fill, dtype=kept.dtype, device=kept.device)])
    real = torch.arange(len(index), device=kept.device) < len(kept)
    dealt = mask_rows(select_rows(rows, index), real)
    order = torch.arange(len(index)).view(rows_per_step, num_steps).T
    if together:
        order = torch.tensor(group_rows(*row_tokens(dealt), num_batches=num_steps)).view(num_steps, rows_per_step)
    steps = []
    for of_step in order.to(kept.device):
        steps.append([trim_padding(select_rows(dealt, part)) for part in of_step.split(max_rows)])
    return steps
