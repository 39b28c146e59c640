"""Continuations of token prefixes, and training rows (prompt, completion, loss mask) made of continuations.

Dimension letters used throughout the package: P prompts, G generations per prompt, B = P·G rows on this process,
N rows over all processes, R sampling requests, K siblings, T completion tokens, F reward functions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trl_explore.rows.copies import own_copy


@dataclass(frozen=True)
class Continuation:
    """Tokens sampled after a prefix."""

    token_ids: list[int]  # including a sampled end-of-sequence token; never empty
    logprobs: list[float | None] | None = None  # under the sampling policy; None if the backend reports none
    finished: bool = True  # True: an end-of-sequence token was sampled; False: the token budget ended
    entropies: list[float] | None = None  # of the distribution that each token was sampled from, in nats


@dataclass(frozen=True)
class Part:
    """Position of a row's new tokens in its completion, for options that count from the start of a completion."""

    begun: int = 0  # number of completion tokens at the end of the prefix
    limit: int | None = None  # most tokens of the whole completion; None: `begun` plus the new tokens of the call


def per_request(value: int | Sequence[int], num_requests: int, *, name: str) -> list[int]:
    """Return one number per sampling request, `[R]`. `value` is one number for all requests, or one number per
    request. Raise a ValueError that names the argument `name` if the counts differ or a number is less than 1."""
    if isinstance(value, int):
        value = [value] * num_requests
    values = list(value)
    if len(values) != num_requests:
        raise ValueError(f"`{name}` has {len(values)} entries for {num_requests} prefixes; pass one per prefix.")
    if any(v < 1 for v in values):
        raise ValueError(f"`{name}` must be at least 1 for every prefix, got {min(values)}.")
    return values


@dataclass
class Rollout:
    """Sampled completions of a batch, one per row."""

    completion_ids: list[list[int]]  # `[B][T_i]`
    logprobs: list[list[float | None]] | None = None  # under the sampling policy, `[B][T_i]`
    loss_mask: list[list[int]] | None = None  # `[B][T_i]`; 1: trained, 0: context only; by default all are trained
    known_rewards: list[list[float]] | None = None  # `[B][F]`; set if the method scored the completions already
    extra: Sequence[Mapping[str, Any]] | None = None  # logged by reward functions with `known_rewards`, `[B]`


@dataclass
class Rows:
    """Sampled training rows of different lengths, in groups of `group_size` consecutive rows."""

    examples: list[dict[str, Any]]  # data-set row of each row, for the reward functions, `[B]`
    prompt_ids: list[list[int]]  # `[B][P_i]`
    completion_ids: list[list[int]]  # shared prefix and new suffix, `[B][T_i]`
    loss_mask: list[list[int]]  # `[B][T_i]`; 1: trained, 0: context only
    group_size: int  # advantages are normalized within a group
    logprobs: list[list[float | None]] | None = None  # under the sampling policy, `[B][T_i]`
    known_rewards: list[list[float] | None] = field(default_factory=list)  # `[B][F]`; None: call the functions
    extra: Sequence[Mapping[str, Any]] = ()  # values logged along with known rewards, by column, `[B]`
    completions: list[list[dict[str, Any]] | None] = field(default_factory=list)  # messages, `[B]`; None: decode
    # Number of the main row of this batch that each row branches from, `[B]`; None: a row of an earlier batch.
    parents: list[int | None] = field(default_factory=list)
    # Number of completion tokens that each row shares with its parent, `[B]`. Default: up to the first trained token.
    shared: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.known_rewards:
            self.known_rewards = [None] * len(self)
        if not self.extra:
            self.extra = [{}] * len(self)
        if not self.completions:
            self.completions = [None] * len(self)
        if not self.parents:
            self.parents = [None] * len(self)
        if not self.shared:
            self.shared = [[*mask, 1].index(1) for mask in self.loss_mask]
        counts = {
            "examples": len(self.examples),
            "prompt_ids": len(self.prompt_ids),
            "loss_mask": len(self.loss_mask),
            "known_rewards": len(self.known_rewards),
            "extra": len(self.extra),
            "completions": len(self.completions),
            "parents": len(self.parents),
            "shared": len(self.shared),
        }
        wrong = {name: count for name, count in counts.items() if count != len(self)}
        if wrong:
            raise ValueError(f"rows must agree in number: {len(self)} completions, but {wrong}.")
        if self.group_size < 1:
            raise ValueError(f"`group_size={self.group_size}`: a group has at least one row.")
        if len(self) % self.group_size:
            raise ValueError(f"{len(self)} rows do not form whole groups of {self.group_size} siblings.")

    def __len__(self) -> int:
        return len(self.completion_ids)

    def padded(self, num_rows: int, *, example: dict[str, Any], token_id: int, num_rewards: int) -> "Rows":
        """
        Return copies of these rows and of filler rows, `num_rows` in total. Every process must score the same number
        of rows.

        Reward functions may change their arguments, so each row of the result owns its example, its messages and its
        completion tokens. A filler row trains nothing: its loss mask is 0, its only token is the end-of-sequence
        `token_id`, and its rewards are NaN. It has the columns of `example`. `num_rows` is a multiple of the group
        size.
        """
        num_fill = num_rows - len(self)
        examples = [*self.examples, *[example] * num_fill]
        completion_ids = [*self.completion_ids, *[[token_id]] * num_fill]
        return replace(
            self,
            examples=[own_copy(row) for row in examples],
            prompt_ids=self.prompt_ids + [[token_id]] * num_fill,
            completion_ids=[[*ids] for ids in completion_ids],
            loss_mask=self.loss_mask + [[0]] * num_fill,
            logprobs=None if self.logprobs is None else self.logprobs + [[0.0]] * num_fill,
            known_rewards=self.known_rewards + [[float("nan")] * num_rewards] * num_fill,
            extra=[*self.extra, *[{}] * num_fill],
            completions=[own_copy(messages) for messages in [*self.completions, *[None] * num_fill]],
            parents=self.parents + [None] * num_fill,
            shared=self.shared + [0] * num_fill,
        )
