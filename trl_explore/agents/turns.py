"""TRL's tool loop, turn by turn: which rows speak, what they have seen, and whose environment has failed."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, Protocol

import torch
from trl.chat_template_utils import parse_response

from trl_explore.agents.environments import environment_error, guarded
from trl_explore.rows.policy import Policy

Spoken = tuple[list[list[int]], list[list[float | None]] | None]  # tokens and log-probabilities of a turn, per row


def _never(row: int) -> bool:
    return False


class World(Protocol):
    """TRL's tool loop, with the tools and environments that it works on. Lists with one entry per row are `[B]`."""

    @property
    def tools(self) -> list[Any]: ...  # of all rows

    @property
    def environments(self) -> list[Any] | None: ...  # of each row; None without environments

    @property
    def factories(self) -> dict[Any, Callable[[], Any]] | None: ...  # of environments, by name

    @property
    def pool(self) -> dict[Any, list[Any]]: ...  # environments that were made, by name

    @property
    def names(self) -> list[Any]: ...  # of each row's environment

    @property
    def several(self) -> bool: ...  # whether there are environments of several names

    @property
    def sync_tools(self) -> list[dict[str, Callable]]: ...  # functions that each row may call, by name

    @property
    def async_tools(self) -> list[dict[str, Callable]]: ...  # coroutine functions that each row may call, by name

    @property
    def async_loop(self) -> Any: ...  # runs coroutines

    @property
    def most_rounds(self) -> int: ...  # of tool calls

    @property
    def loop(self) -> Callable[..., tuple]: ...  # TRL's loop, which runs after the first turn of each row

    @property
    def encode_answers(self) -> Callable[[list[dict[str, Any]]], list[int]]: ...  # tokens between two turns

    def limit_rounds(self, number: int) -> None: ...  # let rows call tools in at most `number` rounds

    def tools_of(self, row: int) -> list[Any]: ...  # tools that a row of the batch may call

    def tools_by_environment(self) -> dict[Any, list[Any]]: ...  # by name; the name of the only one is None

    def working_on(
        self,
        *,
        environments: list[Any] | None = None,
        names: list[Any] | None = None,
        sync_tools: list[dict[str, Callable]] | None = None,
        async_tools: list[dict[str, Callable]] | None = None,
    ) -> AbstractContextManager[None]: ...  # let the loop work on other rows


@dataclass
class Turn:
    """One round of the tool loop."""

    number: int  # 0 for the first turn of the assistant
    rows: list[int]  # that speak now, in the order in which they are sampled
    shown: list[int]  # tokens of each before what its tools answered last; 0 in turn 0
    budgets: list[int]  # new tokens that each may still have, at least 1
    last_messages: list[list[dict[str, Any]]]  # shown last: the whole prompt in turn 0, its tools' answers later


@dataclass(frozen=True)
class Speaking:
    """Rows that speak in a turn."""

    contexts: list[list[int]]  # their tokens so far
    places: list[int]  # their places among the rows that TRL asks for a turn
    num_asked: int  # number of rows that TRL asks for a turn
    budgets: list[int] | None = None  # new tokens that each may still have; None: `max_completion_length`


@dataclass
class ToolLoop:
    """What TRL's loop works on and changes in place, all `[B]`."""

    prompts: list[list[dict[str, Any]]]
    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    num_messages: list[int] = field(default_factory=list)

    def advance(self) -> list[int]:
        """Rows with new messages: TRL takes back those of rows that may not go on."""
        before, self.num_messages = self.num_messages, [len(prompt) for prompt in self.prompts]
        return [row for row, (old, new) in enumerate(zip(before, self.num_messages, strict=True)) if new > old]


