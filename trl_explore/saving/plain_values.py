"""Conversion of values of data sets and tables to a form that `torch.load(weights_only=True)` reads, and back."""

from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import torch

PLAIN = (type(None), bool, int, float, str, torch.Tensor)
# By the name in the file: a type, and the function that reads it from text. A time zone is read as its UTC offset.
TEXTS: dict[str, tuple[type, Callable[[str], Any]]] = {
    "date": (date, date.fromisoformat),
    "datetime": (datetime, datetime.fromisoformat),
    "time": (time, time.fromisoformat),
    "decimal": (Decimal, Decimal),
}


def to_plain(value: Any, *, other: Callable[[Any], Any] | None = None) -> Any:
    """
    Convert a value to numbers, texts, tensors, lists and dictionaries. [`from_plain`] converts it back.

    A value of another known type becomes a pair: the name of the type, such as `"date"`, and its plain content.

    Args:
        value (`Any`):
            The value.
        other (`Callable`, *optional*):
            Function that converts values of unknown types. What it returns is not converted back.

    Returns:
        `Any`: The plain value.

    Raises:
        TypeError: If a value has an unknown type and `other` is None. The message is the name of the type.
    """
    kind = type(value)
    if kind in PLAIN or (isinstance(value, torch.Tensor) and not value.requires_grad):
        return value
    if kind is list:
        return [to_plain(item, other=other) for item in value]
    if kind is dict:
        pairs = [(to_plain(key, other=other), to_plain(item, other=other)) for key, item in value.items()]
        try:
            return dict(pairs)
        except TypeError:  # the plain form of a key has a list, so it cannot be a key
            return "dict", [list(pair) for pair in pairs]
    if kind is tuple:
        return "tuple", [to_plain(item, other=other) for item in value]
    if kind is bytes:
        return "bytes", value.decode("latin-1")
    if kind is timedelta:
        return "timedelta", [value.days, value.seconds, value.microseconds]
    for name, (of_text, _) in TEXTS.items():
        if kind is of_text:
            return name, str(value)
    if isinstance(value, np.ndarray | np.generic) and value.dtype.names is None:
        form = "array"
        if isinstance(value, np.generic):
            form = "scalar"
        if value.dtype.hasobject:
            return form, ["O", list(value.shape), to_plain(value.ravel().tolist(), other=other)]
        return form, [value.dtype.str, list(value.shape), to_plain(value.tobytes())]
    if other is None:
        raise TypeError(f"{kind.__module__}.{kind.__qualname__}")
    return other(value)


def without_numpy(value: Any, *, where: str) -> Any:
    """
    Replace NumPy scalars by Python numbers and texts, in dictionaries, lists and tuples.

    `torch.save` writes NumPy values, but `torch.load(weights_only=True)` cannot read them. A run could save a
    checkpoint with NumPy values, but no run could resume from it.

    Args:
        value (`Any`):
            The value. Values of other types are kept unchanged.
        where (`str`):
            Name of the value, for error messages.

    Returns:
        `Any`: A copy without NumPy scalars.

    Raises:
        TypeError: If the value contains a NumPy array, or a NumPy scalar that is neither a number nor a text.
    """
    kind = type(value)
    if kind is dict:
        found = {}
        for key, item in value.items():
            found[without_numpy(key, where=f"a key of {where}")] = without_numpy(item, where=f"{where}[{key!r}]")
        return found
    if kind is list or kind is tuple:
        return kind(without_numpy(item, where=f"{where}[{place}]") for place, item in enumerate(value))
    if not isinstance(value, np.ndarray | np.generic):
        return value
    if isinstance(value, np.generic) and type(value.item()) in (bool, int, float, complex, str, bytes):
        return value.item()
    raise TypeError(
        f"{where} is a NumPy value of type {kind.__name__}, which a checkpoint cannot hold: store a tensor "
        "(`torch.from_numpy(array)`) or a list (`array.tolist()`) instead."
    )


def from_plain(value: Any) -> Any:
    """Convert the result of [`to_plain`] back to the original value."""
    if type(value) is list:
        return [from_plain(item) for item in value]
    if type(value) is dict:
        return {from_plain(key): from_plain(item) for key, item in value.items()}
    if type(value) is not tuple:
        return value
    name, content = value
    if name == "dict":
        return {from_plain(key): from_plain(item) for key, item in content}
    if name == "tuple":
        return tuple(from_plain(item) for item in content)
    if name == "bytes":
        return content.encode("latin-1")
    if name == "timedelta":
        return timedelta(*content)
    if name in TEXTS:
        return TEXTS[name][1](content)
    dtype, shape, items = content
    if dtype == "O":
        array = np.empty(len(items), dtype=object)
        array[:] = from_plain(items)
    else:
        array = np.frombuffer(from_plain(items), dtype=dtype).copy()
    array = array.reshape(shape)
    if name == "scalar":
        return array[()]
    return array
