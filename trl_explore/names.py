"""Errors for names that do not exist, with the nearest one that does."""

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import fields
from types import MappingProxyType
from typing import Any, TypeVar

T = TypeVar("T", bound=type)
ENTRY = re.compile(r"^ {4}(\w+) \((.+)\):\n((?: {8}.+\n?)+)", re.MULTILINE)
MARKUP = re.compile(r"\[`~?(?:\w+\.)*(\w+)`\]|`")


def unknown_name(kind: str, name: str, choices: Iterable[str]) -> str:
    """Message for a name that is none of the choices: the nearest one, or all of them where they are few."""
    known = sorted(choices)
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f"unknown {kind} {name!r}; did you mean {near[0]!r}?"
    return (
        f"unknown {kind} {name!r}; choose one of {', '.join(known)}."
        if len(known) <= 20
        else f"unknown {kind} {name!r}."
    )


def field_entries(docstring: str) -> dict[str, tuple[str, str]]:
    """Of every field that a clean docstring lists under `Args:`, what stands in brackets, and the text in one line."""
    return {name: (brackets, " ".join(text.split())) for name, brackets, text in ENTRY.findall(docstring)}


def explain_fields(cls: T) -> T:
    """
    Decorator for a dataclass whose docstring lists its own fields under `Args:`: an entry is the help of its field on
    the command line, and an unknown keyword names the nearest field instead of just failing.
    """
    init: Callable[..., None] = cls.__init__  # type: ignore[misc]
    names = {f.name for f in fields(cls) if f.init}
    entries = field_entries(inspect.cleandoc(cls.__doc__ or ""))
    for f in fields(cls):
        if f.name in cls.__annotations__:
            text = MARKUP.sub(r"\1", entries.get(f.name, ("", ""))[1])
            f.metadata = MappingProxyType({"help": text.replace("%", "%%"), **f.metadata})  # argparse formats it

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs.keys() - names:
            raise TypeError(f"{cls.__name__}: {unknown_name('field', name, names)}")
        init(self, *args, **kwargs)

    cls.__init__ = checked  # type: ignore[misc]
    return cls
