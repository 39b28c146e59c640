"""TRL's tool loop as the parts for agents see it: its attributes on the trainer, under plain names."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class TrainerToolLoop:
    """
    Implements [`~trl_explore.agents.turns.World`] for a trainer.

    Args:
        trainer ([`~trl.GRPOTrainer`]):
            The trainer.
        loop (`Callable`):
            TRL's `_tool_call_loop`, which runs after the first turn of each row.
        encode_answers (`Callable`):
            TRL's `_get_tool_suffix_ids`: the tokens between two turns of the assistant.
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
        """Return the tools of all rows."""
        return self._trainer.tools

    @property
    def environments(self) -> list[Any] | None:
        """Return the environment of each row, `[B]`. None without environments."""
        return self._trainer.environments

    @property
    def factories(self) -> dict[Any, Callable[[], Any]] | None:
        """Return the factories of environments by name. None without environments."""
        return self._trainer.environment_factories

    @property
    def pool(self) -> dict[Any, list[Any]]:
        """Return all environments that were made, by name."""
        return self._trainer._environment_pool

    @property
    def names(self) -> list[Any]:
        """Return the name of each row's environment, `[B]`."""
        return self._trainer._batch_environments

    @property
    def several(self) -> bool:
        """Return whether there are environments of several names."""
        return self._trainer._multi_environment

    @property
    def tools_by_name(self) -> dict[Any, list[Any]]:
        """Return the tools of each environment, by its name."""
        return self._trainer._env_tools

    @property
    def sync_tools(self) -> list[dict[str, Callable]]:
        """Return the functions that each row may call, by name, `[B]`."""
        return self._trainer._sync_tool_dicts

    @property
    def async_tools(self) -> list[dict[str, Callable]]:
        """Return the coroutine functions that each row may call, by name, `[B]`."""
        return self._trainer._async_tool_dicts

    @property
    def async_loop(self) -> Any:
        """Return the event loop that runs coroutines."""
        return self._trainer.async_loop

    @property
    def most_rounds(self) -> int:
        """Return the most rounds of tool calls."""
        return self._trainer.max_tool_calling_iterations

    def limit_rounds(self, number: int) -> None:
        """Let rows call tools in at most `number` rounds."""
        self._trainer.max_tool_calling_iterations = number

    def tools_of(self, row: int) -> list[Any]:
        """Return the tools that a row of the batch may call."""
        return self.tools if self.factories is None else self.tools_by_name[self.names[row]]

    def tools_by_environment(self) -> dict[Any, list[Any]]:
        """Return the tools of each environment, by its name; the name of the only one is None."""
        return {} if self.factories is None else self.tools_by_name

    @contextmanager
    def working_on(
        self,
        *,
        environments: list[Any] | None = None,
        names: list[Any] | None = None,
        sync_tools: list[dict[str, Callable]] | None = None,
        async_tools: list[dict[str, Callable]] | None = None,
    ) -> Iterator[None]:
        """Let the loop work on other rows: their environments, the names of these, and their tools. None keeps what
        the loop has."""
        given = {
            "environments": environments,
            "_batch_environments": names,
            "_sync_tool_dicts": sync_tools,
            "_async_tool_dicts": async_tools,
        }
        others = {name: value for name, value in given.items() if value is not None}
        attributes = vars(self._trainer)
        before = {name: attributes[name] for name in others}
        attributes.update(others)
        try:
            yield
        finally:
            attributes.update(before)
