"""Leaving trajectories at one of their turns: other continuations of the same prefix, with tools and environments."""

import asyncio
import copy
import inspect
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trl_explore.agents.environments import environment_error, guard
from trl_explore.agents.snapshots import check_replay, choose_state, explain_wrong_state, take
from trl_explore.agents.trajectories import Branch, Message, Trajectory
from trl_explore.agents.watch import ToolWatch
from trl_explore.rows.rollouts import Continuation, Rollout

from .agents import AgentTrainer
from .base import Chooser

CHECKED_ROWS = 8  # trajectories on which a tool has to answer as before until its environment's states are trusted


class BranchingTrainer(AgentTrainer):
    """
    [`AgentTrainer`] that can leave its trajectories at any of their last turns.

    Prefixes are the sampled token ids. Environments go on from the state that they had: each branch has its own.
    """

    samples_extra_rows = True
    accepts_tools = True
    kept_turns = 1  # how many of the last turns of a trajectory it can be left at
    state_wanted = "auto"

    # Class-level defaults: objects made without `__init__` behave as plain GRPO.
    trajectories: list[Trajectory] = []
    _watch = ToolWatch()
    _states: list[dict[int, Any]] = []
    _state_ways: dict[Any, str] = {}
    _spares: dict[Any, list[Any]] = {}
    _num_used: dict[Any, int] = {}
    _stopped: set[int] | None = None  # branches that may call no further tool; `None` outside branching
    _starts: list[int] = []  # turns that the branches of the tool loop begin with
    _agreed: Counter[tuple[Any, str]]  # trajectories on which a tool of an environment answered as before
    _checked = True  # whether the states of this batch are
    _trusted: set[Any]  # environments that are not checked any more
    _chosen: set[Any]  # environments whose way is chosen after a `reset`

    def setup(self) -> None:
        super().setup()
        self._spares, self._agreed = {}, Counter()
        self._trusted, self._chosen = set(), set()
        if self.environment_factories is not None:
            self._state_ways = {
                name: choose_state(pool[0], self.state_wanted) for name, pool in self._environment_pool.items()
            }

    # ------------------------------------------------------------------------------------------------- main rollouts

    def rollout(self, prompt_ids: list[list[int]], plain: Chooser) -> Rollout:
        if self._stopped is None:
            if self.turn is not None and self.environments:
                self._keep_states(self.turn.number, self.turn.rows)
            return plain(prompt_ids)
        assert self.turn is not None
        # Other processes are at other turns: their tool loops are theirs.
        sampled = self.sample(prompt_ids, 1, self.turn.budgets, collective=False)
        logprobs = [continuation.logprobs or [] for (continuation,) in sampled] if self.use_vllm else None
        return Rollout([continuation.token_ids for (continuation,) in sampled], logprobs)

    def _keep_states(self, turn: int, rows: list[int]) -> None:
        environments: list[Any] = self.environments or []
        for row in rows:
            self._states[row][turn] = self._take_state(row, environments[row])
            # One more than asked for: TRL drops the last response of a row that has no room for it.
            self._states[row].pop(turn - self.kept_turns - 1, None)

    def _take_state(self, row: int, environment: Any) -> Any:
        name, auto = self._batch_environments[row], self.state_wanted == "auto"
        if auto and name not in self._chosen and environment_error(environment) is None:
            # At construction it had not been reset: what it holds since then decides what can be copied.
            self._state_ways[name] = choose_state(environment, "auto")
            self._chosen.add(name)
        try:
            return take(environment, self._state_way(row))
        except RuntimeError:
            if not auto or self._state_way(row) != "copy":
                raise
            self._state_ways[name] = "replay"
            return None

    def prepare_tools(self, tools: Any) -> Any:
        self._watch = ToolWatch()
        return tools and [self._watch.watched(tool) for tool in tools]

    def interaction_limit(self) -> int | None:
        """Rounds of tool calls that the trajectories of the next batch may have; `None` for any number."""
        return self.args.max_tool_calling_iterations

    def _generate(self, prompts):
        if self._partial is None and self.tools:
            limit = self.interaction_limit()
            self.max_tool_calling_iterations = sys.maxsize if limit is None else limit
        if self._partial is not None or not self._is_training:
            return super()._generate(prompts)
        self._states, self._checked = [{} for _ in prompts], False
        self._watch.reset()
        if self.environments and not self.tools:  # no loop, and no turns but one
            self._keep_states(0, list(range(len(prompts))))
        result = super()._generate(prompts)
        if self.tools:
            self._stop_if_all_failed()
        prompt_ids, completion_ids, mask, completions = result[:4]
        self.trajectories = [
            Trajectory(
                prompt=prompts[row],
                prompt_ids=prompt_ids[row],
                completion_ids=ids,
                loss_mask=[1] * len(ids) if mask is None else mask[row],
                messages=completions[row] if self.tools else None,  # TRL decodes a single turn better than we
                states=self._states[row],
            )
            for row, ids in enumerate(completion_ids)
        ]
        return result

    def _stop_if_all_failed(self) -> None:
        """A dead service would teach the policy not to ask: better to stop where nothing had an answer."""
        watch, own = self._watch, self._failed if self.environments else []
        total = self.summed(
            {"calls": watch.calls, "unanswered": watch.unanswered, "rows": len(own), "failed": sum(own)}
        )
        error: BaseException | None = watch.last_error
        if own and error is None:
            error = next((e for e in map(environment_error, self.environments) if e is not None), None)
        last = "see the other processes" if error is None else f"{type(error).__name__}: {error.__cause__ or error}"
        for what, bad, all_of_them in (
            ("tool call", total["unanswered"], total["calls"]),
            ("environment", total["failed"], total["rows"]),
        ):
            if all_of_them and bad == all_of_them:
                raise RuntimeError(
                    f"every {what} of this generation batch raised ({int(bad)} of {int(bad)}), the last one "
                    f"{last}. {self._save_before_stopping()}"
                ) from error

    def _save_before_stopping(self) -> str:
        """Write a checkpoint where the run would have written one sooner or later; what to do next."""
        step = self.state.global_step
        if step == 0 or self.args.save_strategy == "no":
            return "Nothing was saved, since " + ("no step is done." if step == 0 else "`save_strategy='no'`.")
        folder = Path(self._get_output_dir(trial=None)) / f"checkpoint-{step}"
        if not self.summed({"there": folder.is_dir()})["there"]:
            self._save_checkpoint(self.model, trial=None)
        return f"Bring the service back and go on with `resume_from_checkpoint={str(folder)!r}`."

    # ------------------------------------------------------------------------------------------------------ branches

    def leave(self, requests: list[tuple[int, int, int]]) -> list[Branch]:
        """
        Continue trajectories otherwise, all of them in one batched rollout.

        Every process must call it equally often; a process may have no request. The main stream's random state is left
        as it was.

        Args:
            requests (`list[tuple[int, int, int]]`):
                Row, turn and number of continuations: what the row sampled from that turn on is sampled anew.

        Returns:
            `list[Branch]`: The continuations, in the order of the requests.
        """
        self._check_states()
        asked = [(self.trajectories[row], turn) for row, turn, _ in requests]
        starts = [trajectory.turns[turn][0] for trajectory, turn in asked]
        prefixes = [t.prompt_ids + t.completion_ids[:start] for (t, _), start in zip(asked, starts, strict=True)]
        counts = [number for _, _, number in requests]
        budgets = [self.max_completion_length - start for start in starts]
        self._num_used = {}
        first = self.sample(prefixes, counts, budgets)
        branches = [
            self._begin(row, turn, start, continuation)
            for (row, turn, _), start, continuations in zip(requests, starts, first, strict=True)
            for continuation in continuations
        ]
        if self.tools and branches:
            self._use_tools(branches)
        for branch in branches:
            branch.complete = self._is_complete(branch)
        return branches

    def judge_branches(self, branches: list[Branch]) -> None:
        """
        Score branches by the reward functions; every process calls it equally often.

        Args:
            branches (`list[Branch]`):
                Complete ones. Their `rewards` are filled in.
        """
        examples = [{**self.main_examples[b.row], "prompt": self.trajectories[b.row].prompt} for b in branches]
        rewards, _ = self.judge(
            examples,
            [branch.completion_ids for branch in branches],
            completions=[branch.messages for branch in branches],
            environments=[branch.environment for branch in branches] if self.environments else None,
        )
        for branch, values in zip(branches, rewards, strict=True):
            branch.rewards = values

    def _begin(self, row: int, turn: int, start: int, continuation: Continuation) -> Branch:
        trajectory, token_ids = self.trajectories[row], continuation.token_ids
        messages = None
        if trajectory.messages is not None:
            context = trajectory.prompt_ids + trajectory.completion_ids[:start]
            messages = [*trajectory.messages_before(turn), self.parse_turn(row, context, token_ids)]
        return Branch(
            row=row,
            turn=turn,
            start=start,
            completion_ids=trajectory.completion_ids[:start] + token_ids,
            loss_mask=trajectory.loss_mask[:start] + [1] * len(token_ids),
            messages=messages,
            environment=self._environment_at(row, turn) if self.environments else None,
            complete=False,
            num_sampled=len(token_ids),
            logprobs=None if continuation.logprobs is None else [*[0.0] * start, *continuation.logprobs],
        )

    def _use_tools(self, branches: list[Branch]) -> None:
        """Let TRL's own loop call tools and sample turns until every branch has ended."""
        prompts, completions = [], []
        for branch in branches:
            assert branch.messages is not None
            prompts.append(copy.deepcopy(self.trajectories[branch.row].prompt) + branch.messages[:-1])
            completions.append([branch.messages[-1]])
        with self._branch_loop(branches) as stopped:
            masks, completions, completion_ids, logprobs, *_ = self._tool_call_loop(
                prompts,
                [self.trajectories[branch.row].prompt_ids for branch in branches],
                [branch.completion_ids for branch in branches],
                completions,
                [list(branch.logprobs or []) for branch in branches] if self.use_vllm else None,
                None,
                {},
            )
        for i, branch in enumerate(branches):
            told, ids, mask = completions[i], completion_ids[i], masks[i][len(branch.loss_mask) :]
            if i in stopped:
                # The call that it was not allowed has no answer, as in a main row at its last turn.
                while told[-1]["role"] == "tool":
                    told.pop()
                while mask and not mask[-1]:
                    mask.pop()
            assert branch.messages is not None
            branch.messages = branch.messages[:-1] + told
            branch.num_sampled += sum(mask)
            branch.loss_mask = branch.loss_mask + mask
            branch.completion_ids = ids[: len(branch.loss_mask)]
            branch.logprobs = None if logprobs is None else logprobs[i][: len(branch.loss_mask)]

    @contextmanager
    def _branch_loop(self, branches: list[Branch]) -> Iterator[set[int]]:
        """TRL's tool loop works on the branches' environments, and each may call tools as often as its row might."""
        rows = [branch.row for branch in branches]
        names = ["environments", "_sync_tool_dicts", "_async_tool_dicts", "_rollout"]
        if self.environment_factories is not None:
            names.append("_batch_environments")
        before = {name: vars(self)[name] for name in names}
        stopped: set[int] = set()
        self._stopped, self._starts = stopped, [branch.turn for branch in branches]
        self._asked, self._loop, self.turn = rows, None, None
        for name in ("_sync_tool_dicts", "_async_tool_dicts"):
            vars(self)[name] = [
                {tool: self._limited(function, i, branch) for tool, function in before[name][branch.row].items()}
                for i, branch in enumerate(branches)
            ]
        if self.environments:
            self.environments = [branch.environment for branch in branches]
        if self.environment_factories is not None:
            self._batch_environments = [before["_batch_environments"][row] for row in rows]
        try:
            yield stopped
        finally:
            vars(self).update(before)
            self._asked, self._loop, self.turn, self._stopped = [], None, None, None

    def _limited(self, function: Callable, place: int, branch: Branch) -> Callable:
        """A tool of a branch, of its own environment; it does nothing once the branch has used up its interactions."""
        own = self._method_of(branch.environment, function, branch.row) or function

        def call(**arguments):
            return "" if self._is_over(place) else own(**arguments)

        async def call_async(**arguments):
            return "" if self._is_over(place) else await own(**arguments)

        return call_async if inspect.iscoroutinefunction(own) else call

    def _is_over(self, place: int) -> bool:
        """Whether a branch has used up its interactions, all of its trajectory counted."""
        assert self._stopped is not None
        if self._starts[place] + (self.turn.number if self.turn else 0) >= self.max_tool_calling_iterations:
            self._stopped.add(place)
        return place in self._stopped

    def _method_of(self, environment: Any, function: Callable, row: int) -> Callable | None:
        """What `function` is to the environment of a main row, to another; `None` if it is no method of that row's."""
        if not self.environments or not inspect.ismethod(function) or function.__self__ is not self.environments[row]:
            return None
        return getattr(environment, function.__name__)

    def _method_named(self, environment: Any, name: str, row: int) -> Callable | None:
        function = self._sync_tool_dicts[row].get(name) or self._async_tool_dicts[row].get(name)
        return None if function is None else self._method_of(environment, function, row)

    def _has_failed(self, row: int) -> bool:
        # A round without a call of a known tool counts as well, as in TRL's loop.
        return super()._has_failed(row) or (self._stopped is not None and self._is_over(row))

    def _is_complete(self, branch: Branch) -> bool:
        if branch.completion_ids[-1] not in self.eos_token_ids or environment_error(branch.environment) is not None:
            return False
        if branch.messages is None:
            return True
        return branch.messages[-1]["role"] == "assistant" and not branch.messages[-1].get("tool_calls")

    # -------------------------------------------------------------------------------------- states of environments

    def _state_way(self, row: int) -> str:
        return self._state_ways[self._batch_environments[row]]

    def _environment_at(self, row: int, turn: int) -> Any:
        """An environment of its own, in the state before a turn of a row."""
        way, state = self._state_way(row), self.trajectories[row].states.get(turn)
        if way == "copy":
            environment = copy.deepcopy(state)
            guard(environment)  # a `__deepcopy__` of its own may have made a new one
            return environment
        environment = self._spare_environment(self._batch_environments[row])
        example = self.main_examples[row]
        environment.reset(**{k: v for k, v in example.items() if k != "environment" or not self._multi_environment})
        if way == "snapshot":
            environment.restore(state)
        else:
            for tool, now, then in self._recalled(environment, row, self.trajectories[row].messages_before(turn)):
                check_replay(environment, tool, now, then)
        return environment

    def _check_states(self) -> None:
        """
        Ask kept states for the calls that followed them: those that answer otherwise are not the states they were.

        Once per batch and before its branches, when the rewards are known: a state may be shared with the environment
        that it was taken from. Every process must call it equally often.
        """
        if self._checked or not self.tools or self.environment_factories is None:
            return
        self._checked = True
        wrong: dict[Any, tuple[Any, ...]] = {}
        for row in range(len(self.trajectories)):
            name = self._batch_environments[row]
            if self._state_ways[name] != "replay" and name not in wrong and not self._failed[row]:
                difference = self._state_difference(row)
                if difference is not None:
                    wrong[name] = difference
        names = list(self._state_ways)
        found = self.summed({str(i): float(name in wrong) for i, name in enumerate(names)})
        for i, name in enumerate(names):
            replaced = self.state_wanted == "auto" and self._state_ways[name] == "copy"
            if name in wrong:
                warnings.warn(
                    explain_wrong_state(*wrong[name], way=self._state_ways[name], replaced=replaced), stacklevel=2
                )
            if found[str(i)]:
                if replaced:
                    self._state_ways[name] = "replay"
                self._trusted.add(name)

    def _state_difference(self, row: int) -> tuple[Any, ...] | None:
        """Environment, tool, answer and answer in the rollout where a kept state of a row answers otherwise."""
        trajectory, name = self.trajectories[row], self._batch_environments[row]
        if name in self._trusted or not trajectory.states:
            return None
        first = min(trajectory.states)
        messages = (trajectory.messages or [])[len(trajectory.messages_before(first)) :]
        if messages and messages[-1]["role"] == "assistant":
            messages = messages[:-1]  # its calls, if any, were not answered
        called = {_name_of(call) for message in messages for call in message.get("tool_calls") or []}
        tools = {tool for tool in called if self._method_named(self.environments[row], tool, row)}
        if all(self._agreed[name, tool] >= CHECKED_ROWS for tool in tools):
            return None
        for _ in range(2):  # the second time shows what the first one changed
            self._num_used = {}
            environment = self._environment_at(row, first)
            for tool, now, then in self._recalled(environment, row, messages):
                if now != then:
                    return environment, tool, now, then
        self._agreed.update((name, tool) for tool in tools)
        return None

    def _spare_environment(self, name: Any) -> Any:
        """An instance that no branch of this call has; made once, and reset often."""
        pool, used = self._spares.setdefault(name, []), self._num_used.get(name, 0)
        if used == len(pool):
            pool.append(self.environment_factories[name]())  # type: ignore[index]
        self._num_used[name] = used + 1
        return pool[used]

    def _recalled(self, environment: Any, row: int, messages: list[Message]) -> Iterator[tuple[str, Any, Any]]:
        """Make calls of the environment again: tool, answer now and answer then of each."""
        answers = iter(message for message in messages if message["role"] == "tool")
        waiting = self._async_tool_dicts[row]
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
                answer = asyncio.run_coroutine_threadsafe(_awaited(answer), self.async_loop).result()
        except Exception as error:
            answer = {"error": str(error)}
        return answer if isinstance(answer, list) else str(answer)


async def _awaited(answer: Any) -> Any:
    return await answer


def _name_of(call: dict[str, Any]) -> str:
    return call["function"]["name"] if call["type"] == "function" else ""
