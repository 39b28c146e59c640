"""Kept states of environments before the last turns of their trajectories. Branches continue from these states."""

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

CHECKED_ROWS = 8  # a tool is not checked any more after its answers agreed on this number of trajectories


class KeptStates:
    """
    Keeps the states of the environments of a batch before the last turns of each row.

    Args:
        policy ([`~trl_explore.rows.policy.Policy`]):
            The trainer.
        tool_loop ([`~trl_explore.agents.turns.ToolLoopAccess`]):
            TRL's tool loop, with its environments.
        wanted (`str`):
            Way to keep states, see [`~trl_explore.agents.snapshots.choose_state`].
        num_turns (`int`):
            Number of last turns of a row before which states are kept.
    """

    def __init__(self, policy: Policy, tool_loop: ToolLoopAccess, *, wanted: str, num_turns: int) -> None:
        self.policy, self.tool_loop, self.wanted, self.num_turns = policy, tool_loop, wanted, num_turns
        self.of_rows: list[dict[int, Any]] = []  # kept states of each row, by turn, `[B]`
        self.examples: list[dict[str, Any]] = []  # rows of the data set, `[B]`
        # Environment name of each main row, `[B]`. While branches are sampled, `tool_loop.names` has their names.
        self.names: list[Any] = []
        # For each environment and each kept copy, by id: the object, and the row that its `reset` got. An environment
        # may change lists in that row, so the row is copied together with the environment.
        self._rows: dict[int, tuple[Any, dict[str, Any]]] = {}
        self._kinds: dict[Any, str] = {}  # way in which states are kept, by environment name
        if tool_loop.factories is not None:
            self._kinds = {name: choose_state(pool[0], wanted) for name, pool in tool_loop.pool.items()}
        self._spares: dict[Any, list[Any]] = {}  # environments for branches, by environment name
        # Number of environments in `_spares` that the current call has given to branches, by environment name.
        self._num_used: dict[Any, int] = {}
        # Number of trajectories on which a tool answered as before, by names of environment and tool.
        self._agreed: Counter[tuple[Any, str]] = Counter()
        self._checked = True  # True if the states of this batch were checked
        # Names of environments that are not checked any more, because a check has found a difference and warned.
        self._reported: set[Any] = set()
        self._chosen: set[Any] = set()  # names of environments for which the kind was chosen after a `reset`

    def begin(self, examples: list[dict[str, Any]], given: list[dict[str, Any]], num_rows: int) -> None:
        """
        Forget the previous batch, and prepare for the rollout of the next one.

        Args:
            examples (`list[dict]`):
                Rows of the data set, `[B]`.
            given (`list[dict]`):
                Copies of these rows that the environments get, and may change, `[B]`.
            num_rows (`int`):
                Number of rows of this process.
        """
        self.examples, self._checked = examples, False
        self.names = list(self.tool_loop.names) if self.tool_loop.environments else []
        self.of_rows = [{} for _ in range(num_rows)]
        self._rows = {}
        for environment, row in zip(self.tool_loop.environments or [], given, strict=False):
            self._rows[id(environment)] = environment, row

    def row_of(self, environment: Any) -> dict[str, Any] | None:
        """Return the row that an environment was reset with, with the changes that it made. None if unknown."""
        known = self._rows.get(id(environment))
        return None if known is None else known[1]

    def keep(self, turn: int, rows: list[int]) -> None:
        """Keep the current states of the environments of `rows`, before a turn."""
        environments: list[Any] = self.tool_loop.environments or []
        for row in rows:
            self.of_rows[row][turn] = self.current_state(row, environments[row])
            # Keep one state more than `num_turns`, because TRL drops the last response of a row if it is too long.
            self.of_rows[row].pop(turn - self.num_turns - 1, None)

    def begin_branches(self) -> None:
        """Prepare for a call that samples branches. It may use the environments of earlier branches again."""
        self._num_used = {}

    def current_state(self, row: int, environment: Any) -> Any:
        """Return the current state of an environment of a row, or of a branch of that row."""
        name = self.names[row]
        is_auto = self.wanted == "auto"
        if is_auto and name not in self._chosen and environment_error(environment) is None:
            # Choose again, because `reset` may have put an object into the environment that cannot be copied.
            self._kinds[name] = choose_state(environment, "auto")
            self._chosen.add(name)
        memo: dict[int, Any] = {}
        try:
            state = take(environment, self._kind(row), memo)
        except RuntimeError as error:
            if is_outage(error):
                note_error(environment, error, "snapshot")
                return None
            if not is_auto or self._kind(row) != "copy":
                raise
            self._kinds[name] = "replay"
            return None
        if self._kind(row) == "copy":
            self._copy_row(environment, state, memo)
        return state

    def _copy_row(self, environment: Any, copied: Any, memo: dict[int, Any]) -> None:
        """Store a copy of the row of `environment` as the row of `copied`. `memo` is the memo with which `copied` was
        made, so that an object in both the environment and its row is copied once."""
        row = self.row_of(environment)
        if row is not None:
            self._rows[id(copied)] = copied, own_copy(row, memo)

    def method_of(self, environment: Any, function: Callable, row: int) -> Callable | None:
        """Return the method of `environment` with the same name as `function`. None if `function` is not a method of
        the environment of the main row."""
        environments = self.tool_loop.environments
        if not environments or not inspect.ismethod(function) or function.__self__ is not environments[row]:
            return None
        return getattr(environment, function.__name__)

    def _method_named(self, environment: Any, name: str, row: int) -> Callable | None:
        """Return the method of `environment` for a tool of a row. None if the tool belongs to no environment."""
        function = self.tool_loop.sync_tools[row].get(name) or self.tool_loop.async_tools[row].get(name)
        if function is None:
            return None
        return self.method_of(environment, function, row)

    def _kind(self, row: int) -> str:
        """Return the way in which states of a row's environment are kept."""
        return self._kinds[self.names[row]]

    def at(self, trajectory: Trajectory, turn: int) -> Any:
        """Return an environment for a branch, in the state before a turn. If an outage prevents that, the environment
        counts as failed, and its branch is dropped."""
        row = trajectory.main_row
        kind, state = self._kind(row), trajectory.states.get(turn)
        if kind == "copy":
            memo: dict[int, Any] = {}
            environment = copy.deepcopy(state, memo)
            guard(environment)  # the user's `__deepcopy__` may have returned an environment that is not guarded
            self._copy_row(state, environment, memo)
            return environment
        environment = self._spare_environment(self.names[row])
        example = own_copy(self.examples[row])  # the environment may change it
        self._rows[id(environment)] = environment, example
        arguments = dict(example)
        if self.tool_loop.several:
            arguments.pop("environment", None)  # this column only names the environment
        environment.reset(**arguments)
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
            for tool, now, then in self._replay(environment, row, trajectory.messages_before(turn)):
                if _has_lost_service(environment):
                    break
                check_replay(environment, tool, now, then)
        return environment

    def check(self, trajectories: list[Trajectory], failed: list[bool]) -> None:
        """
        Check the kept states: repeat the tool calls of the rollout from these states, and compare the answers.

        An answer differs if the kept state shares an object with the environment, which later calls have changed. The
        check runs once per batch, before its branches are sampled. By then rewards are known, so calls cannot change
        them. Every process must call it.
        """
        if self._checked or not self.tool_loop.tools or self.tool_loop.factories is None:
            return
        self._checked = True
        wrong: dict[Any, tuple[Any, ...]] = {}
        for row in range(len(trajectories)):
            name = self.names[row]
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
                self._reported.add(name)

    def _difference(self, row: int, trajectory: Trajectory) -> tuple[Any, ...] | None:
        """Return the first difference between the answers of a row's kept state and of the rollout: environment, tool,
        answer, and answer in the rollout. None if there is no difference."""
        name = self.names[row]
        if name in self._reported or not trajectory.states:
            return None
        first = min(trajectory.states)
        messages = (trajectory.messages or [])[len(trajectory.messages_before(first)) :]
        if messages and messages[-1]["role"] == "assistant":
            messages = messages[:-1]  # if it has calls, these were not answered
        environment = (self.tool_loop.environments or [])[row]
        tools = set()
        for message in messages:
            for call in message.get("tool_calls") or []:
                if self._method_named(environment, _name_of(call), row):
                    tools.add(_name_of(call))
        if all(self._agreed[name, tool] >= CHECKED_ROWS for tool in tools):
            return None
        for _ in range(2):  # in the second pass, answers differ if the first pass changed the kept state
            self._num_used = {}
            environment = self.at(trajectory, first)
            for tool, now, then in self._replay(environment, row, messages):
                if _has_lost_service(environment):
                    return None
                if now != then:
                    return environment, tool, now, then
        self._agreed.update((name, tool) for tool in tools)
        return None

    def _spare_environment(self, name: Any) -> Any:
        """Return an environment that no other branch of this call has. Make one if there is none left."""
        pool, used = self._spares.setdefault(name, []), self._num_used.get(name, 0)
        if used == len(pool):
            pool.append(self.tool_loop.factories[name]())  # type: ignore[index]
        self._num_used[name] = used + 1
        return pool[used]

    def _replay(self, environment: Any, row: int, messages: list[Message]) -> Iterator[tuple[str, Any, Any]]:
        """Make the tool calls in `messages` again with `environment`. Yield the name of the tool, its answer now, and
        its answer in the rollout."""
        answers = iter(message for message in messages if message["role"] == "tool")
        coroutines = self.tool_loop.async_tools[row]
        for message in messages:
            calls = message.get("tool_calls") or []
            # As in TRL's loop, coroutines are answered after the other calls of a message.
            calls_of_coroutines = [call for call in calls if _name_of(call) in coroutines]
            other_calls = [call for call in calls if _name_of(call) not in coroutines]
            for call in other_calls + calls_of_coroutines:
                then, name = next(answers), _name_of(call)
                method = self._method_named(environment, name, row)
                if method is not None:  # other tools do not change the environment
                    yield name, self._answer(method, call["function"]["arguments"]), then["content"]

    def _answer(self, method: Callable, arguments: dict[str, Any]) -> str | list:
        """Call a tool, and return its answer as TRL's loop does."""
        try:
            answer = method(**arguments)
            if inspect.isawaitable(answer):
                answer = asyncio.run_coroutine_threadsafe(_awaited(answer), self.tool_loop.async_loop).result()
        except Exception as error:
            answer = {"error": str(error)}
        if isinstance(answer, list):
            return answer
        return str(answer)


def _has_lost_service(environment: Any) -> bool:
    """Return whether an environment failed by an outage or a timeout. Then its answer does not depend on its state,
    and its branch is dropped."""
    error = environment_error(environment)
    return error is not None and (isinstance(error, TimeoutError) or is_outage(error))


async def _awaited(answer: Any) -> Any:
    return await answer


def _name_of(call: dict[str, Any]) -> str:
    """Return the name of the tool that a message calls, or an empty text if the call is not of a function."""
    if call["type"] == "function":
        return call["function"]["name"]
    return ""
