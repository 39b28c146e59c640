"""Reader for files of dumped trees, with errors that name the line and the wrong field."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_Types = tuple[type, ...]
_NUMBER: _Types = (int, float)
_OPTIONAL_NUMBER: _Types = (int, float, type(None))
# Fields of a dumped tree that the views read. Other fields are not checked.
_TREE_FIELDS: dict[str, _Types] = {
    "step": (int,),
    "index": (int,),
    "prompt": (str,),
    "prompt_tokens": (int,),
    "iterations": (int,),
    "generated_tokens": (int,),
    "success_ratio": _OPTIONAL_NUMBER,
    "reason": (str,),
    "baseline": _OPTIONAL_NUMBER,
    "nodes": (list,),
}
_NODE_FIELDS: dict[str, _Types] = {
    "parent": (int, type(None)),
    "text": (str,),
    "tokens": (int,),
    "visits": (int,),
    "value": _NUMBER,
    "q": _NUMBER,
    "credit": _OPTIONAL_NUMBER,
    "entropy": _OPTIONAL_NUMBER,
    "terminal": (bool,),
    "finished": (bool,),
    "direct": (bool,),
    "outcome": _OPTIONAL_NUMBER,
    "reward": _OPTIONAL_NUMBER,
    "rewards": (list, type(None)),
    "iteration": (int,),
    "result": (int, type(None)),
}
_NEWER_NODE_FIELDS: dict[str, _Types] = {"worth": _OPTIONAL_NUMBER}  # older dumps do not have them


def read_trees(path: str | Path) -> Iterator[dict[str, Any]]:
    """
    Read the trees that a trainer dumped.

    Args:
        path (`str` or `Path`):
            File with one tree per line, as JSON. The last line may be incomplete, and is then ignored.

    Yields:
        `dict[str, Any]`: A tree.

    Raises:
        `ValueError`: If a complete line is not a tree. The message has its number, counted from 1.
    """
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:  # RecursionError: too deeply nested brackets
                if not line.endswith(b"\n"):  # the trainer is still writing the last line, or was interrupted
                    return
                raise ValueError(f"line {number} is not JSON ({error})") from error
            problem = _problem_with(record)
            if problem:
                raise ValueError(f"line {number} is not a dumped tree: {problem}")
            yield record


def _problem_with(record: Any) -> str | None:
    """Describe the first reason why `record` is not a dumped tree, or return None."""
    problem = _wrong_field(record, _TREE_FIELDS)
    if problem:
        return problem
    if not record["nodes"]:
        return "it has no nodes"
    for index, node in enumerate(record["nodes"]):
        problem = _wrong_field(node, _NODE_FIELDS)
        for name, types in _NEWER_NODE_FIELDS.items():
            if not problem and name in node:
                problem = _wrong_field(node, {name: types})
        if problem:
            return f"node {index}: {problem}"
        for reward in node["rewards"] or []:
            if not isinstance(reward, _OPTIONAL_NUMBER):
                return f"node {index}: 'rewards' cannot hold a {type(reward).__name__}"
        parent = node["parent"]
        is_valid = parent is not None and 0 <= parent < index
        if index == 0:
            is_valid = parent is None
        if not is_valid:
            return f"node {index}: 'parent' is {parent}; node 0 has none, and others come after theirs"
    return None


def _wrong_field(record: Any, fields: dict[str, _Types]) -> str | None:
    """Describe the first field of `record` that is missing or has a wrong type, or return None."""
    if not isinstance(record, dict):
        return f"a {type(record).__name__} instead of an object"
    for name, types in fields.items():
        if name not in record:
            return f"{name!r} is missing"
        # In Python, a bool is also an int.
        if not isinstance(record[name], types) or (isinstance(record[name], bool) and bool not in types):
            return f"{name!r} cannot be a {type(record[name]).__name__}"
    return None
