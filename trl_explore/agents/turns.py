"""Follow TRL's tool loop turn by turn: the rows that get a turn, the maximum number of tokens of the turn, and the
environments that have failed."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, Protocol

import torch
from trl.chat_template_utils import parse_response

from trl_explore.agents.environments import environment_error, guarded, model_may_have_failed
from trl_explore.agents.outages import Streak, stop_if_long
from trl_explore.rows.policy import Policy

# Tokens of a turn of R rows, `[R][T_i]`, and their log-probabilities, or None if the backend reports none.
TurnTokens = tuple[list[list[int]], list[list[float | None]] | None]


def _never(row: int) -> bool:
    """Default of `stopped`: no row is stopped."""
    return False


class ToolLoopAccess(Protocol):
    """
    TRL's tool loop, with the tools and environments that it works on.

    [`~trl_explore.trainers.tool_loop.TrainerToolLoop`] implements it. Lists with one entry per row are `[B]`.
    """

    @property
    def tools(self) -> list[Any]: ...  # every tool that some row may call

    @property
    def environments(self) -> list[Any] | None: ...  # environment of each row; None without environments

    @property
    def factories(self) -> dict[Any, Callable[[], Any]] | None: ...  # factories of environments, by environment name

    @property
    def pool(self) -> dict[Any, list[Any]]: ...  # all environments that were made, by environment name

    @property
    def names(self) -> list[Any]: ...  # environment name of each row

    @property
    def several(self) -> bool: ...  # True if environments have more than one name

    @property
    def sync_tools(self) -> list[dict[str, Callable]]: ...  # functions that each row may call, by function name

    @property
    def async_tools(self) -> list[dict[str, Callable]]: ...  # coroutine functions that each row may call, by name

    @property
    def async_loop(self) -> Any: ...  # event loop that runs coroutines

    @property
    def most_rounds(self) -> int: ...  # maximum number of rounds of tool calls

    @property
    def loop(self) -> Callable[..., tuple]: ...  # TRL's loop; it starts after the first turn of each row

    @property
    def encode_answers(self) -> Callable[[list[dict[str, Any]]], list[int]]: ...  # tokens between two turns

    def limit_rounds(self, number: int) -> None: ...  # set `most_rounds`

    def tools_of(self, row: int) -> list[Any]: ...  # tools that a row of the batch may call

    def tools_by_environment(self) -> dict[Any, list[Any]]: ...  # by environment name; None for a single factory

    def working_on(
        self,
        *,
        environments: list[Any] | None = None,
        names: list[Any] | None = None,
        sync_tools: list[dict[str, Callable]] | None = None,
        async_tools: list[dict[str, Callable]] | None = None,
    ) -> AbstractContextManager[None]: ...  # let the loop work on other rows for a while


@dataclass
class Turn:
    """One turn of the assistant in all rows that get one. All lists have one entry for each of these rows."""

    number: int  # 0 for the first turn of the assistant
    rows: list[int]  # indices into the batch, in the order in which the turns are sampled
    shown: list[int]  # number of tokens before the newest answers of tools; 0 in the first turn
    budgets: list[int]  # maximum number of new tokens, at least 1
    last_messages: list[list[dict[str, Any]]]  # newest messages: at first the prompt, later the answers of tools


@dataclass(frozen=True)
class TurnRows:
    """Rows that get a turn, out of the rows for which TRL asks for one."""

    contexts: list[list[int]]  # tokens of each row so far
    places: list[int]  # index of each row among the rows for which TRL asks
    num_asked: int  # number of rows for which TRL asks
    budgets: list[int] | None = None  # maximum number of new tokens of each row; None: `max_completion_length`


@dataclass
class LoopLists:
    """The lists of TRL's loop, which it changes in place. All are `[B]`."""

    prompts: list[list[dict[str, Any]]]  # messages of each row so far
    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    num_messages: list[int] = field(default_factory=list)  # length of `prompts` at the last call of `advance`

    def advance(self) -> list[int]:
        """Return the rows that have got new messages since the last call. These are the rows for which TRL asks for a
        turn. The other rows called no tool, or became too long, so that TRL has removed their new messages."""
        before = self.num_messages
        self.num_messages = [len(prompt) for prompt in self.prompts]
        return [row for row, number in enumerate(self.num_messages) if number > before[row]]


