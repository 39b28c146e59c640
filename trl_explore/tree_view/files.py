"""Reading the files of dumped trees, line by line, with an error that names what is wrong in a line."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# What the views use of a dumped tree; other fields are left alone.
_Types = tuple[type, ...]
_NUMBER: _Types = (int, float)
_OPTIONAL: _Types = (int, float, type(None))
_TREE_FIELDS: dict[str, _Types] = {
    "step": (int,),
    "index": (int,),
    "prompt": (str,),
    "prompt_tokens": (int,),
    "iterations": (int,),
    "generated_tokens": (int,),
    "success_ratio": _OPTIONAL,
    "reason": (str,),
    "baseline": _OPTIONAL,
    "nodes": (list,),
}
_NODE_FIELDS: dict[str, _Types] = {
    "parent": (int, type(None)),
    "text": (str,),
    "tokens": (int,),
    "visits": (int,),
    "value": _NUMBER,
    "q": _NUMBER,
    "credit": _OPTIONAL,
    "entropy": _OPTIONAL,
    "terminal": (bool,),
    "finished": (bool,),
    "direct": (bool,),
    "outcome": _OPTIONAL,
    "reward": _OPTIONAL,
    "rewards": (list, type(None)),
    "iteration": (int,),
    "result": (int, type(None)),
}


def read_trees(path: str | Path) -> Iterator[dict[str, Any]]:
    """The trees that a trainer dumped, one by one; a `ValueError` names a whole line that is none, counted from 1."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:  # RecursionError: brackets nested without end
                if not line.endswith(b"\n"):
                    return
                raise ValueError(f"line {number} is not JSON ({error})") from error
            problem = _problem_with(record)
            if problem:
                raise ValueError(f"line {number} is not a dumped tree: {problem}")
            yield record


def _problem_with(record: Any) -> str | None:
    problem = _wrong_field(record, _TREE_FIELDS)
    if problem or not record["nodes"]:
        return problem or "it has no nodes"
    for index, node in enumerate(record["nodes"]):
        problem = _wrong_field(node, _NODE_FIELDS)
        if problem:
            return f"node {index}: {problem}"
        for reward in node["rewards"] or []:
            if not isinstance(reward, _OPTIONAL):
                return f"node {index}: 'rewards' cannot hold a {type(reward).__name__}"
        parent = node["parent"]
        if (parent is None) != (index == 0) or (parent is not None and not 0 <= parent < index):
            return f"node {index}: 'parent' is {parent}; node 0 has none, and others come after theirs"
    return None


def _wrong_field(record: Any, fields: dict[str, _Types]) -> str | None:
    if not isinstance(record, dict):
        return f"a {type(record).__name__} instead of an object"
    for name, types in fields.items():
        if name not in record:
            return f"{name!r} is missing"
        # JSON's true is a number in Python
        if not isinstance(record[name], types) or (isinstance(record[name], bool) and bool not in types):
            return f"{name!r} cannot be a {type(record[name]).__name__}"
    return None


# ---------------------------------------------------------------------------------------------------- text and numbers
