"""Tools that are watched: how many calls of a batch were answered, and how many raised."""

import functools
import inspect
from collections.abc import Callable
from typing import Any


class ToolWatch:
    """
    Counts what becomes of the calls of tools.

    A call that does not fit a tool's signature is the model's mistake, and is not counted.
    """

    def __init__(self) -> None:
        self.calls = self.raised = 0
        self.last_error: Exception | None = None

    def reset(self) -> None:
        """Begin a new count; the last error is kept."""
        self.calls = self.raised = 0

    def watched(self, tool: Callable) -> Callable:
        """
        A tool that counts.

        Args:
            tool (`Callable`):
                Function that TRL offers to the model.

        Returns:
            `Callable`: The same with its name, signature and documentation.
        """
        signature = inspect.signature(tool)

        def note(error: Exception) -> None:
            self.raised += 1
            self.last_error = error

        @functools.wraps(tool)
        def call(*args: Any, **kwargs: Any) -> Any:
            signature.bind(*args, **kwargs)
            self.calls += 1
            try:
                return tool(*args, **kwargs)
            except Exception as error:
                note(error)
                raise

        @functools.wraps(tool)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            signature.bind(*args, **kwargs)
            self.calls += 1
            try:
                return await tool(*args, **kwargs)
            except Exception as error:
                note(error)
                raise

        return call_async if inspect.iscoroutinefunction(tool) else call
