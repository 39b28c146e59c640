"""Describe what a run leaves in its output folder: files, tables, and the state in its checkpoints."""

import math
import re

import pandas as pd
import torch
from recorder import digest, number

DECIMAL = re.compile(r"-?\d+(?:\.\d+(?:[eE][-+]?\d+)?|[eE][-+]?\d+)")
# Keys of a state that always come together, with their types.
BUNDLES = {
    "rows": {
        ".completion_ids": "int64:2d",
        ".completion_mask": "int64:2d",
        ".num_items_in_batch": "int64:0d",
        ".prompt_ids": "int64:2d",
        ".prompt_mask": "int64:2d",
    },
    "totals": {".num_batch_tokens": "None", ".num_rows": "int", ".num_tokens": "int"},
    "calls": {
        ".name": "str",
        ".tool_calls[].function.arguments.direction": "str",
        ".tool_calls[].function.name": "str",
        ".tool_calls[].type": "str",
    },
    "messages": {".content": "str", ".role": "str"},
    "texts": {".advantages[]": "float", ".completion[]": "str", ".prompt[]": "str"},
    "dialogs": {
        ".advantages[]": "float",
        ".completion[][].calls": "all",
        ".completion[][].messages": "all",
        ".prompt[][].messages": "all",
    },
    "places": {".parent[]": "int", ".prefix_characters[]": "int", ".prefix_tokens[]": "int"},
    "places_or_none": {".parent[]": "float", ".prefix_characters[]": "float", ".prefix_tokens[]": "float"},
}
TEXTS = {".json", ".jsonl", ".parquet"}  # of a method or of TRL, with nothing that depends on the machine


def files_of(folder):
    """
    Return the files below a folder with a description.

    Files of all checkpoints are named once, below `checkpoint-*`. Each column of a table is an entry of its own.
    """
    found, checkpoints, in_checkpoints = {}, sorted(folder.glob("checkpoint-*")), {}
    for checkpoint in checkpoints:
        for path in checkpoint.rglob("*"):
            if path.is_file():
                in_checkpoints.setdefault(path.relative_to(checkpoint).as_posix(), []).append(checkpoint.name)
    for name, having in in_checkpoints.items():
        places = ["checkpoint-*"] if len(having) == len(checkpoints) else having
        found.update({f"{place}/{name}": "" for place in places})
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_dir() or name.startswith("checkpoint-"):
            continue
        found[name] = ""
        if path.suffix in TEXTS:
            found[name] = description(path)
        if path.suffix == ".parquet":
            found.update({f"columns/{column}": "" for column in pd.read_parquet(path).columns})
    found["checkpoints"] = str(len(checkpoints))
    return found


def description(path):
    """Return the number of lines of a text, or of rows of a table, with a hash without decimal numbers, and a sum of
    these that changes if they change places."""
    if path.suffix == ".parquet":
        text = pd.read_parquet(path).to_json(orient="records", lines=True)
    else:
        text = path.read_text()
    total = sum(float(found) * math.cos(place) for place, found in enumerate(DECIMAL.findall(text)))
    return f"{len(text.splitlines())}:{digest(DECIMAL.sub('.', text))}:{number(total)}"


def states_of(folder, rank):
    """Return the keys of one process's state over all checkpoints, each with the types of its values."""
    kinds = {}
    for path in sorted(folder.glob(f"checkpoint-*/explore_state_{rank}.pt")):
        for key, kind in leaves(torch.load(path, weights_only=True)):
            kinds.setdefault(key, set()).add(kind)
    found = {}
    for key, of_key in kinds.items():
        holds_more = any(other.startswith((f"{key}.", f"{key}[]")) for other in kinds)
        if holds_more:  # an empty list is no news where another is not empty
            of_key = of_key - {"list", "dict"}
        if of_key:
            found[key] = "|".join(sorted(of_key))
    return bundled(found)


def bundled(kinds):
    """Return the keys of a state, with one key `PARENT.BUNDLE` for those of each of the [`BUNDLES`]."""
    found = dict(kinds)
    for name, bundle in BUNDLES.items():
        for key in kinds:
            parent = key.removesuffix(next(iter(bundle)))
            members = {f"{parent}{leaf}": kind for leaf, kind in bundle.items()}
            if key != parent and members.items() <= found.items():
                found = {other: kind for other, kind in found.items() if other not in members}
                found[f"{parent}.{name}"] = "all"
    return found


def leaves(value, path=""):
    """Yield the keys in nested values that hold no further ones, with the type of their value."""
    match value:
        case dict() if value:
            for key, inner in value.items():
                yield from leaves(inner, f"{path}.{key}".lstrip("."))
        case list() | tuple() if value:
            for inner in value:
                yield from leaves(inner, f"{path}[]")
        case torch.Tensor():
            yield path, f"{value.dtype}:{value.ndim}d".removeprefix("torch.")
        case None:
            yield path, "None"
        case _:
            yield path, type(value).__name__
