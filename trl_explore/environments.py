"""Environments for TRL's `environment_factory` whose failures end a trajectory and not the run.

TRL offers every public method of an environment to the model as a tool, next to `reset` and `get_reward`. A call that
does not fit a tool's signature is the model's mistake and stays what TRL makes of it, an observation.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from trl_explore.snapshots import OWN, has_own_snapshots, not_a_tool

ERROR = "_trl_explore_error"
FALLBACKS = {"reset": None, "get_reward": 0.0}  # what a failed call gives instead of raising
_inside: ContextVar[bool] = ContextVar("inside an environment", default=False)


def guarded(factory: Callable[[], Any]) -> Callable[[], Any]:
    """
    Let a factory make environments that remember their first exception instead of raising it out of the trainer.

    `reset` and `get_reward` no longer raise: there is no observation, and a reward of 0. A tool still does, and TRL
    shows the message to the model. See [`environment_error`].

    Args:
        factory (`Callable`):
            What makes an environment.

    Returns:
        `Callable`: A factory of instances of a sub-class that has the same name.

    Raises:
        TypeError: By the new factory, if an environment cannot carry an attribute.
    """

    @functools.wraps(factory)
    def make() -> Any:
        environment = factory()
        try:
            kind: Any = type(environment)
            environment.__class__ = _guarded_class(kind)
            setattr(environment, ERROR, None)
        except (TypeError, AttributeError) as error:
            raise TypeError(
                f"`environment_factory` made a {type(environment).__name__} that cannot carry an attribute ({error}): "
                "make it an ordinary class, without `__slots__`."
            ) from error
        return environment

    return make


def environment_error(environment: Any) -> BaseException | None:
    """
    The exception that ended an environment's episode.

    Args:
        environment (`Any`):
            Environment made by a [`guarded`] factory, or any other object.

    Returns:
        `BaseException` or `None`: The first exception since the last `reset`.
    """
    return getattr(environment, ERROR, None)


@functools.cache
def _guarded_class(cls: Any) -> type:
    namespace: dict[str, Any] = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
    }
    hidden = OWN if has_own_snapshots(cls) else ()
    for name, method in inspect.getmembers(cls, inspect.isfunction):
        if name in hidden:
            namespace[name] = not_a_tool(method)
        elif not name.startswith("_"):
            namespace[name] = _guarded_method(name, method)
    return type(cls.__name__, (cls,), namespace)


def _guarded_method(name: str, method: Callable) -> Callable:
    signature = inspect.signature(method)

    def is_over(self: Any, args: tuple, kwargs: dict) -> bool:
        """Prepare a call from outside; whether there is nothing left to ask the environment."""
        if name == "reset":
            setattr(self, ERROR, None)
        elif name != "get_reward":
            signature.bind(self, *args, **kwargs)  # a call that does not fit raises here, unrecorded
        return name == "get_reward" and environment_error(self) is not None

    # What an environment calls itself, it may also catch itself: only the outermost call is guarded.
    @functools.wraps(method)
    def guard(self, *args, **kwargs):
        if _inside.get():
            return method(self, *args, **kwargs)
        if not is_over(self, args, kwargs):
            with _recorded(self, name):
                return method(self, *args, **kwargs)
        return FALLBACKS[name]

    @functools.wraps(method)
    async def guard_async(self, *args, **kwargs):
        if _inside.get():
            return await method(self, *args, **kwargs)
        if not is_over(self, args, kwargs):
            with _recorded(self, name):
                return await method(self, *args, **kwargs)
        return FALLBACKS[name]

    return guard_async if inspect.iscoroutinefunction(method) else guard


@contextmanager
def _recorded(environment: Any, name: str) -> Iterator[None]:
    token = _inside.set(True)
    try:
        yield
    except Exception as error:
        if environment_error(environment) is None:
            setattr(environment, ERROR, error)
        if name not in FALLBACKS:
            raise
    finally:
        _inside.reset(token)
