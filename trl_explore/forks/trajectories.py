"""Completions, forks in them, and the branches that are sampled from a fork."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

Message = dict[str, Any]


def turns(loss_mask: Sequence[int]) -> list[tuple[int, int]]:
    """Return start and end (exclusive) of each response of the model. A response is a run of ones in the mask."""
    starts, ends = [], []
    # The zero at each end lets a response begin at the first token, and end at the last one.
    for token, (before, here) in enumerate(pairwise([0, *loss_mask, 0])):
        if here > before:
            starts.append(token)
        elif here < before:
            ends.append(token)
    return list(zip(starts, ends, strict=True))


def suffix_mask(loss_mask: Sequence[int], start: int) -> list[int]:
    """Return the loss mask `[T]` of a branch from token `start`: its prefix is not trained."""
    return [0] * start + list(loss_mask[start:])


@dataclass
class Trajectory:
    """A completion: a main row, or a branch of one."""

    row: int | None  # index of the main row on this process; None: the completion is from an earlier batch
    # Row of the data set. An agent's `prompt` also contains the observation that its environment's `reset` returned.
    example: dict[str, Any]
    prompt_ids: list[int]
    completion_ids: list[int]  # tokens of the policy and of tools, `[T]`
    loss_mask: list[int]  # 1 for a token of the policy, `[T]`
    messages: list[Message] | None = None  # messages of an agent's completion; None: plain text
    # Kept states of the environment before a turn, by turn. Only the latest turns of a main row have one.
    states: dict[int, Any] = field(default_factory=dict)
    logprobs: list[float | None] | None = None  # `[T]`; None if the backend reports none
    shared: int | None = None  # number of tokens that a branch shares with its main row; None: it is the main row

    def __post_init__(self) -> None:
        self.turns = turns(self.loss_mask)

    @property
    def main_row(self) -> int:
        """Return `row`. The completion must be from the current batch."""
        assert self.row is not None
        return self.row

    def turn_at(self, token: int) -> int:
        """Return the number of the turn, from 0, that contains `token`, the position of a token of the policy."""
        started = [first for first, _ in self.turns if first <= token]
        return len(started) - 1

    def messages_before(self, turn: int) -> list[Message]:
        """Return copies of the messages before a turn. Turns are counted from 0."""
        if not self.messages:
            return []
        assistant = [place for place, message in enumerate(self.messages) if message["role"] == "assistant"]
        return copy.deepcopy(self.messages[: assistant[turn]])


@dataclass(frozen=True)
class Fork:
    """A place in a completion from which branches are sampled. It lies in a response of the policy."""

    origin: Trajectory
    turn: int  # from 0
    number: int  # number of branches to sample
    start: int | None = None  # number of tokens that the branches keep; None: all tokens before the turn

    def check(self) -> None:
        """Raise TypeError if a field has a wrong type, or ValueError if the completion has no such place."""
        if not isinstance(self.origin, Trajectory):
            raise TypeError(
                f"`Fork(origin=...)` of a {type(self.origin).__name__}: give a trajectory; `branch.as_trajectory()` "
                "makes one of a branch."
            )
        for name, value in (
            ("turn", self.turn),
            ("number", self.number),
            ("start", 0 if self.start is None else self.start),
        ):
            if not isinstance(value, int):
                raise TypeError(f"`Fork({name}={value!r})`: give an integer.")
        num_turns = len(self.origin.turns)
        if not 0 <= self.turn < num_turns:
            raise ValueError(f"`Fork(turn={self.turn})`: the completion has the turns 0 to {num_turns - 1}.")
        first, end = self.origin.turns[self.turn]
        if not first <= self.prefix_length < end:
            raise ValueError(
                f"`Fork(turn={self.turn}, start={self.start})`: this turn has the tokens {first} to {end - 1}. Choose "
                "one of them, or leave `start` out. `trajectory.turn_at(token)` returns the turn of a token."
            )
        if self.number < 1:
            raise ValueError(f"`Fork(number={self.number})`: sample at least one branch, or leave the fork out.")

    @property
    def prefix_length(self) -> int:
        """Return the number of tokens of the completion that the branches keep."""
        return self.origin.turns[self.turn][0] if self.start is None else self.start

    @property
    def begun(self) -> int:
        """Return the number of tokens that the branches keep of the turn in which they fork."""
        return self.prefix_length - self.origin.turns[self.turn][0]


@dataclass
class Branch:
    """A continuation of a prefix of a completion."""

    origin: Trajectory  # the completion that it forks from
    turn: int  # turn in which it begins
    start: int  # number of tokens that it keeps of `origin`
    completion_ids: list[int]  # prefix and continuation, `[T]`
    loss_mask: list[int]  # 1 for a token of the policy, in the prefix too, `[T]`
    messages: list[Message] | None  # messages of an agent's completion; None: plain text
    environment: Any  # in its state after the branch
    complete: bool  # False: it was cut off, reached the limit of tool calls, or its environment raised
    num_sampled: int  # number of tokens that the policy sampled
    logprobs: list[float | None] | None = None  # of the prefix too, `[T]`; None if the backend reports none
    rewards: list[float] | None = None  # `[F]`; None if the reward functions were not asked yet
    extra: Mapping[str, Any] = field(default_factory=dict)  # values that the reward functions logged, by column
    states: dict[int, Any] = field(default_factory=dict)  # kept states of its environment before a turn, by turn

    @property
    def row(self) -> int:
        """Return the index of the main row that it comes from."""
        return self.origin.main_row

    @property
    def shared(self) -> int:
        """Return the number of tokens that it shares with its main row."""
        if self.origin.shared is None:
            return self.start
        return min(self.start, self.origin.shared)

    def as_trajectory(self) -> Trajectory:
        """Return the branch as a completion from which further branches can be sampled."""
        # Up to the turn of the fork, the branch has the messages of its origin, and so the states too.
        states = {turn: state for turn, state in self.origin.states.items() if turn <= self.turn}
        states.update(self.states)
        return replace(
            self.origin,
            completion_ids=self.completion_ids,
            loss_mask=self.loss_mask,
            messages=self.messages,
            states=states,
            logprobs=self.logprobs,
            shared=self.shared,
        )
