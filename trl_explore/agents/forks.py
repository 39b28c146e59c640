"""Leaving trajectories at one of their turns: other continuations of the same prefix, with tools and environments."""

import copy
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from trl_explore.agents.environments import environment_error
from trl_explore.agents.states import KeptStates
from trl_explore.agents.trajectories import Branch, Fork, Trajectory
from trl_explore.agents.turns import Turns, World
from trl_explore.agents.watch import ToolWatch
from trl_explore.rows.policy import Policy
from trl_explore.rows.rollouts import Continuation, Rollout
from trl_explore.rows.scorer import Scorer
from trl_explore.sampling.sampler import Sampler


class Forks:
    """Leaves trajectories at any of their last `num_turns` turns, in sampled token ids. Environments go on from the
    state that they had: each branch has its own. With `keep_states` branches can be left in their turn."""

    def __init__(
        self,
        policy: Policy,
        turns: Turns,
        sample: Sampler,
        watch: ToolWatch,
        *,
        num_turns: int = sys.maxsize,
        most_rounds: Callable[[], int | None] | None = None,
        keep_states: bool = False,
    ) -> None:
        self.policy, self.turns, self.sample, self.watch = policy, turns, sample, watch
        self.states = KeptStates(policy, turns.world, wanted=policy.args.environment_state, num_turns=num_turns)
        self.world: World = turns.world
        self.most_rounds = most_rounds or (lambda: policy.args.max_tool_calling_iterations)
        self.keep_states = keep_states
        self.trajectories: list[Trajectory] = []
        self._stopped: set[int] | None = None  # branches that may call no further tool; `None` outside branching
        self._branches: list[Branch] = []  # of the tool loop

    @property
    def in_branches(self) -> bool:
        """Whether the tool loop is at work on branches."""
        return self._stopped is not None

    # ------------------------------------------------------------------------------------------------- main rollouts

    def set_limit(self) -> None:
        """A batch is about to be rolled out, in training or evaluation."""
        if self.world.tools:
            limit = self.most_rounds()
            self.world.limit_rounds(sys.maxsize if limit is None else limit)

    def begin(self, examples: list[dict[str, Any]], num_rows: int) -> None:
        """A batch of training is about to be rolled out."""
        self.states.begin(examples, num_rows)
        self.watch.reset()
        if self.world.environments and not self.world.tools:  # no loop, and no turns but one
            self.states.keep(0, list(range(num_rows)))

    def before_turn(self) -> None:
        """A turn of the main rows is about to be sampled."""
        turn = self.turns.turn
        if turn is not None and self.world.environments:
            self.states.keep(turn.number, turn.rows)

    def end(self, prompts: list, rows: tuple, *, save: Callable[[], str]) -> None:
        """The batch has been rolled out: prompts as they were sampled from, `[B]`, and rows as TRL returns them.
        `save` writes a checkpoint before the run is stopped, and says what to do next."""
        if self.world.tools:
            self._stop_if_all_failed(save)
        prompt_ids, completion_ids, mask, completions, logprobs = rows
        self.trajectories = [
            Trajectory(
                row=row,
                prompt=prompts[row],
                prompt_ids=prompt_ids[row],
                completion_ids=ids,
                loss_mask=[1] * len(ids) if mask is None else mask[row],
                messages=completions[row] if self.world.tools else None,  # TRL decodes a single turn better than we
                states=self.states.of_rows[row],
                logprobs=None if logprobs is None else logprobs[row],
            )
            for row, ids in enumerate(completion_ids)
        ]

    def _stop_if_all_failed(self, save: Callable[[], str]) -> None:
        """A dead service would teach the policy not to ask: better to stop where nothing had an answer."""
        watch, own = self.watch, self.turns.failed if self.world.environments else []
        total = self.policy.ranks.summed(
            {"calls": watch.calls, "unanswered": watch.unanswered, "rows": len(own), "failed": sum(own)}
        )
        error: BaseException | None = watch.last_error
        if own and error is None:
            error = next((e for e in map(environment_error, self.world.environments or []) if e is not None), None)
        last = "see the other processes" if error is None else f"{type(error).__name__}: {error.__cause__ or error}"
        for what, bad, all_of_them in (
            ("tool call", total["unanswered"], total["calls"]),
            ("environment", total["failed"], total["rows"]),
        ):
            if all_of_them and bad == all_of_them:
                raise RuntimeError(
                    f"every {what} of this generation batch raised ({int(bad)} of {int(bad)}), the last one "
                    f"{last}. {save()}"
                ) from error

    # ------------------------------------------------------------------------------------------------------ branches

    def branch(self, requests: list[tuple[int, int, int]]) -> list[Branch]:
        """Continue main rows otherwise from a turn: row, turn and number of continuations. See [`leave`]."""
        return self.leave([Fork(self.trajectories[row], turn, number) for row, turn, number in requests])

    def leave(self, forks: list[Fork]) -> list[Branch]:
        """
        Continue trajectories otherwise, all of them in one batched rollout: what was sampled from the fork on is
        sampled anew.

        Every process must call it equally often; a process may have no fork. The main stream's random state is left
        as it was.

        Args:
            forks (`list[Fork]`):
                Where trajectories are left.

        Returns:
            `list[Branch]`: The continuations, in the order of the forks.
        """
        self.states.check(self.trajectories, self.turns.failed)
        starts = [fork.origin.turns[fork.turn][0] if fork.start is None else fork.start for fork in forks]
        origins = [fork.origin for fork in forks]
        prefixes = [t.prompt_ids + t.completion_ids[:start] for t, start in zip(origins, starts, strict=True)]
        budgets = [self.policy.args.max_completion_length - start for start in starts]
        # TRL samples every turn by itself, so that sampling options count from the start of the turn.
        begun = [start - fork.origin.turns[fork.turn][0] for fork, start in zip(forks, starts, strict=True)]
        self.states.begin_branches()
        with self.sample.rollout():
            first = self.sample(prefixes, [fork.number for fork in forks], budgets, begun=begun)
            branches = [
                self._begin(fork, start, continuation)
                for fork, start, continuations in zip(forks, starts, first, strict=True)
                for continuation in continuations
            ]
            if self.world.tools and branches:
                self._use_tools(branches)
        for branch in branches:
            branch.complete = self._is_complete(branch)
        return branches

    def has_failed(self, row: int) -> bool:
        """Whether the environment of a main row has raised."""
        return bool(self.turns.failed) and self.turns.failed[row]

    def judge(self, branches: list[Branch], scorer: Scorer) -> None:
        """Score branches by the reward functions, into their `rewards`; every process calls it. One whose environment
        raised gets 0 from each, as a main row does."""
        rewards, _ = scorer.judge(
            [self.example(branch.row) for branch in branches],
            [branch.completion_ids for branch in branches],
            completions=[branch.messages for branch in branches],
            environments=[branch.environment for branch in branches] if self.world.environments else None,
            keep_metrics=False,  # what reward functions log of branches is not the main rows'
        )
        for branch, values in zip(branches, rewards, strict=True):
            branch.rewards = values if environment_error(branch.environment) is None else [0.0] * len(values)

    def example(self, row: int) -> dict[str, Any]:
        """The data-set example behind a main row, with the prompt as it was sampled from."""
        return {**self.states.examples[row], "prompt": self.trajectories[row].prompt}

    def continued(self, contexts: list[list[int]]) -> Rollout:
        """The next turn of branches that are in the tool loop."""
        turn = self.turns.turn
        assert turn is not None
        if self.keep_states and self.world.environments:
            for place in turn.rows:
                branch = self._branches[place]
                branch.states[branch.turn + turn.number] = self.states.taken(branch.row, branch.environment)
        # Other processes are at other turns: their tool loops are theirs.
        sampled = self.sample(contexts, 1, turn.budgets, collective=False, begun=[0] * len(contexts))
        served = self.policy.serving is not None
        logprobs = [continuation.logprobs or [] for (continuation,) in sampled] if served else None
        return Rollout([continuation.token_ids for (continuation,) in sampled], logprobs)

    def _begin(self, fork: Fork, start: int, continuation: Continuation) -> Branch:
        origin, token_ids = fork.origin, continuation.token_ids
        messages = None
        if origin.messages is not None:
            first = origin.turns[fork.turn][0]
            turn = self.turns.parse_turn(
                origin.row,
                origin.prompt_ids + origin.completion_ids[:first],
                origin.completion_ids[first:start] + token_ids,
            )
            messages = [*origin.messages_before(fork.turn), turn]
        known = [0.0] * start if origin.logprobs is None else origin.logprobs[:start]
        return Branch(
            origin=origin,
            turn=fork.turn,
            start=start,
            completion_ids=origin.completion_ids[:start] + token_ids,
            loss_mask=origin.loss_mask[:start] + [1] * len(token_ids),
            messages=messages,
            environment=self.states.at(origin, fork.turn) if self.world.environments else None,
            complete=False,
            num_sampled=len(token_ids),
            logprobs=None if continuation.logprobs is None else [*known, *continuation.logprobs],
        )

    def _use_tools(self, branches: list[Branch]) -> None:
        """Let TRL's own loop call tools and sample turns until every branch has ended."""
        prompts, completions = [], []
        for branch in branches:
            assert branch.messages is not None
            prompts.append(copy.deepcopy(branch.origin.prompt) + branch.messages[:-1])
            completions.append([branch.messages[-1]])
        with self._branch_loop(branches) as stopped:
            masks, completions, completion_ids, logprobs, *_ = self.world.loop(
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
        world, rows = self.world, [branch.row for branch in branches]
        stopped: set[int] = set()
        others: dict[str, Any] = {
            name: [
                {tool: self._limited(function, i, branch) for tool, function in functions[branch.row].items()}
                for i, branch in enumerate(branches)
            ]
            for name, functions in (("sync_tools", world.sync_tools), ("async_tools", world.async_tools))
        }
        if world.environments:
            others["environments"] = [branch.environment for branch in branches]
        if world.factories is not None:
            others["names"] = [world.names[row] for row in rows]
        self._stopped, self._branches = stopped, branches
        try:
            with self.turns.of(rows, self._is_over), world.swapped(**others):
                yield stopped
        finally:
            self._stopped, self._branches = None, []

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
        if self._branches[place].turn + (turn.number if turn else 0) >= self.world.most_rounds:
            self._stopped.add(place)
        return place in self._stopped

    def _is_complete(self, branch: Branch) -> bool:
        ended = branch.completion_ids[-1] in self.policy.eos_token_ids
        if not ended or environment_error(branch.environment) is not None:
            return False
        if branch.messages is None:
            return True
        return branch.messages[-1]["role"] == "assistant" and not branch.messages[-1].get("tool_calls")
