"""States of environments before the last turns of their trajectories: kept, checked, and gone on from."""

import asyncio
import copy
import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from trl_explore.agents.environments import environment_error, guard, note_error
from trl_explore.agents.outages import is_outage
from trl_explore.agents.snapshots import check_replay, choose_state, explain_wrong_state, take
from trl_explore.agents.turns import ToolLoopAccess
from trl_explore.forks.trajectories import Message, Trajectory
from trl_explore.rows.copies import own_copy
from trl_explore.rows.policy import Policy

CHECKED_ROWS = 8  # trajectories on which a tool has to answer as before until its environment's states are trusted


class KeptStates:
    """Environments of a batch before each row's last `num_turns` turns; `wanted` as in
    [`~trl_explore.agents.snapshots.choose_state`]."""

    def __init__(self, policy: Policy, tool_loop: ToolLoopAccess, *, wanted: str, num_turns: int) -> None:
        self.policy, self.tool_loop, self.wanted, self.num_turns = policy, tool_loop, wanted, num_turns
        self.of_rows: list[dict[int, Any]] = []
        self.examples: list[dict[str, Any]] = []
        # By the id of an environment or of its kept copy: the object, and the row that its `reset` got. An environment
        # may draw from a list of the row, so both are copied together.
        self._rows: dict[int, tuple[Any, dict[str, Any]]] = {}
        self._kinds: dict[Any, str] = {}
        if tool_loop.factories is not None:
            self._kinds = {name: choose_state(pool[0], wanted) for name, pool in tool_loop.pool.items()}
        self._spares: dict[Any, list[Any]] = {}
        self._num_used: dict[Any, int] = {}
        self._agreed: Counter[tuple[Any, str]] = Counter()  # trajectories on which a tool answered as before
        self._checked = True  # whether the states of this batch are
        self._trusted: set[Any] = set()  # environments that are not checked any more
        self._chosen: set[Any] = set()  # environments whose kind of state is chosen after a `reset`

    def begin(self, examples: list[dict[str, Any]], given: list[dict[str, Any]], num_rows: int) -> None:
        """
        Forget the last batch: another one is about to be rolled out.

        Args:
            examples (`list[dict]`):
                Rows of the data, `[B]`.
            given (`list[dict]`):
                The same rows, as the environments got them; they may have changed lists in them.
            num_rows (`int`):
                Number of rows of this process.
        """
        self.examples, self.of_rows, self._checked = examples, [{} for _ in range(num_rows)], False
        self._rows = {id(own): (own, row) for own, row in zip(self.tool_loop.environments or [], given, strict=False)}

    def row_of(self, environment: Any) -> dict[str, Any] | None:
        """Return the row that an environment was reset with, with the changes that it made. None if unknown."""
        known = self._rows.get(id(environment))
        return None if known is None else known[1]

    def keep(self, turn: int, rows: list[int]) -> None:
        """Keep the environments of rows as they are, before a turn."""
        environments: list[Any] = self.tool_loop.environments or []
        for row in rows:
            self.of_rows[row][turn] = self.taken(row, environments[row])
            # One more than asked for: TRL drops the last response of a row that has no room for it.
            self.of_rows[row].pop(turn - self.num_turns - 1, None)

    def begin_branches(self) -> None:
        """Instances that branches had may be had by others."""
        self._num_used = {}

    def taken(self, row: int, environment: Any) -> Any:
        """The state of the environment of a row, or of a branch of it, as it is now."""
        name, auto = self.tool_loop.names[row], self.wanted == "auto"
        if auto and name not in self._chosen and environment_error(environment) is None:
            # At construction it had not been reset: what it holds since then decides what can be copied.
            self._kinds[name] = choose_state(environment, "auto")
            self._chosen.add(name)
        memo: dict[int, Any] = {}
        try:
            state = take(environment, self._kind(row), memo)
        except RuntimeError as error:
            if is_outage(error):
                note_error(environment, error, "snapshot")
                return None
            if not auto or self._kind(row) != "copy":
                raise
            self._kinds[name] = "replay"
            return None
        if self._kind(row) == "copy":
            self._copy_row(environment, state, memo)
        return state

    def _copy_row(self, environment: Any, copied: Any, memo: dict[int, Any]) -> None:
        """Copy the row of an environment for its copy, with the `memo` of that copy."""
        row = self.row_of(environment)
        if row is not None:
            self._rows[id(copied)] = copied, own_copy(row, memo)

    def method_of(self, environment: Any, function: Callable, row: int) -> Callable | None:
        """What `function` is to the environment of a main row, to another; `None` if it is no method of that row's."""
        own = self.tool_loop.environments
        if not own or not inspect.ismethod(function) or function.__self__ is not own[row]:
            return None
        return getattr(environment, function.__name__)

    def _method_named(self, environment: Any, name: str, row: int) -> Callable | None:
        function = self.tool_loop.sync_tools[row].get(name) or self.tool_loop.async_tools[row].get(name)
        return None if function is None else self.method_of(environment, function, row)

    def _kind(self, row: int) -> str:
        return self._kinds[self.tool_loop.names[row]]

    def at(self, trajectory: Trajectory, turn: int) -> Any:
        """Return an environment for a branch, in the state before a turn. If an outage prevents that, the environment
        counts as failed, and its branch is dropped."""
        row = trajectory.main_row
        kind, state = self._kind(row), trajectory.states.get(turn)
        if kind == "copy":
            memo: dict[int, Any] = {}
            environment = copy.deepcopy(state, memo)
            guard(environment)  # a `__deepcopy__` of its own may have made a new one
            self._copy_row(state, environment, memo)
            return environment
        environment = self._spare_environment(self.tool_loop.names[row])
        example = own_copy(self.examples[row])  # an environment may use up a list that `reset` gave it
        self._rows[id(environment)] = environment, example
        environment.reset(**{k: v for k, v in example.items() if k != "environment" or not self.tool_loop.several})
        if environment_error(environment) is not None:  # `reset` raised
            return environment
        if kind == "snapshot":
            try:
                environment.restore(state)
            except Exception as error:
                if not is_outage(error):
                    raise
                note_error(environment, error, "restore")
        else:
            for tool, now, then in self._recalled(environment, row, trajectory.messages_before(turn)):
                if _has_lost_service(environment):
                    break
                check_replay(environment, tool, now, then)
        return environment

    def check(self, trajectories: list[Trajectory], failed: list[bool]) -> None:
        """Ask kept states for the calls that followed them, once per batch and before its branches, when rewards are
        known: a state that is shared with its environment answers otherwise. Every process calls it."""
        if self._checked or not self.tool_loop.tools or self.tool_loop.factories is None:
            return
        self._checked = True
        wrong: dict[Any, tuple[Any, ...]] = {}
        for row in range(len(trajectories)):
            name = self.tool_loop.names[row]
            if self._kinds[name] != "replay" and name not in wrong and not failed[row]:
                difference = self._difference(row, trajectories[row])
                if difference is not None:
                    wrong[name] = difference
        names = list(self._kinds)
        found = self.policy.ranks.summed({str(i): float(name in wrong) for i, name in enumerate(names)})
        for i, name in enumerate(names):
            replaced = self.wanted == "auto" and self._kinds[name] == "copy"
            if name in wrong:
                warnings.warn(
                    explain_wrong_state(*wrong[name], kept_by=self._kinds[name], replaced=replaced), stacklevel=2
                )
            if found[str(i)]:
                if replaced:
                    self._kinds[name] = "replay"
                self._trusted.add(name)

    def _difference(self, row: int, trajectory: Trajectory) -> tuple[Any, ...] | None:
        """Environment, tool, answer and answer in the rollout where a kept state of a row answers otherwise."""
        name = self.tool_loop.names[row]
        if name in self._trusted or not trajectory.states:
            return None
        first = min(trajectory.states)
        messages = (trajectory.messages or [])[len(trajectory.messages_before(first)) :]
        if messages and messages[-1]["role"] == "assistant":
            messages = messages[:-1]  # its calls, if any, were not answered
        called = {_name_of(call) for message in messages for call in message.get("tool_calls") or []}
        own = (self.tool_loop.environments or [])[row]
        tools = {tool for tool in called if self._method_named(own, tool, row)}
        if all(self._agreed[name, tool] >= CHECKED_ROWS for tool in tools):
            return None
        for _ in range(2):  # the second time shows what the first one changed
            self._num_used = {}
            environment = self.at(trajectory, first)
            for tool, now, then in self._recalled(environment, row, messages):
                if _has_lost_service(environment):
                    return None
                if now != then:
                    return environment, tool, now, then
        self._agreed.update((name, tool) for tool in tools)
        return None

    def _spare_environment(self, name: Any) -> Any:
        """An instance that no branch of this call has; made once, and reset often."""
        pool, used = self._spares.setdefault(name, []), self._num_used.get(name, 0)
        if used == len(pool):
            pool.append(self.tool_loop.factories[name]())  # type: ignore[index]
        self._num_used[name] = used + 1
        return pool[used]

    def _recalled(self, environment: Any, row: int, messages: list[Message]) -> Iterator[tuple[str, Any, Any]]:
        """Make calls of the environment again: tool, answer now and answer then of each."""
        answers = iter(message for message in messages if message["role"] == "tool")
        waiting = self.tool_loop.async_tools[row]
        for message in messages:
            # Those that can wait are answered after the others, as in TRL's loop.
            for call in sorted(message.get("tool_calls") or [], key=lambda call: _name_of(call) in waiting):
                then, name = next(answers), _name_of(call)
                method = self._method_named(environment, name, row)
                if method is not None:  # other tools change no environment
                    yield name, self._answer(method, call["function"]["arguments"]), then["content"]

    def _answer(self, method: Callable, arguments: dict[str, Any]) -> str | list:
        try:
            answer = method(**arguments)
            if inspect.isawaitable(answer):
                answer = asyncio.run_coroutine_threadsafe(_awaited(answer), self.tool_loop.async_loop).result()
        except Exception as error:
            answer = {"error": str(error)}
        return answer if isinstance(answer, list) else str(answer)


def _has_lost_service(environment: Any) -> bool:
    """Return whether an environment failed by an outage or a timeout. Its answer then says nothing about its state,
    and its branch is dropped as that of any environment that raised."""
    error = environment_error(environment)
    return error is not None and (isinstance(error, TimeoutError) or is_outage(error))


async def _awaited(answer: Any) -> Any:
    return await answer


def _name_of(call: dict[str, Any]) -> str:
    return call["function"]["name"] if call["type"] == "function" else ""