class Turns:
    """
    Follows TRL's tool loop and survives environments that raise.

    [`begin`] tells which rows speak in a turn, and [`end`] takes what they said; `turn` describes the turn between. A
    trajectory whose environment raised gets no further turn, and a reward of 0 from every reward function.
    """

    def __init__(self, policy: Policy, world: World) -> None:
        self.policy, self.world = policy, world
        self.turn: Turn | None = None
        self.failed: list[bool] = []  # rows of the last batch whose environment raised
        self._any_failed = False  # on some process
        self._loop: ToolLoop | None = None
        self._prompts: list = []
        self._stopped: Callable[[int], bool] = _never

    @contextmanager
    def of(self, prompts: list, stopped: Callable[[int], bool] = _never) -> Iterator[None]:
        """A batch, or branches of one, are rolled out; `stopped` tells rows that may not go on."""
        self._prompts, self._loop, self.turn, self._stopped = prompts, None, None, stopped
        try:
            yield
        finally:
            self._prompts, self._loop, self.turn, self._stopped = [], None, None, _never

    def loop_begins(self, prompts: list, prompt_ids: list[list[int]], completion_ids: list[list[int]]) -> None:
        """TRL's loop has all first turns."""
        self._loop = ToolLoop(prompts, prompt_ids, completion_ids, [len(prompt) for prompt in prompts])

    def begin(self, contexts: list[list[int]]) -> Speaking:
        """
        Begin a turn of every row that TRL asks for one; rows that may not go on do not speak.

        Args:
            contexts (`list[list[int]]`):
                Tokens of each of these rows so far.
        """
        everyone = Speaking(contexts, list(range(len(contexts))), len(contexts))
        if not self.world.tools or not self._prompts:
            return everyone
        most = self.policy.args.max_completion_length
        if self._loop is None:
            # Every row needs a completion: one whose `reset` failed ends after its first turn.
            self.turn = Turn(0, everyone.places, [0] * len(contexts), [most] * len(contexts), self._prompts)
            return everyone
        rows, loop = self._loop.advance(), self._loop
        places = [place for place, row in enumerate(rows) if not (self._has_failed(row) or self._stopped(row))]
        if not places:
            return Speaking([], [], len(contexts))
        shown, budgets, last_messages = [], [], []
        for place in places:
            row = rows[place]
            prompt_length = len(loop.prompt_ids[row])
            shown.append(prompt_length + len(loop.completion_ids[row]))
            budgets.append(max(1, most - (len(contexts[place]) - prompt_length)))
            last_messages.append(_trailing_tool_messages(loop.prompts[row]))
        self.turn = Turn(
            number=(self.turn.number if self.turn else 0) + 1,
            rows=[rows[place] for place in places],
            shown=shown,
            budgets=budgets,
            last_messages=last_messages,
        )
        return Speaking([contexts[place] for place in places], places, len(contexts), budgets)

    def budgeted(self, speaking: Speaking) -> AbstractContextManager[None]:
        """Let vLLM sample at most as many tokens as the rows that speak may still have."""
        if self.policy.serving is None or speaking.budgets is None:
            return nullcontext()
        return self.policy.serving.budgeted(speaking.contexts, speaking.budgets)

    def end(self, speaking: Speaking, spoken: Spoken) -> Spoken:
        """Return a turn for every row that TRL asked: empty for a row that did not speak."""
        token_ids, logprobs = spoken
        if len(speaking.places) == speaking.num_asked:
            return spoken
        completion_ids: list[list[int]] = [[] for _ in range(speaking.num_asked)]
        all_logprobs: list[list[float | None]] = [[] for _ in range(speaking.num_asked)]
        for i, place in enumerate(speaking.places):
            completion_ids[place] = token_ids[i]
            if logprobs is not None:
                all_logprobs[place] = logprobs[i]
        if logprobs is None and speaking.places:
            return completion_ids, None
        return completion_ids, all_logprobs

    def note_failures(self) -> None:
        """Look which environments have raised, once the batch is rolled out. Every process calls it."""
        self.failed = self._failures()
        self._any_failed = self.policy.ranks.summed({"failed": sum(self.failed)})["failed"] > 0

    def known_rewards(
        self, known: list[list[float] | None] | None, *, num_rewards: int
    ) -> list[list[float] | None] | None:
        """Rewards `[B][F]` that are known before the functions are asked: those of failed rows are 0."""
        if not self._any_failed:
            return known
        rewards = list(known) if known is not None else [None] * len(self.failed)
        zeros = [0.0] * num_rewards
        return [zeros if failed else reward for reward, failed in zip(rewards, self.failed, strict=True)]

    def void_rewards(self, rewards: torch.Tensor, metrics: dict[str, list[float]]) -> torch.Tensor:
        """Rewards `(N, F)` without those of rows whose environment raised, whose number is logged."""
        if not self.world.environments:
            return rewards
        # `get_reward` may have failed only now.
        failed = self.policy.ranks.gather(torch.tensor(self._failures(), device=rewards.device))
        metrics["agent/environment_errors"].append(failed.sum().item())
        return rewards.masked_fill(failed.unsqueeze(1), 0.0)

    def parse_turn(self, row: int, context: list[int], token_ids: list[int]) -> dict[str, Any]:
        """The message that TRL makes of a turn behind a context, with `tool_calls` where there are any."""
        # Below 1.16, TRL reads arguments without the types that the tools give them, and so do we.
        typed = {"tools": self.world.tools_of(row)} if "tools" in signature(parse_response).parameters else {}
        return parse_response(self.policy.tokenizer, token_ids, prefix=context, **typed)

    def encode_conversation(self, row: int, conversation: list[dict[str, Any]]) -> list[int]:
        """Tokens of a conversation with the tools of a row's environment, the generation prompt included."""
        if self.world.factories is None:
            return self.policy.encode_prompts([conversation])[0]
        with self.world.working_on(names=[self.world.names[row]]):
            return self.policy.encode_prompts([conversation])[0]

    def _has_failed(self, row: int) -> bool:
        environments = self.world.environments
        return environments is not None and environment_error(environments[row]) is not None

    def _failures(self) -> list[bool]:
        """Whether the environment of each row has raised, `[B]`; warns if one has."""
        errors = [environment_error(environment) for environment in self.world.environments or []]
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
    """What the user passed as `environment_factory`, with environments whose failures end a trajectory only."""
    if isinstance(environment_factory, dict):
        return {name: guarded(factory) for name, factory in environment_factory.items()}
    return None if environment_factory is None else guarded(environment_factory)


def _trailing_tool_messages(conversation: list[dict[str, Any]]) -> list[dict[str, Any]]:
    first = len(conversation)
    while first and conversation[first - 1]["role"] == "tool":
        first -= 1
    return conversation[first:]
