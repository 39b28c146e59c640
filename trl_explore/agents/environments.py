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

from trl_explore.agents.outages import may_be_mistake
from trl_explore.agents.snapshots import OWN, has_own_snapshots, not_a_tool
from trl_explore.agents.watch import fits

ERROR = "_trl_explore_error"
FAILED_METHOD = "_trl_explore_failed_method"
FALLBACKS = {"reset": None, "get_reward": 0.0}  # what a failed call gives instead of raising
_inside: ContextVar[bool] = ContextVar("inside an environment", default=False)


def guarded(factory: Callable[[], Any]) -> Callable[[], Any]:
    """A factory of the same environments (their class stays as it is) that remember their first exception, see
    [`environment_error`]. `reset` and `get_reward` no longer raise: no observation, a reward of 0. A tool still does,
    and TRL shows it to the model. One that cannot carry an attribute is a TypeError."""

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
    """Let an environment remember its first exception, see [`guarded`]; one that does already keeps it."""
    if ERROR not in vars(environment):
        setattr(environment, ERROR, None)
        setattr(environment, FAILED_METHOD, "")
    kind: Any = type(environment)
    _guard_class(kind)


def environment_error(environment: Any) -> BaseException | None:
    """The first exception since the last `reset` of a [`guarded`] environment; `None` for other objects."""
    return getattr(environment, ERROR, None)


def note_error(environment: Any, error: BaseException, method: str) -> None:
    """Remember an exception of a [`guarded`] environment, unless it has raised before."""
    if environment_error(environment) is None:
        setattr(environment, ERROR, error)
        setattr(environment, FAILED_METHOD, method)


def model_may_have_failed(environment: Any) -> bool:
    """Return whether the exception of a [`guarded`] environment may be the answer to a wrong tool call. `reset` and
    `get_reward` are not called by the model."""
    error = environment_error(environment)
    method = getattr(environment, FAILED_METHOD, "")
    return error is not None and method not in FALLBACKS and may_be_mistake(error)


# The methods of the class are wrapped in place. A sub-class would not be of the user's type, which TRL and reward
# functions compare; methods bound in the instance would go into its copies and stay bound to the original there.
@functools.cache
def _guard_class(cls: Any) -> None:
    hidden = OWN if has_own_snapshots(cls) else ()
    for name, method in inspect.getmembers(cls, inspect.isfunction):
        if isinstance(inspect.getattr_static(cls, name), staticmethod):
            continue
        own = method if name in vars(cls) else _inherited(cls, name, method)
        if name in hidden:
            setattr(cls, name, not_a_tool(own))
        elif not name.startswith("_"):
            setattr(cls, name, _guarded_method(name, own))


def _inherited(cls: type, name: str, method: Callable) -> Callable:
    """A method that is looked up anew: a sub-class of `cls` may have another base class that overrides it."""

    @functools.wraps(method)
    def call(self, *args, **kwargs):
        return getattr(super(cls, self), name)(*args, **kwargs)

    @functools.wraps(method)
    async def call_async(self, *args, **kwargs):
        return await getattr(super(cls, self), name)(*args, **kwargs)

    return call_async if inspect.iscoroutinefunction(method) else call


def _guarded_method(name: str, method: Callable) -> Callable:
    signature = inspect.signature(method)

    def is_over(self: Any) -> bool:
        """Prepare a call from outside; whether there is nothing left to ask the environment."""
        if name == "reset":
            setattr(self, ERROR, None)
        return name == "get_reward" and environment_error(self) is not None

    def is_free(self: Any, args: tuple, kwargs: dict) -> bool:
        # What an environment calls itself, it may also catch itself: only the outermost call is guarded.
        return (
            _inside.get()
            or ERROR not in vars(self)
            or (name not in FALLBACKS and not fits(signature, self, *args, **kwargs))
        )

    @functools.wraps(method)
    def call(self, *args, **kwargs):
        if is_free(self, args, kwargs):
            return method(self, *args, **kwargs)
        if not is_over(self):
            with _recorded(self, name):
                return method(self, *args, **kwargs)
        return FALLBACKS[name]

    @functools.wraps(method)
    async def call_async(self, *args, **kwargs):
        if is_free(self, args, kwargs):
            return await method(self, *args, **kwargs)
        if not is_over(self):
            with _recorded(self, name):
                return await method(self, *args, **kwargs)
        return FALLBACKS[name]

    return call_async if inspect.iscoroutinefunction(method) else call


@contextmanager
def _recorded(environment: Any, name: str) -> Iterator[None]:
    token = _inside.set(True)
    try:
        yield
    except Exception as error:
        note_error(environment, error, name)
        if name not in FALLBACKS:
            raise
    finally:
        _inside.reset(token)
