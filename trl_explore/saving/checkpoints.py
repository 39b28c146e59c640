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
    """Write one process's state; an interrupted write leaves the old file or none."""
    os.makedirs(folder, exist_ok=True)
    path = Path(folder) / STATE_FILE.format(rank=rank)
    with whole_file(path) as part:
        torch.save(state, part)


def load_state(folder: str | Path, *, rank: int, world_size: int) -> dict[str, Any] | None:
    """Read one process's state: `None` where a plain `GRPOTrainer` made the checkpoint."""
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
    """Whether a checkpoint has its trainer state, which is written last, and the state of every process, all whole."""
    states = sorted(Path(folder).glob(STATE_FILE.format(rank="*")))
    try:
        json.loads((Path(folder) / TRAINER_STATE).read_text())
        written_by = torch.load(states[0], weights_only=True, mmap=True).get("num_processes", 1) if states else 0
    except (OSError, ValueError, EOFError, RuntimeError):
        return False
    return len(states) >= written_by


def checkpoint_folders(output_dir: str | Path) -> list[Path]:
    """Return the folders `checkpoint-<step>` in a run's folder, the newest first."""
    pattern = re.compile(r"checkpoint-(\d+)$")
    steps = {}
    for path in Path(output_dir).glob("checkpoint-*"):
        match = pattern.match(path.name)
        if match and path.is_dir():
            steps[int(match.group(1))] = path
    return [steps[step] for step in sorted(steps, reverse=True)]


def last_complete_checkpoint(output_dir: str | Path) -> tuple[str | None, list[str]]:
    """
    The newest checkpoint that is whole.

    Args:
        output_dir (`str` or `Path`):
            Folder that holds `checkpoint-<step>` folders.

    Returns:
        `tuple[str | None, list[str]]`: Its path, and the newer ones passed over because they are incomplete.
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
    """Where a run goes on: epoch, batches of it to skip, and whether the checkpoint's epoch has yet to end."""
    epoch, batches = position["epoch"], position["batches"]
    whole = math.ceil(batches / batches_per_step) >= epoch_steps
    owes_end = not position["ended"] and (whole or finished)
    # An epoch may also be ended early, by a callback; where training was to stop, that was no end of the data.
    ended = whole or (position["ended"] and not position["stopped"])
    return (epoch, batches, owes_end) if finished or not ended else (epoch + 1, 0, owes_end)


def path_inside(folder: str | Path, name: str, *, field: str, suffix: str = ".jsonl") -> Path:
    """A path inside the output folder, as the configuration's `field` names it; a `ValueError` for others."""
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
    """Move files of an earlier run into the folder `_earlier-<number>`; `None` where there are none."""
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
    """Move the checkpoints of an earlier run into the folder `_earlier-<number>`. None if there are none."""
    found = checkpoint_folders(folder)
    if not found:
        return None
    target = _next_earlier(folder)
    target.mkdir()
    for path in found:
        path.rename(target / path.name)
    return target


def _next_earlier(folder: str | Path) -> Path:
    number = 1
    while (target := Path(folder) / EARLIER.format(number=number)).exists():
        number += 1
    return target
