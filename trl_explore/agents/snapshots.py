"""Ways to keep the state of an environment, so that a branch can continue from an earlier turn.

- `"copy"`: a deep copy of the environment.
- `"snapshot"`: the result of the environment's own method `snapshot()`. Its method `restore(state)` must accept it on
  any instance of the class, any number of times. These two methods are not offered to the model as tools.
- `"replay"`: nothing is kept. The tool calls of the earlier turns are made again.
"""

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

STATES = ("auto", "copy", "snapshot", "replay")
OWN = ("snapshot", "restore")


class not_a_tool:
    """
    Decorator for methods of an environment that are not offered to the model.

    TRL offers the functions of the class; up to version 1.14, it offers the bound methods of the instance. An object
    of this class is neither.
    """

    def __init__(self, function: Callable) -> None:
        self.function = function

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        return partial(self.function, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def has_own_snapshots(cls: type) -> bool:
    """Return whether a class has the methods `snapshot` and `restore`."""
    members = dict(inspect.getmembers(cls))
    for name in OWN:
        method = members.get(name)
        if not (isinstance(method, not_a_tool) or inspect.isfunction(method)):
            return False
    return True


def choose_state(environment: Any, wanted: str) -> str:
    """
    Return the way to keep the states of an environment: `"snapshot"`, `"copy"` or `"replay"`.

    `wanted` is one of these, or `"auto"` for the first that is possible. ValueError if it is not possible. The result
    may differ after a `reset`, because the environment may then contain an object that cannot be copied.
    """
    name = type(environment).__name__
    if wanted == "snapshot" or (wanted == "auto" and has_own_snapshots(type(environment))):
        if not has_own_snapshots(type(environment)):
            raise ValueError(
                f"`environment_state='snapshot'`, but {name} does not define `snapshot()` and `restore(state)`: "
                "define both, or use 'auto'."
            )
        return "snapshot"
    if wanted in ("auto", "copy"):
        try:
            copy.deepcopy(environment)
            return "copy"
        except Exception as error:
            if wanted == "copy":
                raise ValueError(
                    f"`environment_state='copy'`, but {name} cannot be copied ({type(error).__name__}: {error}): "
                    "define `snapshot()` and `restore(state)` in it, or use 'replay' if its tools always answer the "
                    "same, or 'auto', which also tries to copy it after `reset`."
                ) from error
    return "replay"


def take(environment: Any, kind: str, memo: dict[int, Any] | None = None) -> Any:
    """
    Return the current state: a copy of the environment, the result of its `snapshot()`, or None for `"replay"`.

    Args:
        environment (`Any`):
            The environment.
        kind (`str`):
            Way to keep its state: `"copy"`, `"snapshot"` or `"replay"`.
        memo (`dict[int, Any]`, *optional*):
            The `memo` of [`copy.deepcopy`].

    Raises:
        RuntimeError: If the environment cannot be copied, or its `snapshot()` raises.
    """
    if kind == "replay":
        return None
    try:
        if kind == "snapshot":
            return environment.snapshot()
        return copy.deepcopy(environment, memo)
    except Exception as error:
        raise RuntimeError(
            f"the state of a {type(environment).__name__} could not be kept ({type(error).__name__}: {error}). Define "
            "`snapshot()` and `restore(state)` in it, or set `environment_state='replay'` if its tools always answer "
            "the same."
        ) from error


def check_replay(environment: Any, tool: str, now: Any, then: Any) -> None:
    """Raise RuntimeError if a replayed call of `tool` returned another answer (`now`) than in the rollout (`then`). A
    branch would begin in a wrong state."""
    if now != then:
        raise RuntimeError(
            f"the tool `{tool}` of a {type(environment).__name__} answered {str(now)[:200]!r} when its call was "
            f"replayed, but {str(then)[:200]!r} in the rollout: its state cannot be reached again. Define "
            "`snapshot()` and `restore(state)` in it, or make its tools answer the same again. If its answers differ "
            "only by chance, and `copy.deepcopy` copies all of its state, set `environment_state='copy'`."
        )


def explain_wrong_state(environment: Any, tool: str, now: Any, then: Any, *, kept_by: str, replaced: bool) -> str:
    """
    Return a warning that an environment, restored to an earlier turn, answered a call in another way than before.

    Args:
        environment (`Any`):
            The environment.
        tool (`str`):
            Name of the tool.
        now (`Any`):
            Its answer after the state was restored.
        then (`Any`):
            Its answer in the rollout.
        kept_by (`str`):
            Way in which the state was kept.
        replaced (`bool`):
            True if calls are replayed from now on.
    """
    kind = type(environment).__name__
    cause = (
        f"the tool `{tool}` of a {kind} that went back to an earlier turn by {kept_by} answered {str(now)[:200]!r}, "
        f"but {str(then)[:200]!r} in the rollout. Either some of its state lies outside of it, as in a session of a "
        "server, or its answers depend on chance. "
    )
    if replaced:
        return cause + (
            "Branches replay the calls of their prefixes instead from now on. If only chance differs, set "
            f"`environment_state='copy'`; otherwise `snapshot()` and `restore(state)` in {kind} can save the calls."
        )
    return cause + (
        "In the first case branches start from wrong states: set `environment_state='replay'`, or let `snapshot()` "
        f"and `restore(state)` of {kind} cover all of its state."
    )
