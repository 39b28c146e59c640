"""Errors for names that do not exist, with the nearest one that does."""

import difflib
import functools
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any, TypeVar

T = TypeVar("T", bound=type)


def unknown_name(kind: str, name: str, choices: Iterable[str]) -> str:
    """
    Message for a name that is none of the choices.

    Args:
        kind (`str`):
            What was named, for example `"method"`.
        name (`str`):
            The unknown name.
        choices (`Iterable[str]`):
            The names that exist.

    Returns:
        `str`: A sentence with the nearest name, or with all of them where none is near and they are few.
    """
    known = sorted(choices)
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f"unknown {kind} {name!r}; did you mean {near[0]!r}?"
    return (
        f"unknown {kind} {name!r}; choose one of {', '.join(known)}."
        if len(known) <= 20
        else f"unknown {kind} {name!r}."
    )


def explain_unknown_fields(cls: T) -> T:
    """
    Class decorator for a dataclass: an unknown keyword names the nearest field instead of just failing.

    Args:
        cls (`type`):
            The dataclass.

    Returns:
        `type`: The same class.
    """
    init: Callable[..., None] = cls.__init__  # type: ignore[misc]
    names = {f.name for f in fields(cls) if f.init}

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs.keys() - names:
            raise TypeError(f"{cls.__name__}: {unknown_name('field', name, names)}")
        init(self, *args, **kwargs)

    cls.__init__ = checked  # type: ignore[misc]
    return cls
