"""Names: error messages with the nearest known name, import paths of a user's objects, and help texts of fields."""

import difflib
import functools
import importlib
import inspect
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

T = TypeVar("T", bound=type)
# Entry of a docstring under `Args:`: a name, its type in brackets, and indented lines with the description.
ENTRY = re.compile(r"^ {4}(\w+) \((.+)\):\n((?: {8}.+\n?)+)", re.MULTILINE)
# Markup that help texts leave out: a link such as [`~trl.GRPOConfig`], of which the last name is kept, or a backtick.
MARKUP = re.compile(r"\[`~?(?:\w+\.)*(\w+)`\]|`")
# Usual names of the column with the questions, in many data sets. The most frequent name comes first.
QUESTION_COLUMNS = ("prompts", "question", "problem", "instruction", "query", "input", "text", "task", "goal")
CONVERSATION_COLUMNS = ("messages", "conversation", "conversations")
# Usual names of columns with answers. They are never prompts.
ANSWER_COLUMNS = ("answer", "answers", "solution", "completion", "response", "output", "label", "id", "index")

# Builder that `datasets.load_dataset` uses for each kind of file.
FILE_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


def looks_like_path(name: str) -> bool:
    """Return whether a name can only be a path, and not a repository of the Hub (`name` or `owner/name`)."""
    return name.startswith((".", "/", "~")) or "\\" in name or name.count("/") > 1 or Path(name).suffix in FILE_FORMATS


def is_import_path(name: str) -> bool:
    """Return whether a name is an import path, `my_module.MyTrainer` or `my_module:MyTrainer`."""
    return "." in name or ":" in name


def import_named(
    field: str, path: str, kind: str, is_one: Callable[[Any], bool], *, fits: Callable[[Any], bool] = callable
) -> tuple[str, Any]:
    """
    Import an object of a user, such as a function or a class.

    Args:
        field (`str`):
            The argument that holds the path, for error messages.
        path (`str`):
            Import path, `my_module.name` or `my_module:name`.
        kind (`str`):
            `"function"`, `"class"` or `"task"`, for error messages.
        is_one (`Callable`):
            Returns whether an object is of this kind. If the module has no object `name` that is accepted, the error
            message lists or suggests the module's objects of this kind.
        fits (`Callable`, *optional*, defaults to `callable`):
            Returns whether the found object is accepted. Called with None if the module has no object `name`.

    Returns:
        `tuple[str, Any]`: The path as `my_module:name`, and the object.

    Raises:
        ValueError: If the module cannot be imported, or has no such object.
    """
    module_name, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    if os.getcwd() not in sys.path:  # installed commands, unlike scripts, do not see the working directory
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the user's module may raise anything at import
        raise ValueError(
            f"{field}: {path!r}: importing {module_name!r} failed ({type(error).__name__}: {error}); install it "
            f"or run from the folder that holds it (now {os.getcwd()})"
        ) from error
    found = getattr(module, name, None)  # not from the module's dictionary, because packages may load names lazily
    if not fits(found):
        known = [member for member, _ in inspect.getmembers(module, is_one)]
        problem = unknown_name(kind, name, known) if known else f"it has no {kind}."
        place = getattr(module, "__file__", None) or module_name
        raise ValueError(f"{field}: {path!r}: {problem} Imported from {place}")
    return f"{module_name}:{name}", found


def shown(value: Any) -> Any:
    """Return the value of a field with functions replaced by their import paths."""
    if isinstance(value, list | tuple):
        return [shown(one) for one in value]
    if isinstance(value, functools.partial):
        return f"partial of {shown(value.func)}"
    if callable(value):
        module = getattr(value, "__module__", type(value).__module__)
        name = getattr(value, "__qualname__", type(value).__qualname__)
        return f"{module}:{name}"
    return value


def unknown_name(kind: str, name: str, choices: Iterable[str]) -> str:
    """Return the message for an unknown name. It suggests the nearest choice, or lists the choices if they are few."""
    known = sorted(choices)
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f"unknown {kind} {name!r}; did you mean {near[0]!r}?"
    if 0 < len(known) <= 20:
        return f"unknown {kind} {name!r}; choose one of {', '.join(known)}."
    return f"unknown {kind} {name!r}."


def prompt_change(columns: Sequence[str]) -> str:
    """
    Return the code of a call that gives a data set the column `prompt`. Error messages show it after the name of the
    data set.

    Args:
        columns (`Sequence[str]`):
            Names of the data set's columns, none of them `prompt`.

    Returns:
        `str`: `.rename_column("question", "prompt")` with the likeliest column. For conversations, `.map(...)` that
        keeps all messages but the last one, which is the answer.
    """
    by_name = {column.lower(): column for column in reversed(columns)}  # reversed, so that the first of equals is kept
    for name in QUESTION_COLUMNS:
        if name in by_name:
            return _renaming(by_name[name])
    for name in CONVERSATION_COLUMNS:
        if name in by_name:
            return f'.map(lambda row: {{"prompt": row[{json.dumps(by_name[name])}][:-1]}})'
    for name in QUESTION_COLUMNS:
        for column in columns:
            if name.rstrip("s") in column.lower():
                return _renaming(column)
    others = [column for column in columns if column.lower() not in ANSWER_COLUMNS]
    return _renaming([*others, *columns][0])


def _renaming(column: str) -> str:
    return f'.rename_column({json.dumps(column)}, "prompt")'


def field_entries(docstring: str) -> dict[str, tuple[str, str]]:
    """Return the type in brackets and the description, in one line, of each field that a docstring without indentation
    lists under `Args:`."""
    entries = {}
    for name, brackets, text in ENTRY.findall(docstring):
        entries[name] = brackets, " ".join(text.split())
    return entries


def explain_fields(cls: T) -> T:
    """
    Decorator for a dataclass whose docstring lists its own fields under `Args:`.

    The description of a field becomes its help on the command line. The error about an unknown keyword names the
    nearest field.
    """
    init: Callable[..., None] = cls.__init__  # type: ignore[misc]
    names = {f.name for f in fields(cls) if f.init}
    entries = field_entries(inspect.cleandoc(cls.__doc__ or ""))
    for f in fields(cls):
        if f.name in cls.__annotations__:
            text = MARKUP.sub(r"\1", entries.get(f.name, ("", ""))[1])
            escaped = text.replace("%", "%%")  # argparse formats help texts with the operator %
            f.metadata = MappingProxyType({"help": escaped, **f.metadata})

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs.keys() - names:
            raise TypeError(f"{cls.__name__}: {unknown_name('field', name, names)}")
        init(self, *args, **kwargs)

    cls.__init__ = checked  # type: ignore[misc]
    return cls


def program_name() -> str:
    """Return the word that starts `trl-explore` in a shell: its path if the shell does not find its name."""
    path = sys.argv[0]
    if Path(path).stem == "trl-explore" and shutil.which("trl-explore") is None:
        return path
    return "trl-explore"
