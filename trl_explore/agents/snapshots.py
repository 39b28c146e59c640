"""States of environments, to leave an episode at an earlier turn: copies, snapshots of their own, or replayed calls.

An environment may define `snapshot()`, which returns its state, and `restore(state)`, which takes it up again, on this
or another instance of its class and as often as asked; neither is then offered to the model as a tool.
"""

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

STATES = ("auto", "copy", "snapshot", "replay")
OWN = ("snapshot", "restore")


class not_a_tool:
    """A method that is neither a plain function of its class nor, as TRL asks up to 1.14, a bound one of an instance:
    those are offered to the model, all but a few names."""

    def __init__(self, function: Callable) -> None:
        self.function = function

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else partial(self.function, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def has_own_snapshots(cls: type) -> bool:
    """Whether both `snapshot` and `restore` are methods of a class."""
    found = dict(inspect.getmembers(cls))
    return all(isinstance(found.get(name), not_a_tool) or inspect.isfunction(found.get(name)) for name in OWN)


def choose_state(environment: Any, wanted: str) -> str:
    """`"snapshot"`, `"copy"` or `"replay"`: how an environment's states can be kept. ValueError if the `wanted` way is
    not possible; after a `reset` there may be more in it."""
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
    Return the state now: a copy of the environment, what its own `snapshot` returned, or None for `"replay"`.

    Args:
        environment (`Any`):
            The environment.
        kind (`str`):
            How its state is kept: `"copy"`, `"snapshot"` or `"replay"`.
        memo (`dict[int, Any]`, *optional*):
            Copies that were made, as in [`copy.deepcopy`].

    Raises:
        RuntimeError: If the state cannot be had.
    """
    if kind == "replay":
        return None
    try:
        return environment.snapshot() if kind == "snapshot" else copy.deepcopy(environment, memo)
    except Exception as error:
        raise RuntimeError(
            f"the state of a {type(environment).__name__} could not be kept ({type(error).__name__}: {error}). Define "
            "`snapshot()` and `restore(state)` in it, or set `environment_state='replay'` if its tools always answer "
            "the same."
        ) from error


def check_replay(environment: Any, tool: str, now: Any, then: Any) -> None:
    """RuntimeError if a replayed call answers otherwise than before: a branch would not share its prefix's state."""
    if now != then:
        raise RuntimeError(
            f"the tool `{tool}` of a {type(environment).__name__} answered {str(now)[:200]!r} when its call was "
            f"replayed, but {str(then)[:200]!r} in the rollout: its state cannot be reached again. Define "
            "`snapshot()` and `restore(state)` in it, make its tools answer the same again, or, if a copy of it by "
            "`copy.deepcopy` is separate and only chance decides its answers, set `environment_state='copy'`."
        )


def explain_wrong_state(environment: Any, tool: str, now: Any, then: Any, *, kept_by: str, replaced: bool) -> str:
    """A warning that an environment that went back to a turn did not answer as it had after it, and what else can be
    done; `replaced` if calls are replayed from now on."""
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
