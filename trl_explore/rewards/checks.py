"""Checks of reward functions, with errors in one sentence that names the function."""

import functools
import inspect
import reprlib
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


class RewardError(ValueError):
    """Raised if a reward function does not return what TRL needs. The message names the function."""


def checked(func: Callable[..., Any], name: str, *, tell: bool = False) -> Callable[..., Any]:
    """
    Wrap a reward function in checks of its arguments and its result.

    Args:
        func (`Callable`):
            Synchronous or async reward function.
        name (`str`):
            Name for messages, and `__name__` of the result.
        tell (`bool`, *optional*, defaults to `False`):
            If `True`, an exception of the function becomes a [`RewardError`] too. Otherwise the exception gets a note.

    Returns:
        `Callable`: The wrapped function, which raises a [`RewardError`] if it cannot be called with the columns, or
        does not return one number or `None` per completion.
    """

    @functools.wraps(func)
    def call(**columns: Any) -> list[Any]:
        _check_arguments(func, name, columns)
        with _explained(name, tell=tell):
            rewards = func(**columns)
        return check_rewards(rewards, name, len(columns["completions"]))

    @functools.wraps(func)
    async def call_async(**columns: Any) -> list[Any]:
        _check_arguments(func, name, columns)
        with _explained(name, tell=tell):
            rewards = await func(**columns)
        return check_rewards(rewards, name, len(columns["completions"]))

    wrapped: Any = call
    if is_async(func):
        wrapped = call_async
    wrapped.__name__ = name  # `functools.wraps` does not set it for callable objects
    return wrapped


def is_async(func: Callable[..., Any]) -> bool:
    """Return whether a function, or an object with a method `__call__`, is async."""
    while isinstance(func, functools.partial):
        func = func.func
    return inspect.iscoroutinefunction(func) or inspect.iscoroutinefunction(type(func).__call__)


def check_rewards(rewards: Any, name: str, num_completions: int) -> list[Any]:
    """
    Check the result of a reward function.

    Args:
        rewards (`Any`):
            The result.
        name (`str`):
            Name of the reward function, for messages.
        num_completions (`int`):
            Number of completions that the function was called with.

    Returns:
        `list`: The rewards.

    Raises:
        `RewardError`: If the result is not one number or `None` per completion.
    """
    expected = f"it must return a list of {num_completions} numbers, one per completion, None where it has no opinion"
    start = f"The reward function {name!r} returned"
    found = None
    if not isinstance(rewards, str | bytes | dict):
        with suppress(TypeError):  # None or a number is not iterable
            found = list(rewards)
    if found is None:
        kind = ""
        if rewards is not None:
            kind = f"{type(rewards).__name__} "
        raise RewardError(f"{start} {kind}{reprlib.repr(rewards)}; {expected}.")
    if len(found) != num_completions:
        raise RewardError(f"{start} {len(found)} rewards for {num_completions} completions; {expected}.")
    for place, reward in enumerate(found):
        if not (reward is None or _is_number(reward)):
            kind = type(reward).__name__
            raise RewardError(f"{start} {kind} {reprlib.repr(reward)} for completion {place}; {expected}.")
    return found


def _is_number(value: Any) -> bool:
    """Return whether a value is a number, or a tensor or an array of one number. A text such as "1" is none."""
    try:
        float(value)
    except (TypeError, ValueError, RuntimeError):  # raised for a list, a text, and a tensor of several numbers
        return False
    return not isinstance(value, str | bytes)


def _check_arguments(func: Callable[..., Any], name: str, columns: dict[str, Any]) -> None:
    """Raise a RewardError if a function does not accept the columns as keyword arguments."""
    try:
        signature = inspect.signature(func)
    except (TypeError, ValueError):  # some functions written in C have no signature
        return
    try:
        signature.bind(**columns)
    except TypeError as error:
        raise RewardError(
            f"The reward function {name!r} cannot be called: {error}. It is given {', '.join(columns)}: rename a "
            "column of the data to the argument that the function needs, and let it take **kwargs."
        ) from error


@contextmanager
def _explained(name: str, *, tell: bool) -> Iterator[None]:
    """Explain an exception of the function `name` in one sentence. With `tell`, raise a RewardError with the sentence
    instead. Otherwise add the sentence to the exception as a note."""
    try:
        yield
    except RewardError:  # the function was already wrapped by `checked`
        raise
    except Exception as error:  # the user's code may raise anything
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
        place = ""
        if frames:
            # Name the last line in the function's own file, because deeper frames belong to libraries.
            own = [frame for frame in frames if frame.filename == frames[0].filename]
            place = f" in {Path(own[-1].filename).name}, line {own[-1].lineno}"
        sentence = f"The reward function {name!r} raised {type(error).__name__}{place}: {error}"
        if tell:
            raise RewardError(sentence) from error
        error.add_note(sentence)
        raise
