"""Tools that are watched: how many calls of a batch were answered, and how many were not."""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def fits(signature: inspect.Signature, *args: Any, **kwargs: Any) -> bool:
    """Whether a tool can be called so. If not, the call itself says best what is wrong, as it does with GRPO."""
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


class ToolWatch:
    """Counts tool calls; one is unanswered if it raised an `OSError`, as connections and timeouts do. Other exceptions
    may answer a mistake of the model; a call that does not fit the tool's signature is one, and is not counted."""

    def __init__(self) -> None:
        self.calls = self.unanswered = 0
        self.last_error: OSError | None = None

    def reset(self) -> None:
        """Begin a new count; the last error is kept."""
        self.calls = self.unanswered = 0

    def watched(self, tool: Callable) -> Callable:
        """A tool that counts, with the same name, signature and documentation."""
        signature = inspect.signature(tool)

        @contextmanager
        def counted(args: tuple, kwargs: dict[str, Any]) -> Iterator[None]:
            self.calls += fits(signature, *args, **kwargs)
            try:
                yield
            except OSError as error:
                self.unanswered += 1
                self.last_error = error
                raise

        @functools.wraps(tool)
        def call(*args: Any, **kwargs: Any) -> Any:
            with counted(args, kwargs):
                return tool(*args, **kwargs)

        @functools.wraps(tool)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            with counted(args, kwargs):
                return await tool(*args, **kwargs)

        return call_async if inspect.iscoroutinefunction(tool) else call
