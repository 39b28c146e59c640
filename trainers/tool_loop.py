"""Access to TRL's tool loop under public names. TRL keeps the loop's state in private attributes of the trainer."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class TrainerToolLoop:
    """
    Implements [`~trl_explore.agents.turns.ToolLoopAccess`] for a trainer.

    Args:
        trainer ([`~trl.GRPOTrainer`]):
            The trainer.
        loop (`Callable`):
            TRL's `_tool_call_loop`. It starts after the first turn of each row.
        encode_answers (`Callable`):
            TRL's `_get_tool_suffix_ids`. It returns the tokens between two turns of the assistant: the answers of the
            tools, in the chat template.
    """

    def __init__(
        self,
        trainer: Any,
        *,
        loop: Callable[..., tuple],
        encode_answers: Callable[[list[dict[str, Any]]], list[int]],
    ) -> None:
        self._trainer = trainer
        self.loop, self.encode_answers = loop, encode_answers

    @property
    def tools(self) -> list[Any]:
        """Return every tool that some row may call."""
        return self._trainer.tools

    @property
    def environments(self) -> list[Any] | None:
        """Return the environment of each row, `[B]`. None if the trainer has no environments."""
        return self._trainer.environments

    @property
    def factories(self) -> dict[Any, Callable[[], Any]] | None:
        """Return the factories of environments, by environment name. None if the trainer has no environments."""
        return self._trainer.environment_factories

    @property
    def pool(self) -> dict[Any, list[Any]]:
        """Return all environments that TRL has made, by environment name."""
        return self._trainer._environment_pool

    @property
    def names(self) -> list[Any]:
        """Return the environment name of each row, `[B]`."""
        return self._trainer._batch_environments

    @property
    def several(self) -> bool:
        """Return whether the trainer has environments of more than one name."""
        return self._trainer._multi_environment

    @property
    def tools_by_name(self) -> dict[Any, list[Any]]:
        """Return the tools of each environment, by environment name."""
        return self._trainer._env_tools

    @property
    def sync_tools(self) -> list[dict[str, Callable]]:
        """Return the functions that each row may call, by function name, `[B]`."""
        return self._trainer._sync_tool_dicts

    @property
    def async_tools(self) -> list[dict[str, Callable]]:
        """Return the coroutine functions that each row may call, by function name, `[B]`."""
        return self._trainer._async_tool_dicts

    @property
    def async_loop(self) -> Any:
        """Return the event loop that runs coroutines."""
        return self._trainer.async_loop

    @property
    def most_rounds(self) -> int:
        """Return the maximum number of rounds of tool calls."""
        return self._trainer.max_tool_calling_iterations

    def limit_rounds(self, number: int) -> None:
        """Set the maximum number of rounds of tool calls."""
        self._trainer.max_tool_calling_iterations = number

    def tools_of(self, row: int) -> list[Any]:
        """Return the tools that a row of the batch may call."""
        if self.factories is None:
            return self.tools
        return self.tools_by_name[self.names[row]]

    def tools_by_environment(self) -> dict[Any, list[Any]]:
        """Return the tools of each environment, by environment name. The name is None if `environment_factory` is a
        single factory. Empty if the trainer has no environments."""
        if self.factories is None:
            return {}
        return self.tools_by_name

    @contextmanager
    def working_on(
        self,
        *,
        environments: list[Any] | None = None,
        names: list[Any] | None = None,
        sync_tools: list[dict[str, Callable]] | None = None,
        async_tools: list[dict[str, Callable]] | None = None,
    ) -> Iterator[None]:
        """
        Replace the rows that the loop works on, and restore them at the end.

        Args:
            environments (`list`, *optional*):
                Environment of each row. None keeps the current list, here and below.
            names (`list`, *optional*):
                Environment name of each row.
            sync_tools (`list[dict]`, *optional*):
                Functions that each row may call, by function name.
            async_tools (`list[dict]`, *optional*):
                Coroutine functions that each row may call, by function name.
        """
        arguments = {
            "environments": environments,
            "_batch_environments": names,
            "_sync_tool_dicts": sync_tools,
            "_async_tool_dicts": async_tools,
        }
        before = {}
        for name, value in arguments.items():
            if value is not None:
                before[name] = getattr(self._trainer, name)
                setattr(self._trainer, name, value)
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(self._trainer, name, value)
