"""Checkpoints: the state of each process in them, which ones are whole, and files of a run beside them."""

import json
import math
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from trl_explore.saving.whole_files import whole_file

STATE_FILE = "explore_state_{rank}.pt"
TRAINER_STATE = "trainer_state.json"
EARLIER = "_earlier-{number}"


def save_state(state: dict[str, Any], folder: str | Path, *, rank: int) -> None:
    """
    Write one process's state; an interrupted write leaves the old file or none.

    Args:
        state (`dict`):
            Tensors, numbers, strings, and containers of them: what `torch.load(weights_only=True)` can read.
        folder (`str` or `Path`):
            The checkpoint folder; made if it is missing, since ranks do not wait for each other here.
        rank (`int`):
            Process index.
    """
    os.makedirs(folder, exist_ok=True)
    path = Path(folder) / STATE_FILE.format(rank=rank)
    with whole_file(path) as part:
        torch.save(state, part)


def load_state(folder: str | Path, *, rank: int, world_size: int) -> dict[str, Any] | None:
    """
    Read one process's state.

    Args:
        folder (`str` or `Path`):
            The checkpoint folder.
        rank (`int`):
            Process index.
        world_size (`int`):
            Number of processes of this run.

    Returns:
        `dict` or `None`: The state; `None` where the checkpoint was made by a plain `GRPOTrainer`.

    Raises:
        ValueError: If the checkpoint was made with another number of processes.
    """
    found = len(list(Path(folder).glob(STATE_FILE.format(rank="*"))))
    if not found:
        return None
    if found != world_size:
        raise ValueError(
            f"the checkpoint {folder} was written by {found} process(es), this run has {world_size}: rollouts and "
            f"random states cannot be redistributed. Resume with {found} process(es), or start a new run from the "
            "checkpoint's weights (`--model_name_or_path`)."
        )
    return torch.load(Path(folder) / STATE_FILE.format(rank=rank), weights_only=True, map_location="cpu")


def is_complete(folder: str | Path) -> bool:
    """
    Whether a checkpoint was written to its end.

    Args:
        folder (`str` or `Path`):
            The checkpoint folder.

    Returns:
        `bool`: `False` where the trainer state, which is written last, is missing or cut off, or where the state of a
        process is.
    """
    states = sorted(Path(folder).glob(STATE_FILE.format(rank="*")))
    try:
        json.loads((Path(folder) / TRAINER_STATE).read_text())
        written_by = torch.load(states[0], weights_only=True, mmap=True).get("num_processes", 1) if states else 0
    except (OSError, ValueError, EOFError, RuntimeError):
        return False
    return len(states) >= written_by


def last_complete_checkpoint(output_dir: str | Path) -> tuple[str | None, list[str]]:
    """
    The newest checkpoint that is whole.

    Args:
        output_dir (`str` or `Path`):
            Folder that holds `checkpoint-<step>` folders.

    Returns:
        `tuple[str | None, list[str]]`: Its path, and the newer ones passed over because they are incomplete.
    """
    pattern = re.compile(r"checkpoint-(\d+)$")
    steps = {}
    for path in Path(output_dir).glob("checkpoint-*"):
        match = pattern.match(path.name)
        if match and path.is_dir():
            steps[int(match.group(1))] = path
    skipped: list[str] = []
    for step in sorted(steps, reverse=True):
        if is_complete(steps[step]):
            return str(steps[step]), skipped
        skipped.append(str(steps[step]))
    return None, skipped


def next_batch(
    position: dict[str, Any], epoch_steps: float, *, batches_per_step: int, finished: bool
) -> tuple[int, int, bool]:
    """
    Where a resumed run goes on in its data.

    Args:
        position (`dict`):
            What the checkpoint says: `epoch` and the `batches` used of it, whether the epoch's end was told (`ended`)
            and whether training was about to stop (`stopped`).
        epoch_steps (`float`):
            Optimiser steps of a whole epoch; infinite where only reading on will tell.
        batches_per_step (`int`):
            Batches of a step; the last one of an epoch may have fewer.
        finished (`bool`):
            Whether the run has no further step.

    Returns:
        `tuple[int, int, bool]`: Epoch, batches of it to skip, and whether the end of the checkpoint's epoch is still
        to be told.
    """
    epoch, batches = position["epoch"], position["batches"]
    whole = math.ceil(batches / batches_per_step) >= epoch_steps
    owes_end = not position["ended"] and (whole or finished)
    # An epoch may also be ended early, by a callback; where training was to stop, that was no end of the data.
    ended = whole or (position["ended"] and not position["stopped"])
    return (epoch, batches, owes_end) if finished or not ended else (epoch + 1, 0, owes_end)


def path_inside(folder: str | Path, name: str, *, field: str, suffix: str = ".jsonl") -> Path:
    """
    Resolve a path from a configuration against the output folder.

    Args:
        folder (`str` or `Path`):
            The output folder.
        name (`str`):
            Path relative to it.
        field (`str`):
            The configuration field, for the error message.
        suffix (`str`, *optional*, defaults to `".jsonl"`):
            How the name must end; nothing else in the folder ends like that. Empty for a folder, whose name has no
            dot.

    Returns:
        `Path`: The absolute path.

    Raises:
        ValueError: If the path leaves the output folder, or is a name that something else there may have.
    """
    root = Path(folder).resolve()
    path = (root / name).resolve()
    if not path.is_relative_to(root) or path == root:
        raise ValueError(f"`{field}={name!r}` must name a file inside `output_dir` ({folder}).")
    if path.suffix != suffix:
        wanted = f"end in {suffix}" if suffix else "be the name of a folder, without a dot"
        raise ValueError(f"`{field}={name!r}` must {wanted}: the model and its checkpoints have the other names.")
    first = path.relative_to(root).parts[0]
    if first.startswith(("checkpoint-", "_")):
        raise ValueError(f"`{field}={name!r}`: {first!r} is the name of a folder of checkpoints or of an earlier run.")
    return path


def set_aside(folder: str | Path, files: Iterable[Path]) -> Path | None:
    """
    Move files of an earlier run into a folder of their own, under the names they had.

    Args:
        folder (`str` or `Path`):
            The output folder.
        files (`Iterable[Path]`):
            Files in it; those that are no longer there are left out.

    Returns:
        `Path` or `None`: The folder `_earlier-<number>` that they are in now; `None` where there was nothing to move.
            Names with an underscore are not published.
    """
    found = [path for path in files if path.is_file()]
    if not found:
        return None
    number = 1
    while (target := Path(folder) / EARLIER.format(number=number)).exists():
        number += 1
    for path in found:
        moved = target / path.relative_to(folder)
        moved.parent.mkdir(parents=True, exist_ok=True)
        path.rename(moved)
    return target
