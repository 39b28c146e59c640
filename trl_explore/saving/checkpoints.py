"""Checkpoints: the state of each process, complete and incomplete checkpoints, and further files of a run."""

import json
import math
import os
import pickle
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
    Write the state of one process. If the write is interrupted, the previous file is unchanged.

    Args:
        state (`dict[str, Any]`):
            Values that `torch.load(weights_only=True)` can read.
        folder (`str` or `Path`):
            Folder of the checkpoint.
        rank (`int`):
            Rank of the process.
    """
    os.makedirs(folder, exist_ok=True)
    path = Path(folder) / STATE_FILE.format(rank=rank)
    with whole_file(path) as part:
        torch.save(state, part)


def load_state(folder: str | Path, *, rank: int, world_size: int) -> dict[str, Any] | None:
    """
    Read the state of one process.

    Args:
        folder (`str` or `Path`):
            Folder of the checkpoint.
        rank (`int`):
            Rank of the process.
        world_size (`int`):
            Number of processes of this run.

    Returns:
        `dict[str, Any]` or `None`: The state. None if the checkpoint was written by TRL's `GRPOTrainer`.

    Raises:
        ValueError: If another number of processes wrote the checkpoint.
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
    """Return whether a checkpoint has a readable trainer state, which is written last, and the states of all processes
    that wrote it."""
    states = sorted(Path(folder).glob(STATE_FILE.format(rank="*")))
    try:
        json.loads((Path(folder) / TRAINER_STATE).read_text())
        if not states:
            return True  # a checkpoint of TRL's `GRPOTrainer`
        # With `mmap`, this does not read the tensors of the rollouts.
        num_processes = torch.load(states[0], weights_only=True, mmap=True).get("num_processes", 1)
    except (OSError, ValueError, EOFError, RuntimeError, pickle.UnpicklingError):
        return False
    return len(states) >= num_processes


def checkpoint_folders(output_dir: str | Path) -> list[Path]:
    """Return the folders `checkpoint-<step>` in the folder of a run, newest first."""
    pattern = re.compile(r"checkpoint-(\d+)$")
    steps = {}
    for path in Path(output_dir).glob("checkpoint-*"):
        match = pattern.match(path.name)
        if match and path.is_dir():
            steps[int(match.group(1))] = path
    return [steps[step] for step in sorted(steps, reverse=True)]


def last_complete_checkpoint(output_dir: str | Path) -> tuple[str | None, list[str]]:
    """
    Find the newest complete checkpoint.

    Args:
        output_dir (`str` or `Path`):
            Folder with `checkpoint-<step>` folders.

    Returns:
        `tuple[str | None, list[str]]`: Path of the newest complete checkpoint, or None. Paths of newer, incomplete
        checkpoints.
    """
    skipped: list[str] = []
    for folder in checkpoint_folders(output_dir):
        if is_complete(folder):
            return str(folder), skipped
        skipped.append(str(folder))
    return None, skipped


def next_batch(
    position: dict[str, Any], epoch_steps: float, *, batches_per_step: int, finished: bool
) -> tuple[int, int, bool]:
    """
    Return the position in the data at which a resumed run continues.

    Args:
        position (`dict[str, Any]`):
            Position in the checkpoint: `epoch`; `batches` of the epoch that were used; `ended`, True if `on_epoch_end`
            has run; `stopped`, True if a callback asked to stop the training.
        epoch_steps (`float`):
            Number of steps of an epoch.
        batches_per_step (`int`):
            Number of batches per step.
        finished (`bool`):
            True if the training of this run is already complete.

    Returns:
        `tuple[int, int, bool]`: Epoch to continue, number of its batches to skip, and True if `on_epoch_end` must
        still run for the epoch of the checkpoint.
    """
    epoch, batches = position["epoch"], position["batches"]
    all_used = math.ceil(batches / batches_per_step) >= epoch_steps
    owes_end = not position["ended"] and (all_used or finished)
    # `on_epoch_end` also runs if a callback ends an epoch early. If the callback ended only the epoch, continue with
    # the next epoch. If it stopped the training, train the rest of the epoch's data.
    ended = all_used or (position["ended"] and not position["stopped"])
    if ended and not finished:
        return epoch + 1, 0, owes_end
    return epoch, batches, owes_end


def path_inside(folder: str | Path, name: str, *, field: str, suffix: str = ".jsonl") -> Path:
    """
    Return the path of a file or folder in the output folder.

    Args:
        folder (`str` or `Path`):
            Output folder.
        name (`str`):
            Path relative to the output folder.
        field (`str`):
            Field of the configuration that has the name, for messages.
        suffix (`str`, *optional*, defaults to `".jsonl"`):
            Ending of the name. `""` for a folder.

    Returns:
        `Path`: The path.

    Raises:
        ValueError: If the path is outside the output folder, has another ending, or is in a folder of checkpoints or
            of an earlier run.
    """
    root = Path(folder).resolve()
    path = (root / name).resolve()
    if not path.is_relative_to(root) or path == root:
        raise ValueError(f"`{field}={name!r}` must name a file inside `output_dir` ({folder}).")
    if path.suffix != suffix:
        wanted = "be the name of a folder, without a dot"
        if suffix:
            wanted = f"end in {suffix}"
        raise ValueError(f"`{field}={name!r}` must {wanted}: the model and its checkpoints use other names.")
    first = path.relative_to(root).parts[0]
    if first.startswith(("checkpoint-", "_")):
        raise ValueError(f"`{field}={name!r}`: {first!r} is the name of a folder of checkpoints or of an earlier run.")
    return path


def set_aside(folder: str | Path, files: Iterable[Path]) -> Path | None:
    """Move files of an earlier run into a new folder `_earlier-<number>`, and return it. None if no file exists."""
    found = [path for path in files if path.is_file()]
    if not found:
        return None
    target = _next_earlier(folder)
    for path in found:
        moved = target / path.relative_to(folder)
        moved.parent.mkdir(parents=True, exist_ok=True)
        path.rename(moved)
    return target


def set_aside_checkpoints(folder: str | Path) -> Path | None:
    """Move the checkpoints of an earlier run into a new folder `_earlier-<number>`, and return it. None if no
    checkpoint exists."""
    found = checkpoint_folders(folder)
    if not found:
        return None
    target = _next_earlier(folder)
    target.mkdir()
    for path in found:
        path.rename(target / path.name)
    return target


def _next_earlier(folder: str | Path) -> Path:
    """Return the first path `_earlier-<number>` that does not exist."""
    number = 1
    while (target := Path(folder) / EARLIER.format(number=number)).exists():
        number += 1
    return target
