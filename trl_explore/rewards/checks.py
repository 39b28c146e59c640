"""Mistakes of reward functions, told in one sentence that names the function."""

import functools
import inspect
import reprlib
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class RewardError(ValueError):
    """A reward function does not do what TRL asks of one; the message names it."""


def checked(func: Callable[..., Any], name: str, *, tell: bool = False) -> Callable[..., Any]:
    """The function, explaining by a [`RewardError`] what is wrong with it; `tell`: also what it raises itself."""

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

    chosen: Any = call_async if is_async(func) else call
    chosen.__name__ = name  # callable objects have none
    return chosen


def is_async(func: Callable[..., Any]) -> bool:
    """Return whether a call of a reward function returns a coroutine; it may be an object with `async __call__`."""
    while isinstance(func, functools.partial):
        func = func.func
    return inspect.iscoroutinefunction(func) or inspect.iscoroutinefunction(type(func).__call__)


def check_rewards(rewards: Any, name: str, num_completions: int) -> list[Any]:
    """The rewards as a list; a [`RewardError`] if they are not one number or `None` per completion."""
    expected = f"it must return a list of {num_completions} numbers, one per completion, None where it has no opinion"
    start = f"The reward function {name!r} returned"
    try:
        found = None if isinstance(rewards, str | bytes | dict) else list(rewards)
    except TypeError:  # nothing that can be counted: None, a number
        found = None
    if found is None:
        kind = "" if rewards is None else f"{type(rewards).__name__} "
        raise RewardError(f"{start} {kind}{reprlib.repr(rewards)}; {expected}.")
    if len(found) != num_completions:
        raise RewardError(f"{start} {len(found)} rewards for {num_completions} completions; {expected}.")
    for place, reward in enumerate(found):
        if not (reward is None or _is_number(reward)):
            kind = type(reward).__name__
            raise RewardError(f"{start} {kind} {reprlib.repr(reward)} for completion {place}; {expected}.")
    return found


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError, RuntimeError):  # a list; some text; a tensor of several numbers
        return False
    return not isinstance(value, str | bytes)


def _check_arguments(func: Callable[..., Any], name: str, columns: dict[str, Any]) -> None:
    try:
        signature = inspect.signature(func)
    except (TypeError, ValueError):  # some functions that are written in C have none
        return
    try:
        signature.bind(**columns)
    except TypeError as error:
        raise RewardError(
            f"The reward function {name!r} cannot be called: {error}. It is given {', '.join(columns)}: rename a "
            "column of the data to what the function asks for, and let it take **kwargs."
        ) from error


@contextmanager
def _explained(name: str, *, tell: bool) -> Iterator[None]:
    try:
        yield
    except RewardError:  # of a function that is checked already
        raise
    except Exception as error:  # the user's code may raise anything
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
        # Where its own file was left: deeper frames are those of libraries.
        own = [frame for frame in frames if frame.filename == frames[0].filename]
        place = f" in {Path(own[-1].filename).name}, line {own[-1].lineno}" if own else ""
        sentence = f"The reward function {name!r} raised {type(error).__name__}{place}: {error}"
        if tell:
            raise RewardError(sentence) from error
        error.add_note(sentence)
        raise
