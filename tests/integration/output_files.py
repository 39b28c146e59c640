"""Describe what a run leaves in its output folder: files, tables, and the state in its checkpoints."""

import json
import math

import pandas as pd
import torch
from recorder import digest, number

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
RECORDS = {".jsonl", ".parquet"}  # endings of files with one record a row


def files_of(folder):
    """
    Return the files below a folder with a description.

    Files of all checkpoints are named once, below `checkpoint-*`. The tables of completions are one entry, with the
    description of each, and each column is an entry.
    """
    found, checkpoints, in_checkpoints = {}, sorted(folder.glob("checkpoint-*")), {}
    for checkpoint in checkpoints:
        for path in checkpoint.rglob("*"):
            if path.is_file():
                in_checkpoints.setdefault(path.relative_to(checkpoint).as_posix(), []).append(checkpoint.name)
    for name, having in in_checkpoints.items():
        places = ["checkpoint-*"] if len(having) == len(checkpoints) else having
        found.update({f"{place}/{name}": "" for place in places})
    tables = sorted(folder.glob("completions/completions_*.parquet"))
    for path in set(folder.rglob("*")) - set(tables):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and not name.startswith("checkpoint-"):
            found[name] = description(records_of(path)) if path.suffix in RECORDS else ""
    of_tables = [records_of(path) for path in tables]
    found["completions/completions_*.parquet"] = ",".join(map(description, of_tables))
    for records in of_tables:
        found.update({f"columns/{column}": "" for column in records[0]})
    found["checkpoints"] = str(len(checkpoints))
    return found


def records_of(path):
    """Return the records of a table or of a file with a JSON text a line."""
    if path.suffix == ".parquet":
        lines = pd.read_parquet(path).to_json(orient="records", lines=True).splitlines()
    else:
        lines = path.read_text().splitlines()
    return [json.loads(line) for line in lines]


def description(records):
    """Return the number of records, a hash of them without decimal numbers, and a sum of the decimal numbers that
    changes if they change places."""
    numbers = []
    others = [without_decimals(record, numbers) for record in records]
    total = sum(value * math.cos(place) for place, value in enumerate(numbers))
    return f"{len(records)}:{digest(others)}:{number(total)}"


def without_decimals(value, numbers):
    """Return nested values without decimal numbers, which are added to a list."""
    match value:
        case dict():
            return {key: without_decimals(inner, numbers) for key, inner in value.items()}
        case list():
            return [without_decimals(inner, numbers) for inner in value]
        case float():
            numbers.append(value)
            return "decimal"
    return value


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
