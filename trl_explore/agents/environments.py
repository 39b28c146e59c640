"""Guarded environments: an exception in an environment ends its trajectory, and not the run.

TRL offers every public method of an environment to the model as a tool, except `reset` and `get_reward`. A call that
does not fit the tool's signature is a mistake of the model. TRL shows the error to the model, and the trajectory goes
on.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from trl_explore.agents.outages import may_be_mistake
from trl_explore.agents.snapshots import OWN, has_own_snapshots, not_a_tool
from trl_explore.agents.watch import fits

ERROR = "_trl_explore_error"
FAILED_METHOD = "_trl_explore_failed_method"
FALLBACKS = {"reset": None, "get_reward": 0.0}  # values that a failed call returns instead of raising
# True while a guarded call runs. Calls that the environment makes to its own methods in this time are not guarded.
_inside: ContextVar[bool] = ContextVar("inside an environment", default=False)


def guarded(factory: Callable[[], Any]) -> Callable[[], Any]:
    """
    Return a factory that makes the same environments, but guarded.

    A guarded environment stores its first exception, see [`environment_error`]. Its `reset` and `get_reward` no longer
    raise: they return no observation, and a reward of 0. Its tools still raise, and TRL shows the error to the model.
    The class of the environments stays the same.

    The factory raises TypeError if an environment cannot have new attributes.
    """

    @functools.wraps(factory)
    def make() -> Any:
        environment = factory()
        try:
            guard(environment)
        except (TypeError, AttributeError) as error:
            raise TypeError(
                f"`environment_factory` made a {type(environment).__name__} that cannot carry an attribute ({error}): "
                "make it an ordinary class, without `__slots__`."
            ) from error
        return environment

    return make


def guard(environment: Any) -> None:
    """Guard an environment, see [`guarded`]. If it is guarded already, it keeps its stored exception."""
    if ERROR not in vars(environment):
        setattr(environment, ERROR, None)
        setattr(environment, FAILED_METHOD, "")
    kind: Any = type(environment)
    _guard_class(kind)


def environment_error(environment: Any) -> BaseException | None:
    """Return the first exception of a [`guarded`] environment since its last `reset`, or None."""
    return getattr(environment, ERROR, None)


def note_error(environment: Any, error: BaseException, method: str) -> None:
    """Store an exception that `method` of a [`guarded`] environment raised, unless the environment has one already."""
    if environment_error(environment) is None:
        setattr(environment, ERROR, error)
        setattr(environment, FAILED_METHOD, method)


def model_may_have_failed(environment: Any) -> bool:
    """Return whether the model may have caused the exception of a [`guarded`] environment: by a wrong tool call, or by
    a state in which `get_reward` fails, for example without any move. The model has no influence on `reset`."""
    error = environment_error(environment)
    method = getattr(environment, FAILED_METHOD, "")
    return error is not None and method != "reset" and may_be_mistake(error)


# Replace the methods of the class itself. With a subclass, an environment would not have the user's type, which TRL
# and reward functions compare. With methods in the instance, a deep copy would contain methods that are bound to the
# original environment.
@functools.cache
def _guard_class(cls: Any) -> None:
    """Guard the methods of a class."""
    hidden = OWN if has_own_snapshots(cls) else ()
    for name, method in inspect.getmembers(cls, inspect.isfunction):
        if isinstance(inspect.getattr_static(cls, name), staticmethod):
            continue
        function: Callable = method
        if name not in vars(cls):
            function = _inherited(cls, name, method)
        if name in hidden:
            setattr(cls, name, not_a_tool(function))
        elif not name.startswith("_"):
            setattr(cls, name, _guarded_method(name, function))


def _inherited(cls: type, name: str, method: Callable) -> Callable:
    """Return a function that looks up an inherited method at each call, because a subclass of `cls` may have another
    base class that overrides it."""

    @functools.wraps(method)
    def call(self, *args, **kwargs):
        return getattr(super(cls, self), name)(*args, **kwargs)

    @functools.wraps(method)
    async def call_async(self, *args, **kwargs):
        return await getattr(super(cls, self), name)(*args, **kwargs)

    return call_async if inspect.iscoroutinefunction(method) else call


def _guarded_method(name: str, method: Callable) -> Callable:
    """Return a method that stores the exceptions of `method` in the environment."""
    signature = inspect.signature(method)

    def begin_call(self: Any) -> bool:
        """Prepare a call of the method. Return False if the method must not be called, because the environment has
        failed and gets no reward."""
        if name == "reset":
            setattr(self, ERROR, None)
        return name != "get_reward" or environment_error(self) is None

    def is_unguarded(self: Any, args: tuple, kwargs: dict) -> bool:
        """Return whether exceptions of a call are not stored."""
        # An environment may catch the exceptions of its own methods. So guard only calls from outside.
        if _inside.get() or ERROR not in vars(self):
            return True
        # A tool call that does not fit the signature is a mistake of the model.
        return name not in FALLBACKS and not fits(signature, self, *args, **kwargs)

    @functools.wraps(method)
    def call(self, *args, **kwargs):
        if is_unguarded(self, args, kwargs):
            return method(self, *args, **kwargs)
        if begin_call(self):
            with _recorded(self, name):
                return method(self, *args, **kwargs)
        return FALLBACKS[name]  # the method was not called, or `_recorded` has caught its exception

    @functools.wraps(method)
    async def call_async(self, *args, **kwargs):
        if is_unguarded(self, args, kwargs):
            return await method(self, *args, **kwargs)
        if begin_call(self):
            with _recorded(self, name):
                return await method(self, *args, **kwargs)
        return FALLBACKS[name]  # the method was not called, or `_recorded` has caught its exception

    return call_async if inspect.iscoroutinefunction(method) else call


@contextmanager
def _recorded(environment: Any, name: str) -> Iterator[None]:
    """Store an exception that a call of method `name` raises. Raise it again unless the method has a fallback."""
    token = _inside.set(True)
    try:
        yield
    except Exception as error:
        note_error(environment, error, name)
        if name not in FALLBACKS:
            raise
    finally:
        _inside.reset(token)
