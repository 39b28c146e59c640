"""Copies of data-set rows and messages, so that a reward function or an environment cannot change another row."""

import copy
import functools
import warnings
from typing import Any

# Immutable types, which need no copy.
CONSTANTS = (str, bytes, int, float, complex, bool, type(None))


def own_copy(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """
    Copy a value, including the lists and dictionaries that it contains.

    Images are shared: they are large, and reward functions only read them. Objects that cannot be copied, such as
    decoders of videos, are shared too, with one warning per type.

    Args:
        value (`Any`):
            A row of a data set, a column of it, or messages.
        memo (`dict[int, Any]`, *optional*):
            Copies that were already made, by the `id` of the original, as in [`copy.deepcopy`]. So a list that occurs
            twice in a value is one list in the copy, too.

    Returns:
        `Any`: The copy.
    """
    if isinstance(value, CONSTANTS):
        return value
    memo = {} if memo is None else memo
    if id(value) in memo:
        return memo[id(value)]
    if type(value) is dict:
        copied: Any = {}
        memo[id(value)] = copied
        for name, entry in value.items():
            copied[name] = own_copy(entry, memo)
        return copied
    if type(value) is list:
        copied = []
        memo[id(value)] = copied
        for entry in value:
            copied.append(own_copy(entry, memo))
        return copied
    if type(value).__module__.partition(".")[0] == "PIL":
        return value
    if type(value) is tuple:
        return tuple(own_copy(entry, memo) for entry in value)
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # the data set may hold any object
        _warn_of_shared(type(value).__name__)
        return value


@functools.cache
def _warn_of_shared(kind: str) -> None:
    """Warn once per type of values that cannot be copied."""
    warnings.warn(
        f"A row of the data holds a value of type {kind} that cannot be copied, so branches share it with their row. "
        "Reward functions and environments must not change it.",
        stacklevel=3,
    )
