"""Sample branches of an agent's trajectories, with its tools and environments."""

import copy
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from trl_explore.agents.environments import environment_error, model_may_have_failed
from trl_explore.agents.outages import Streak
from trl_explore.agents.states import KeptStates
from trl_explore.agents.turns import ToolLoopAccess, Turns
from trl_explore.agents.watch import ToolWatch
from trl_explore.forks.engine import Forks
from trl_explore.forks.trajectories import Branch, Fork, Trajectory
from trl_explore.rows.copies import own_copy
from trl_explore.rows.policy import Policy
from trl_explore.rows.rollouts import Continuation, Rollout
from trl_explore.rows.scorer import Scorer
from trl_explore.sampling.sampler import Sampler


class AgentForks(Forks):
    """
    Samples branches of the trajectories of an agent, which continue with its tools.

    A branch has its own environment, in the state that the environment of its main row had before the turn of the
    fork. Main rows can be continued from their last `num_turns` turns, and branches if `keep_states` is True.
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
    ) -> None:
        super().__init__(policy, sample, scorer)
        self.turns, self.watch = turns, watch
        self.states = KeptStates(policy, turns.tool_loop, wanted=policy.args.environment_state, num_turns=num_turns)
        self.tool_loop: ToolLoopAccess = turns.tool_loop
        self.most_rounds = most_rounds or (lambda: policy.args.max_tool_calling_iterations)
        self.keep_states = keep_states
        self._stopped: set[int] | None = None  # branches that may call no further tool; None outside branching
        self._branches: list[Branch] = []  # branches in the tool loop
        # Every process counts the calls of all processes, so that all of them stop together.
        self._unanswered, self._outages, self._broken = Streak(), Streak(), Streak()
        self._warned = False

    @property
    def in_branches(self) -> bool:
        """Whether the tool loop is at work on branches."""
        return self._stopped is not None

    # ------------------------------------------------------------------------------------------------- main rollouts

    def set_limit(self) -> None:
        """A batch is about to be rolled out, in training or evaluation."""
        if self.tool_loop.tools:
            limit = self.most_rounds()
            self.tool_loop.limit_rounds(sys.maxsize if limit is None else limit)

    def begin(self, examples: list[dict[str, Any]], given: list[dict[str, Any]], num_rows: int) -> None:
        """
        Prepare for a batch of training that is about to be rolled out.

        Args:
            examples (`list[dict]`):
                Rows of the data, `[B]`.
            given (`list[dict]`):
                The same rows, as the environments got them, `[B]`.
            num_rows (`int`):
                Number of rows of this process.
        """
        self.states.begin(examples, given, num_rows)
        self.watch.reset()
        if self.tool_loop.environments and not self.tool_loop.tools:  # no loop, and no turns but one
            self.states.keep(0, list(range(num_rows)))

    def before_turn(self) -> None:
        """A turn of the main rows is about to be sampled."""
        turn = self.turns.turn
        if turn is not None and self.tool_loop.environments:
            self.states.keep(turn.number, turn.rows)

    def end(self, prompts: list, rows: tuple, *, save: Callable[[], str]) -> None:
        """The batch has been rolled out: prompts as they were sampled from, `[B]`, and rows as TRL returns them.
        `save` writes a checkpoint before the run is stopped, and says what to do next."""
        if self.tool_loop.tools:
            self._stop_if_dead(save)
        prompt_ids, completion_ids, mask, completions, logprobs = rows
        self.trajectories = [
            Trajectory(
                row=row,
                example={**self.states.examples[row], "prompt": own_copy(prompts[row])},
                prompt_ids=prompt_ids[row],
                completion_ids=ids,
                loss_mask=[1] * len(ids) if mask is None else mask[row],
                # TRL decodes a single turn better than we. Of several turns, branches continue these messages, and
                # reward functions may change those that they are given.
                messages=own_copy(completions[row]) if self.tool_loop.tools else None,
                states=self.states.of_rows[row],
                logprobs=None if logprobs is None else logprobs[row],
            )
            for row, ids in enumerate(completion_ids)
        ]

    def _stop_if_dead(self, save: Callable[[], str]) -> None:
        """Raise if a service has died: training on its errors would teach the policy not to call tools. If tools raise
        other errors, only warn, because GRPO also shows these to the model and goes on."""
        environments = self.tool_loop.environments or []
        failed = self.turns.failed if environments else []
        broken = [
            environment
            for environment, has_failed in zip(environments, failed, strict=True)
            if has_failed and not model_may_have_failed(environment)
        ]
        watch = self.watch
        counts: dict[str, float] = {
            "calls": watch.calls,
            "unanswered": watch.unanswered,
            "outages": watch.outages,
            "rows": len(failed),
            "broken": len(broken),
        }
        total = self.policy.ranks.summed(counts)
        self._unanswered.add(failed=total["unanswered"], total=total["calls"])
        self._outages.add(failed=total["outages"], total=total["calls"])
        self._broken.add(failed=total["broken"], total=total["rows"])
        error = environment_error(broken[-1]) if broken else None
        for streak, what, last in (
            (self._outages, "tool call", watch.last_outage),
            (self._broken, "environment", error),
        ):
            if streak.is_long:
                raise RuntimeError(f"{streak.describe(what)}, the last one {_told(last)}. {save()}") from last
        if self._unanswered.is_long and not self._warned:
            self._warned = True
            warnings.warn(
                f"{self._unanswered.describe('tool call')}, the last one {_told(watch.last_error)}. The model was "
                "shown the errors, and the run goes on. If the model did not cause them, stop the run and repair the "
                "tool. `tools/failure_frequency` logs the share of calls that raise.",
                stacklevel=2,
            )

    # ------------------------------------------------------------------------------------------------------ branches

    def begin_search(self, examples: Any, prompt_ids: Any, completion_ids: Any, logprobs: Any) -> None:
        """Do nothing: the trajectories were stored when they ended, with their messages and states."""

    def sample_branches(self, forks: Sequence[Fork]) -> list[Branch]:
        self.states.check(self.trajectories, self.turns.failed)
        self.states.begin_branches()
        branches = super().sample_branches(forks)
        for branch in branches:
            branch.complete = self._is_complete(branch)
        return branches

    def has_failed(self, row: int) -> bool:
        return bool(self.turns.failed) and self.turns.failed[row]

    def judge(self, branches: Sequence[Branch]) -> None:
        # A main row whose environment raised an exception gets 0 from each reward function, and so does a branch.
        rewards, logged = self.scorer.judge(
            [self._example_of(branch) for branch in branches],
            [branch.completion_ids for branch in branches],
            prompt_ids=[branch.origin.prompt_ids for branch in branches],
            completions=[branch.messages for branch in branches],
            environments=[branch.environment for branch in branches] if self.tool_loop.environments else None,
            keep_metrics=False,  # metrics that reward functions log are those of the main rows
        )
        for branch, values, extra in zip(branches, rewards, logged, strict=True):
            branch.rewards = values if environment_error(branch.environment) is None else [0.0] * len(values)
            branch.extra = extra

    def _example_of(self, branch: Branch) -> dict[str, Any]:
        """Return the example of a branch as its environment left it."""
        changed = self.states.row_of(branch.environment) or {}
        return {**branch.origin.example, **changed, "prompt": branch.origin.example["prompt"]}

    def continued(self, contexts: list[list[int]]) -> Rollout:
        """The next turn of branches that are in the tool loop."""
        turn = self.turns.turn
        assert turn is not None
        if self.keep_states and self.tool_loop.environments:
            for place in turn.rows:
                branch = self._branches[place]
                branch.states[branch.turn + turn.number] = self.states.taken(branch.row, branch.environment)
        # Other processes are at other turns: their tool loops are theirs.
        sampled = self.sample(contexts, 1, turn.budgets, collective=False, begun=[0] * len(contexts))
        served = self.policy.serving is not None
        logprobs = [continuation.logprobs or [] for (continuation,) in sampled] if served else None
        return Rollout([continuation.token_ids for (continuation,) in sampled], logprobs)

    def begin_branch(self, fork: Fork, continuation: Continuation) -> Branch:
        branch, origin = super().begin_branch(fork, continuation), fork.origin
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
        """Let TRL's own loop call tools and sample turns until every branch has ended."""
        if not self.tool_loop.tools or not branches:
            return
        prompts, completions = [], []
        for branch in branches:
            assert branch.messages is not None
            prompts.append(copy.deepcopy(branch.origin.example["prompt"]) + branch.messages[:-1])
            completions.append([branch.messages[-1]])
        with self._branch_loop(branches) as stopped:
            masks, completions, completion_ids, logprobs, *_ = self.tool_loop.loop(
                prompts,
                [branch.origin.prompt_ids for branch in branches],
                [branch.completion_ids for branch in branches],
                completions,
                [list(branch.logprobs or []) for branch in branches] if self.policy.serving is not None else None,
                None,
                {},
            )
        for i, branch in enumerate(branches):
            messages, ids, mask = completions[i], completion_ids[i], masks[i][len(branch.loss_mask) :]
            if i in stopped:
                # The call that it was not allowed has no answer, as in a main row at its last turn.
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
        """TRL's tool loop works on the branches' environments, and each may call tools as often as its row might."""
        tool_loop, rows = self.tool_loop, [branch.row for branch in branches]
        stopped: set[int] = set()
        environments = [branch.environment for branch in branches] if tool_loop.environments else None
        names = None if tool_loop.factories is None else [tool_loop.names[row] for row in rows]
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
        """A tool of a branch, of its own environment; it does nothing once the branch has used up its interactions."""
        own = self.states.method_of(branch.environment, function, branch.row) or function

        def call(**arguments):
            return "" if self._is_over(place) else own(**arguments)

        async def call_async(**arguments):
            return "" if self._is_over(place) else await own(**arguments)

        return call_async if inspect.iscoroutinefunction(own) else call

    def _is_over(self, place: int) -> bool:
        """Whether a branch has used up its interactions, all of its trajectory counted; unknown calls count too."""
        assert self._stopped is not None
        turn = self.turns.turn
        if self._branches[place].turn + (turn.number if turn else 0) >= self.tool_loop.most_rounds:
            self._stopped.add(place)
        return place in self._stopped

    def _is_complete(self, branch: Branch) -> bool:
        ended = branch.completion_ids[-1] in self.policy.eos_token_ids
        if not ended or environment_error(branch.environment) is not None:
            return False
        if branch.messages is None:
            return True
        return branch.messages[-1]["role"] == "assistant" and not branch.messages[-1].get("tool_calls")


def _told(error: BaseException | None) -> str:
    """Describe the last error of this process. None if only other processes have one."""
    return "see the other processes" if error is None else f"{type(error).__name__}: {error.__cause__ or error}"
