"""Sampling of branches of an agent's trajectories, with its tools and environments."""

import copy
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from trl_explore.agents.environments import environment_error
from trl_explore.agents.outages import Streak, describe_error, stop_if_long
from trl_explore.agents.states import KeptStates
from trl_explore.agents.turns import ToolLoopAccess, Turns
from trl_explore.agents.watch import ToolWatch
from trl_explore.forks.engine import Forks
from trl_explore.forks.trajectories import Branch, Fork, Trajectory
from trl_explore.rows.copies import own_copy
from trl_explore.rows.policy import Policy
from trl_explore.rows.rollouts import Continuation, Rollout, Rows
from trl_explore.rows.scorer import Scorer
from trl_explore.sampling.sampler import Sampler


class AgentForks(Forks):
    """
    Samples branches of the trajectories of an agent, which continue with its tools.

    A branch has its own environment, which begins in the state that the main row's environment had before the turn of
    the fork.

    Args:
        policy ([`~trl_explore.rows.policy.Policy`]):
            The trainer.
        turns ([`~trl_explore.agents.turns.Turns`]):
            Follows TRL's tool loop.
        sample ([`~trl_explore.sampling.sampler.Sampler`]):
            Samples continuations of token prefixes.
        scorer ([`~trl_explore.rows.scorer.Scorer`]):
            Asks the reward functions.
        watch ([`~trl_explore.agents.watch.ToolWatch`]):
            Counts tool calls.
        num_turns (`int`, *optional*):
            Main rows can be forked in their last `num_turns` turns. By default, in all.
        most_rounds (`Callable[[], int | None]`, *optional*):
            Returns the maximum number of rounds of tool calls, or None for no limit. By default, TRL's
            `max_tool_calling_iterations`.
        keep_states (`bool`, *optional*, defaults to `False`):
            If True, keep the states of the environments of branches, so that branches can be forked again.
        environment_state (`str`, *optional*, defaults to `"auto"`):
            Way to keep the states of environments, see [`~trl_explore.agents.snapshots.choose_state`].
    """

    is_agent = True

    def __init__(
        self,
        policy: Policy,
        turns: Turns,
        sample: Sampler,
        scorer: Scorer,
        watch: ToolWatch,
        *,
        num_turns: int = sys.maxsize,
        most_rounds: Callable[[], int | None] | None = None,
        keep_states: bool = False,
        environment_state: str = "auto",
    ) -> None:
        super().__init__(policy, sample, scorer)
        self.turns, self.watch = turns, watch
        self.states = KeptStates(policy, turns.tool_loop, wanted=environment_state, num_turns=num_turns)
        self.tool_loop: ToolLoopAccess = turns.tool_loop
        self.most_rounds = most_rounds or (lambda: policy.args.max_tool_calling_iterations)
        self.keep_states = keep_states
        self._branches: list[Branch] = []  # branches in the tool loop
        # Indices in `_branches` of the branches that may call no further tool. None if no branch is in the tool loop.
        self._stopped: set[int] | None = None
        # Every process counts the calls of all processes, so that all of them stop together.
        self._unanswered, self._outages = Streak(), Streak()
        self._warned = False
        self._num_errors = 0  # branches of this batch, on this process, whose environment raised

    @property
    def in_branches(self) -> bool:
        """Return whether the tool loop works on branches, and not on main rows."""
        return self._stopped is not None

    # ------------------------------------------------------------------------------------------------- main rollouts

    def set_limit(self) -> None:
        """Set the maximum number of rounds of tool calls. Called before each rollout, in training and evaluation."""
        if self.tool_loop.tools:
            limit = self.most_rounds()
            if limit is None:
                limit = sys.maxsize
            self.tool_loop.limit_rounds(limit)

    def begin(self, examples: list[dict[str, Any]], given: list[dict[str, Any]], num_rows: int) -> None:
        """
        Prepare for the rollout of a generation batch.

        Args:
            examples (`list[dict]`):
                Rows of the data set, `[B]`.
            given (`list[dict]`):
                Copies of these rows that the environments get, and may change, `[B]`.
            num_rows (`int`):
                Number of rows of this process.
        """
        self.states.begin(examples, given, num_rows)
        self.watch.reset()
        if self.tool_loop.environments and not self.tool_loop.tools:
            # Without tools, `before_turn` gets no turn and keeps nothing. The completion is turn 0, the only turn.
            self.states.keep(0, list(range(num_rows)))

    def before_turn(self) -> None:
        """Keep the states of the environments. Called before each turn of the main rows is sampled."""
        turn = self.turns.turn
        if turn is not None and self.tool_loop.environments:
            self.states.keep(turn.number, turn.rows)

    def end(self, prompts: list, rows: tuple, *, save: Callable[[], str]) -> None:
        """
        Store the trajectories of a generation batch after its rollout.

        Args:
            prompts (`list`):
                Prompts with the observations of `reset`, `[B]`.
            rows (`tuple`):
                The first five values that TRL's `_generate` returns.
            save (`Callable[[], str]`):
                Writes a checkpoint if the run must stop. Returns a sentence about how to continue.
        """
        if self.tool_loop.tools:
            self._stop_if_tools_died(save)
        prompt_ids, completion_ids, loss_mask, completions, logprobs = rows
        self.trajectories = []
        for row, ids in enumerate(completion_ids):
            trajectory = Trajectory(
                row=row,
                example={**self.states.examples[row], "prompt": own_copy(prompts[row])},
                prompt_ids=prompt_ids[row],
                completion_ids=ids,
                loss_mask=[1] * len(ids) if loss_mask is None else loss_mask[row],
                states=self.states.of_rows[row],
                logprobs=None if logprobs is None else logprobs[row],
            )
            # Branches continue the messages. Copy them, because reward functions may change the originals. Without
            # tools there is a single turn, which TRL decodes.
            if self.tool_loop.tools:
                trajectory.messages = own_copy(completions[row])
            self.trajectories.append(trajectory)

    def _stop_if_tools_died(self, save: Callable[[], str]) -> None:
        """Raise if a service of tools has died: training on its errors would teach the policy not to call tools. If
        tools raise other errors, only warn, because GRPO also shows these to the model and goes on."""
        watch = self.watch
        total = self.policy.ranks.summed(
            {"calls": watch.calls, "unanswered": watch.unanswered, "outages": watch.outages}
        )
        self._unanswered.add(failed=total["unanswered"], total=total["calls"])
        self._outages.add(failed=total["outages"], total=total["calls"])
        stop_if_long(self._outages, "tool call", watch.last_outage, save)
        if self._unanswered.is_long and not self._warned:
            self._warned = True
            warnings.warn(
                f"{self._unanswered.describe('tool call')}, the last one {describe_error(watch.last_error)}. The "
                "model was shown the errors, and the run goes on. If the model did not cause them, stop the run and "
                "repair the tool. `tools/failure_frequency` logs the share of calls that raise.",
                stacklevel=2,
            )

    # ------------------------------------------------------------------------------------------------------ branches

    def begin_search(self, examples: Any, prompt_ids: Any, completion_ids: Any, logprobs: Any) -> None:
        """Begin to count errors. `end` has already stored the trajectories, with their messages and states."""
        self._num_errors = 0

    def end_search(self) -> None:
        """Add the branches whose environment raised to the metric `agent/environment_errors`."""
        if self.tool_loop.environments:
            self.turns.add_errors(self.policy.ranks.summed({"errors": self._num_errors})["errors"])

    def sample_branches(self, forks: Sequence[Fork]) -> list[Branch]:
        for fork in forks:
            if isinstance(fork, Fork) and fork.origin.shared is not None and not self.keep_states:
                raise ValueError(
                    "A fork is in a branch, and the states of branches are not kept: make the engine with "
                    "`make_agent_forks(keep_states=True)`."
                )
        self.states.check(self.trajectories, self.turns.failed)
        self.states.begin_branches()
        branches = super().sample_branches(forks)
        for branch in branches:
            branch.complete = self._is_complete(branch)
            if environment_error(branch.environment) is not None:
                self._num_errors += 1
        return branches

    def rows(self, branches: Sequence[Branch], *, group_size: int, trains_prefixes: bool) -> Rows:
        if any(branch.rewards is None for branch in branches):
            raise ValueError(
                "Branches of an agent have no rewards: call `self.forks.judge(branches)` before `self.forks.rows`, "
                "while their environments are as the branches left them."
            )
        return super().rows(branches, group_size=group_size, trains_prefixes=trains_prefixes)

    def has_failed(self, row: int) -> bool:
        return bool(self.turns.failed) and self.turns.failed[row]

    def judge(self, branches: Sequence[Branch]) -> None:
        environments = None
        if self.tool_loop.environments:
            environments = [branch.environment for branch in branches]
        had_failed = [environment_error(branch.environment) is not None for branch in branches]
        rewards, logged = self.scorer.judge(
            [self._example_of(branch) for branch in branches],
            [branch.completion_ids for branch in branches],
            prompt_ids=[branch.origin.prompt_ids for branch in branches],
            completions=[branch.messages for branch in branches],
            environments=environments,
            keep_metrics=False,  # the metrics that reward functions log are about main rows only
        )
        for branch, values, extra, failed_before in zip(branches, rewards, logged, had_failed, strict=True):
            # Like a main row, a branch gets a reward of 0 from each function if its environment raised.
            if environment_error(branch.environment) is not None:
                values = [0.0] * len(values)
                if not failed_before:  # `get_reward` raised
                    self._num_errors += 1
            branch.rewards, branch.extra = values, extra

    def _example_of(self, branch: Branch) -> dict[str, Any]:
        """Return the data-set row of a branch, with the changes that its environment made."""
        changed = self.states.row_of(branch.environment) or {}
        return {**branch.origin.example, **changed, "prompt": branch.origin.example["prompt"]}

    def continued(self, contexts: list[list[int]]) -> Rollout:
        """Sample the next turn of branches in the tool loop. `contexts` are the tokens of each branch so far."""
        turn = self.turns.turn
        assert turn is not None
        if self.keep_states and self.tool_loop.environments:
            for place in turn.rows:
                branch = self._branches[place]
                branch.states[branch.turn + turn.number] = self.states.current_state(branch.row, branch.environment)
        # Every process runs its own tool loop, so other processes do not take part in this call.
        sampled = self.sample(contexts, 1, turn.budgets, collective=False, begun=[0] * len(contexts))
        token_ids, logprobs = [], []
        for (continuation,) in sampled:
            token_ids.append(continuation.token_ids)
            logprobs.append(continuation.logprobs or [])
        return Rollout(token_ids, None if self.policy.serving is None else logprobs)

    def begin_branch(self, fork: Fork, continuation: Continuation) -> Branch:
        branch = super().begin_branch(fork, continuation)
        origin = fork.origin
        if origin.messages is not None:
            first = origin.turns[fork.turn][0]
            turn = self.turns.parse_turn(
                branch.row, origin.prompt_ids + origin.completion_ids[:first], branch.completion_ids[first:]
            )
            branch.messages = [*origin.messages_before(fork.turn), turn]
        if self.tool_loop.environments:
            branch.environment = self.states.at(origin, fork.turn)
        return branch

    def continue_turns(self, branches: list[Branch]) -> None:
        """Let TRL's tool loop call tools and sample turns until every branch has ended."""
        if not self.tool_loop.tools or not branches:
            return
        prompts, completions = [], []
        known_logprobs: list[list[float | None]] = []
        for branch in branches:
            assert branch.messages is not None
            prompts.append(copy.deepcopy(branch.origin.example["prompt"]) + branch.messages[:-1])
            completions.append([branch.messages[-1]])
            known_logprobs.append(list(branch.logprobs or []))
        with self._branch_loop(branches) as stopped:
            masks, completions, completion_ids, logprobs, *_ = self.tool_loop.loop(
                prompts,
                [branch.origin.prompt_ids for branch in branches],
                [branch.completion_ids for branch in branches],
                completions,
                None if self.policy.serving is None else known_logprobs,
                None,  # images
                {},  # other inputs of a multimodal model
            )
        for i, branch in enumerate(branches):
            messages, ids = completions[i], completion_ids[i]
            mask = masks[i][len(branch.loss_mask) :]  # of the tokens that the loop added
            if i in stopped:
                # TRL's loop has answered a call beyond the limit. Drop the answer, as at the limit of a main row.
                while messages[-1]["role"] == "tool":
                    messages.pop()
                while mask and not mask[-1]:
                    mask.pop()
            assert branch.messages is not None
            branch.messages = branch.messages[:-1] + messages
            branch.num_sampled += sum(mask)
            branch.loss_mask = branch.loss_mask + mask
            branch.completion_ids = ids[: len(branch.loss_mask)]
            branch.logprobs = None if logprobs is None else logprobs[i][: len(branch.loss_mask)]

    @contextmanager
    def _branch_loop(self, branches: list[Branch]) -> Iterator[set[int]]:
        """Let TRL's tool loop work on branches, with their environments. Yield a set that is filled while the loop
        runs: the indices of the branches that have reached the limit of tool calls."""
        tool_loop, rows = self.tool_loop, [branch.row for branch in branches]
        stopped: set[int] = set()
        environments = names = None
        if tool_loop.environments:
            environments = [branch.environment for branch in branches]
        if tool_loop.factories is not None:
            names = [tool_loop.names[row] for row in rows]
        sync_tools = self._limited_tools(branches, tool_loop.sync_tools)
        async_tools = self._limited_tools(branches, tool_loop.async_tools)
        working_on = tool_loop.working_on(
            environments=environments, names=names, sync_tools=sync_tools, async_tools=async_tools
        )
        self._stopped, self._branches = stopped, branches
        try:
            with self.turns.following(rows, self._is_over), working_on:
                yield stopped
        finally:
            self._stopped, self._branches = None, []

    def _limited_tools(
        self, branches: list[Branch], functions_of_rows: list[dict[str, Callable]]
    ) -> list[dict[str, Callable]]:
        """Return the tools of each branch: the tools of its row, with the limit of the branch."""
        tools = []
        for place, branch in enumerate(branches):
            functions = functions_of_rows[branch.row]
            tools.append({name: self._limited(function, place, branch) for name, function in functions.items()})
        return tools

    def _limited(self, function: Callable, place: int, branch: Branch) -> Callable:
        """Return a tool of a branch. It calls the branch's environment, until the branch reaches the limit of tool
        calls. Then it does nothing."""
        tool = self.states.method_of(branch.environment, function, branch.row) or function

        def call(**arguments):
            if self._is_over(place):
                return ""
            return tool(**arguments)

        async def call_async(**arguments):
            if self._is_over(place):
                return ""
            return await tool(**arguments)

        if inspect.iscoroutinefunction(tool):
            return call_async
        return call

    def _is_over(self, place: int) -> bool:
        """Return whether the branch at index `place` has reached the limit of rounds of tool calls. If so, add the
        index to `_stopped`. The rounds in its prefix count, and also rounds that call only unknown tools."""
        assert self._stopped is not None
        num_rounds = self._branches[place].turn
        if self.turns.turn:
            num_rounds += self.turns.turn.number
        if num_rounds >= self.tool_loop.most_rounds:
            self._stopped.add(place)
        return place in self._stopped

    def _is_complete(self, branch: Branch) -> bool:
        """Return whether the last turn of a branch ends with the end-of-sequence token and calls no tool, and its
        environment did not raise."""
        ended = branch.completion_ids[-1] in self.policy.eos_token_ids
        if not ended or environment_error(branch.environment) is not None:
            return False
        if branch.messages is None:
            return True
        return branch.messages[-1]["role"] == "assistant" and not branch.messages[-1].get("tool_calls")
