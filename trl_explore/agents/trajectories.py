"""Trajectories of agents as they were rolled out, and other continuations of their prefixes."""

import copy
from dataclasses import dataclass, field
from typing import Any

from trl_explore.branches.choice import turns

Message = dict[str, Any]


@dataclass
class Trajectory:
    """
    A main row as it was rolled out.

    Args:
        prompt (`str` or `list[dict]`):
            The prompt as it was sampled from, with what the environment's `reset` observed.
        prompt_ids (`list[int]`):
            Its tokens.
        completion_ids (`list[int]`):
            Tokens of the policy and of the tools, `[T]`.
        loss_mask (`list[int]`):
            1 for tokens of the policy, `[T]`.
        messages (`list[dict]`, *optional*):
            What the completion says, turn by turn; `None` where it is plain text.
        states (`dict[int, Any]`):
            State of the environment before each of the last turns, by the number of the turn.
    """

    prompt: Any
    prompt_ids: list[int]
    completion_ids: list[int]
    loss_mask: list[int]
    messages: list[Message] | None = None
    states: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.turns = turns(self.loss_mask)

    def messages_before(self, turn: int) -> list[Message]:
        """
        Messages of the completion before a turn.

        Args:
            turn (`int`):
                Number of the turn, from 0.

        Returns:
            `list[dict]`: Copies of them.
        """
        if not self.messages:
            return []
        said = [place for place, message in enumerate(self.messages) if message["role"] == "assistant"]
        return copy.deepcopy(self.messages[: said[turn]])


@dataclass
class Branch:
    """
    Another continuation of a trajectory's prefix.

    Args:
        row (`int`):
            Main row that it leaves.
        turn (`int`):
            Turn that it starts with.
        start (`int`):
            Tokens of the completion before it.
        completion_ids (`list[int]`):
            Prefix and continuation, `[T]`.
        loss_mask (`list[int]`):
            1 for tokens of the policy, in the prefix too, `[T]`.
        messages (`list[dict]`, *optional*):
            What the completion says; `None` where it is plain text.
        environment (`Any`, *optional*):
            The environment after it.
        complete (`bool`):
            Whether it ended with a last word: not cut off, not at the limit of interactions, not by an exception.
        num_sampled (`int`):
            Tokens that the policy sampled for it.
        logprobs (`list[float]`, *optional*):
            Log-probabilities under the sampler, 0 in the prefix, `[T]`; `None` where the backend reports none.
        rewards (`list[float]`):
            Its rewards `[F]`, once it was judged.
    """

    row: int
    turn: int
    start: int
    completion_ids: list[int]
    loss_mask: list[int]
    messages: list[Message] | None
    environment: Any
    complete: bool
    num_sampled: int
    logprobs: list[float | None] | None = None
    rewards: list[float] = field(default_factory=list)
