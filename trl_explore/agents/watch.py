"""Count the tool calls of a generation batch, and among them the calls that got no answer from their service."""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from trl_explore.agents.outages import is_outage, names_address


def fits(signature: inspect.Signature, *args: Any, **kwargs: Any) -> bool:
    """Return whether arguments fit a signature."""
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


class ToolWatch:
    """
    Counts tool calls of a generation batch.

    A call lost its service if [`~trl_explore.agents.outages.is_outage`] is True for its exception. A call is
    `unanswered` if it lost its service or raised an `OSError`. It is an outage if it lost its service at an address
    that the model did not choose. All other exceptions answer a mistake of the model, so a call that raises one counts
    as answered. `calls` leaves out calls that do not fit the tool's signature, because the tool does not run.
    """

    def __init__(self) -> None:
        self.calls = self.unanswered = self.outages = 0
        self.last_error: BaseException | None = None  # of an unanswered call
        self.last_outage: BaseException | None = None

    def reset(self) -> None:
        """Begin a new count. The last errors are kept."""
        self.calls = self.unanswered = self.outages = 0

    def watched(self, tool: Callable) -> Callable:
        """Return a tool that counts its calls, with the same name, signature and documentation."""
        signature = inspect.signature(tool)

        @contextmanager
        def counted(args: tuple, kwargs: dict[str, Any]) -> Iterator[None]:
            if fits(signature, *args, **kwargs):
                self.calls += 1
            try:
                yield
            except Exception as error:
                lost = is_outage(error)
                if lost or isinstance(error, OSError):
                    self.unanswered += 1
                    self.last_error = error
                if lost and not names_address(kwargs):
                    self.outages += 1
                    self.last_outage = error
                raise

        @functools.wraps(tool)
        def call(*args: Any, **kwargs: Any) -> Any:
            with counted(args, kwargs):
                return tool(*args, **kwargs)

        @functools.wraps(tool)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            with counted(args, kwargs):
                return await tool(*args, **kwargs)

        if inspect.iscoroutinefunction(tool):
            return call_async
        return call
