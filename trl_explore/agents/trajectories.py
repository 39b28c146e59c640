"""Trajectories of agents as they were rolled out, and other continuations of their prefixes."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

Message = dict[str, Any]


def turns(loss_mask: Sequence[int]) -> list[tuple[int, int]]:
    """Start and end (exclusive) of the model's responses, the maximal runs of ones."""
    flips = [token for token, (left, right) in enumerate(pairwise([0, *loss_mask, 0])) if left != right]
    return list(zip(flips[::2], flips[1::2], strict=True))


def suffix_mask(loss_mask: Sequence[int], start: int) -> list[int]:
    """Loss mask `[T]` of a branch from token `start`: the shared prefix is trained in the original's row only."""
    return [0] * start + list(loss_mask[start:])


@dataclass
class Trajectory:
    """A main row, or a branch of one, as it was rolled out."""

    row: int  # the main row
    prompt: Any  # as it was sampled from, with what the environment's `reset` observed
    prompt_ids: list[int]
    completion_ids: list[int]  # of the policy and of the tools, `[T]`
    loss_mask: list[int]  # 1 for tokens of the policy, `[T]`
    messages: list[Message] | None = None  # what the completion says; `None` where it is plain text
    states: dict[int, Any] = field(default_factory=dict)  # of the environment before each of the last turns, by turn
    logprobs: list[float | None] | None = None  # `[T]`; `None` where the backend reports none

    def __post_init__(self) -> None:
        self.turns = turns(self.loss_mask)

    def messages_before(self, turn: int) -> list[Message]:
        """Copies of the completion's messages before a turn, which count from 0."""
        if not self.messages:
            return []
        assistant = [place for place, message in enumerate(self.messages) if message["role"] == "assistant"]
        return copy.deepcopy(self.messages[: assistant[turn]])


@dataclass(frozen=True)
class Fork:
    """Where a trajectory is left, and how often: before a turn, or inside it."""

    origin: Trajectory
    turn: int  # from 0
    number: int  # of continuations
    start: int | None = None  # tokens of the completion that stay; by default those before the turn


@dataclass
class Branch:
    """Another continuation of a trajectory's prefix."""

    origin: Trajectory  # that it leaves
    turn: int  # that it starts with, or in
    start: int  # tokens of the completion before it
    completion_ids: list[int]  # prefix and continuation, `[T]`
    loss_mask: list[int]  # 1 for tokens of the policy, in the prefix too, `[T]`
    messages: list[Message] | None  # what the completion says; `None` where it is plain text
    environment: Any  # as it is after the branch
    complete: bool  # not cut off, not at the limit of interactions, not by an exception
    num_sampled: int  # tokens that the policy sampled for it
    logprobs: list[float | None] | None = None  # of the prefix too, `[T]`; `None` where the backend reports none
    rewards: list[float] = field(default_factory=list)  # `[F]`, once it was judged
    extra: Mapping[str, Any] = field(default_factory=dict)  # values that the reward functions logged, by column
    states: dict[int, Any] = field(default_factory=dict)  # of its environment before each turn, where they are kept

    @property
    def row(self) -> int:
        """The main row that it comes from."""
        return self.origin.row

    def as_trajectory(self) -> Trajectory:
        """What can be left in its turn."""
        return replace(
            self.origin,
            completion_ids=self.completion_ids,
            loss_mask=self.loss_mask,
            messages=self.messages,
            states={**{t: state for t, state in self.origin.states.items() if t <= self.turn}, **self.states},
            logprobs=self.logprobs,
        )