class Turns:
    """
    Follows TRL's tool loop, and keeps a run going if an environment raises.

    [`begin`] returns the rows that get a turn, and [`end`] takes their turns. Between the two, `turn` describes the
    turn. If an environment raises, its row gets no further turn, and a reward of 0 from every reward function.
    """

    def __init__(self, policy: Policy, tool_loop: ToolLoopAccess) -> None:
        self.policy, self.tool_loop = policy, tool_loop
        self.turn: Turn | None = None
        self.failed: list[bool] = []  # True for rows of the newest batch whose environment raised
        self._any_failed = False  # True if any row of any process failed before the reward functions were asked
        # Every process counts the environments of all processes, so that all of them stop together.
        self._broken = Streak()
        # TRL's list of the metric `agent/environment_errors`. Its last number belongs to the newest batch.
        self._logged_errors: list[float] = []
        self._loop: LoopLists | None = None  # None until TRL's loop starts, after the first turn
        self._prompts: list = []  # prompts of the batch; empty outside of [`following`]
        self._stopped: Callable[[int], bool] = _never

    @contextmanager
    def following(self, prompts: list, stopped: Callable[[int], bool] = _never) -> Iterator[None]:
        """Follow the rollout of a batch, or of branches, inside a `with` block. `stopped(row)` returns True if a row
        may not continue."""
        self._prompts, self._loop, self.turn, self._stopped = prompts, None, None, stopped
        try:
            yield
        finally:
            self._prompts, self._loop, self.turn, self._stopped = [], None, None, _never

    def loop_begins(self, prompts: list, prompt_ids: list[list[int]], completion_ids: list[list[int]]) -> None:
        """Record that TRL's tool loop starts, after the first turn of every row."""
        self._loop = LoopLists(prompts, prompt_ids, completion_ids, [len(prompt) for prompt in prompts])

    def begin(self, contexts: list[list[int]]) -> TurnRows:
        """
        Begin a turn. TRL asks for a turn of some rows. Only rows that may continue get one.

        Args:
            contexts (`list[list[int]]`):
                Tokens so far of each row for which TRL asks.

        Returns:
            [`TurnRows`]: The rows that get a turn.
        """
        everyone = TurnRows(contexts, list(range(len(contexts))), len(contexts))
        if not self.tool_loop.tools or not self._prompts:
            return everyone
        most = self.policy.args.max_completion_length
        assert most is not None  # an agent's trainer refuses None
        if self._loop is None:
            # Every row needs a completion, so even a row whose `reset` failed gets its first turn.
            self.turn = Turn(0, everyone.places, [0] * len(contexts), [most] * len(contexts), self._prompts)
            return everyone
        loop = self._loop
        rows = loop.advance()
        places = []
        for place, row in enumerate(rows):
            if not self._has_failed(row) and not self._stopped(row):
                places.append(place)
        if not places:
            return TurnRows([], [], len(contexts))
        shown, budgets, last_messages = [], [], []
        for place in places:
            row = rows[place]
            prompt_length = len(loop.prompt_ids[row])
            shown.append(prompt_length + len(loop.completion_ids[row]))
            budgets.append(max(1, most - (len(contexts[place]) - prompt_length)))
            last_messages.append(_trailing_tool_messages(loop.prompts[row]))
        previous = self.turn.number if self.turn else 0
        self.turn = Turn(
            number=previous + 1,
            rows=[rows[place] for place in places],
            shown=shown,
            budgets=budgets,
            last_messages=last_messages,
        )
        return TurnRows([contexts[place] for place in places], places, len(contexts), budgets)

    def budgeted(self, turn_rows: TurnRows) -> AbstractContextManager[None]:
        """Let vLLM sample at most the `budgets` of the rows that get a turn."""
        if self.policy.serving is None or turn_rows.budgets is None:
            return nullcontext()
        return self.policy.serving.budgeted(turn_rows.contexts, turn_rows.budgets)

    def end(self, turn_rows: TurnRows, sampled: TurnTokens) -> TurnTokens:
        """Return a turn for every row for which TRL asks. The turn is empty for rows that got none."""
        token_ids, logprobs = sampled
        if len(turn_rows.places) == turn_rows.num_asked:
            return sampled
        completion_ids: list[list[int]] = [[] for _ in range(turn_rows.num_asked)]
        all_logprobs: list[list[float | None]] = [[] for _ in range(turn_rows.num_asked)]
        for i, place in enumerate(turn_rows.places):
            completion_ids[place] = token_ids[i]
            if logprobs is not None:
                all_logprobs[place] = logprobs[i]
        # If no row got a turn, the caller passes None without knowing whether the backend reports log-probabilities.
        # Return empty lists then: TRL reads them if the backend reports log-probabilities, and else ignores them.
        if logprobs is None and turn_rows.places:
            return completion_ids, None
        return completion_ids, all_logprobs

    def note_failures(self) -> None:
        """Set `failed` after the rollout of a batch. Every process calls it."""
        self.failed = self._failures()
        self._any_failed = self.policy.ranks.summed({"failed": sum(self.failed)})["failed"] > 0

    def known_rewards(
        self, known: list[list[float] | None] | None, *, num_rewards: int
    ) -> list[list[float] | None] | None:
        """Return `known` rewards `[B][F]`, with rewards of 0 for failed rows: reward functions are not asked about
        these rows. None if no reward is known."""
        if not self._any_failed:
            return known
        rewards: list[list[float] | None] = [None] * len(self.failed)
        if known is not None:
            rewards = list(known)
        zeros = [0.0] * num_rewards
        return [zeros if failed else reward for reward, failed in zip(rewards, self.failed, strict=True)]

    def void_rewards(self, rewards: torch.Tensor, metrics: dict[str, list[float]]) -> torch.Tensor:
        """Return rewards `(N, F)` with 0 for rows whose environment raised, and update `failed`. Log the number of
        these rows. Every process calls it."""
        if not self.tool_loop.environments:
            return rewards
        self.failed = self._failures()  # look again, because `get_reward` may have raised since `note_failures`
        failed = self.policy.ranks.gather(torch.tensor(self.failed, device=rewards.device))
        self._logged_errors = metrics["agent/environment_errors"]
        self._logged_errors.append(failed.sum().item())
        return rewards.masked_fill(failed.unsqueeze(1), 0.0)

    def stop_if_environments_died(self, save: Callable[[], str]) -> None:
        """
        Raise a RuntimeError if all environments of the last batches failed without a mistake of the model, and these
        are at least eight environments. Call this method after `void_rewards`, which notices failures of `get_reward`.
        Every process must call it.

        Args:
            save (`Callable[[], str]`):
                Writes a checkpoint if the run must stop. Returns a sentence about how to continue.
        """
        environments = self.tool_loop.environments or []
        if not environments:
            return
        broken = []  # environments that failed without a mistake of the model
        for environment, has_failed in zip(environments, self.failed, strict=True):
            if has_failed and not model_may_have_failed(environment):
                broken.append(environment)
        total = self.policy.ranks.summed({"broken": len(broken), "rows": len(environments)})
        self._broken.add(failed=total["broken"], total=total["rows"])
        last_error = environment_error(broken[-1]) if broken else None
        stop_if_long(self._broken, "environment", last_error, save)

    def add_errors(self, number: float) -> None:
        """Add the failed environments of branches to the logged number of this batch."""
        self._logged_errors[-1] += number

    def parse_turn(self, row: int, context: list[int], token_ids: list[int]) -> dict[str, Any]:
        """Parse a turn as TRL does. Return its message, which has `tool_calls` if the turn calls tools. `context` are
        the tokens before the turn."""
        options: dict[str, Any] = {}
        # Since version 1.16, TRL uses the types of a tool's parameters to parse its arguments.
        if "tools" in signature(parse_response).parameters:
            options["tools"] = self.tool_loop.tools_of(row)
        return parse_response(self.policy.tokenizer, token_ids, prefix=context, **options)

    def encode_conversation(self, row: int, conversation: list[dict[str, Any]]) -> list[int]:
        """Return the tokens of a conversation, with the tools of a row's environment and the generation prompt."""
        if self.tool_loop.factories is None:
            return self.policy.encode_prompts([conversation])[0]
        with self.tool_loop.working_on(names=[self.tool_loop.names[row]]):
            return self.policy.encode_prompts([conversation])[0]

    def _has_failed(self, row: int) -> bool:
        environments = self.tool_loop.environments
        return environments is not None and environment_error(environments[row]) is not None

    def _failures(self) -> list[bool]:
        """Return whether the environment of each row has raised, `[B]`. Warn if any has."""
        errors = [environment_error(environment) for environment in self.tool_loop.environments or []]
        error = next((error for error in errors if error is not None), None)
        if error is not None:
            warnings.warn(
                f"an environment raised {type(error).__name__}: {error}. Its trajectory ended with reward 0, and so "
                "will others; `agent/environment_errors` counts them. A tool that wants to tell the model something "
                "should return it.",
                stacklevel=2,
            )
        return [error is not None for error in errors]


def guarded_factories(environment_factory: Any) -> Any:
    """Return the user's `environment_factory`, changed so that a failing environment ends only its trajectory."""
    if environment_factory is None:
        return None
    if isinstance(environment_factory, dict):
        return {name: guarded(factory) for name, factory in environment_factory.items()}
    return guarded(environment_factory)


def _trailing_tool_messages(conversation: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the answers of tools at the end of a conversation."""
    first = len(conversation)
    while first and conversation[first - 1]["role"] == "tool":
        first -= 1
    return conversation[first:]
