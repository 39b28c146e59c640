"""What a method samples: continuations of token prefixes, and rows (prompt, completion, loss mask) made of them.

Dimension letters used throughout the package: P prompts, G generations per prompt, B = P·G rows on this process,
N rows over all processes, R sampling requests, K siblings, T completion tokens, F reward functions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from trl_explore.rows.copies import own_copy


@dataclass(frozen=True)
class Continuation:
    """Tokens sampled after a prefix."""

    token_ids: list[int]  # with the end-of-sequence token, where one was sampled; never empty
    logprobs: list[float | None] | None = None  # under the sampler; `None` where the backend reports none
    finished: bool = True  # by an end-of-sequence token, not by the end of its budget
    entropies: list[float] | None = None  # of the distribution that each token was drawn from, in nats


@dataclass(frozen=True)
class Part:
    """Place of a row's new tokens in its completion, for options that count from the start of a completion."""

    begun: int = 0  # tokens of the completion that the prefix ends with
    limit: int | None = None  # most tokens of the whole completion; None: those of the call


class Sampler(Protocol):
    """The one way a method asks the policy for tokens: all prefixes of a stage in one call."""

    def __call__(
        self, prefixes: list[list[int]], num_samples: int | Sequence[int], max_new_tokens: int | Sequence[int]
    ) -> list[list[Continuation]]:
        """Continuations `[R][num_samples_i]` of prefixes `[R][T_i]` (prompt and partial completion), each of at most
        `max_new_tokens` new tokens."""
        ...


def per_request(value: int | Sequence[int], num_requests: int, *, name: str) -> list[int]:
    """One number for all of a call's requests, or one for each, as a list. ValueError, which calls it `name`, if the
    counts differ or a number is smaller than 1."""
    values = [value] * num_requests if isinstance(value, int) else list(value)
    if len(values) != num_requests:
        raise ValueError(f"`{name}` has {len(values)} entries for {num_requests} prefixes; pass one per prefix.")
    if any(v < 1 for v in values):
        raise ValueError(f"`{name}` must be at least 1 for every prefix, got {min(values)}.")
    return values


@dataclass
class Rollout:
    """Completions sampled for the prompts of a batch, exactly one per row."""

    completion_ids: list[list[int]]  # `[B][T_i]`
    logprobs: list[list[float | None]] | None = None  # under the sampler, `[B][T_i]`
    loss_mask: list[list[int]] | None = None  # 1 trained, 0 only conditions, `[B][T_i]`; all are trained by default
    known_rewards: list[list[float]] | None = None  # `[B][F]` where scored while sampling; no row is scored twice
    extra: Sequence[Mapping[str, Any]] | None = None  # what the reward functions logged then, by column, `[B]`


@dataclass
class Rows:
    """Ragged training rows that are already sampled, in groups of `group_size` consecutive siblings."""

    examples: list[dict[str, Any]]  # the data-set example behind each row, for the reward functions, `[B]`
    prompt_ids: list[list[int]]  # `[B][P_i]`
    completion_ids: list[list[int]]  # shared prefix and new suffix, `[B][T_i]`
    loss_mask: list[list[int]]  # 1 trained, 0 only conditions, `[B][T_i]`
    group_size: int  # advantages are normalised inside a group
    logprobs: list[list[float | None]] | None = None  # under the sampler, `[B][T_i]`
    known_rewards: list[list[float] | None] = field(default_factory=list)  # [F] per row; `None`: ask the functions
    extra: Sequence[Mapping[str, Any]] = ()  # what the functions logged with known rewards, by column, `[B]`
    completions: list[list[dict[str, Any]] | None] = field(default_factory=list)  # messages, `[B]`; `None`: decoded
    parents: list[int | None] = field(default_factory=list)  # main row here that each leaves; `None`: earlier batch
    shared: list[int] = field(default_factory=list)  # tokens that each has of it; by default those not trained before

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
        if len(self) % self.group_size:
            raise ValueError(f"{len(self)} rows do not form whole groups of {self.group_size} siblings.")

    def __len__(self) -> int:
        return len(self.completion_ids)

    def padded(self, num_rows: int, *, example: dict[str, Any], token_id: int, num_rewards: int) -> "Rows":
        """
        Return copies of these rows, filled up to `num_rows` with rows that train nothing: all processes score equally
        many.

        Reward functions may change what they are given, so each row of the result owns its example, its messages and
        its tokens. A row that trains nothing has loss mask 0, one end-of-sequence `token_id` and NaN rewards;
        `example` only gives it columns. `num_rows` is a multiple of the group size.
        """
        extra = num_rows - len(self)
        return replace(
            self,
            examples=[own_copy(row) for row in [*self.examples, *[example] * extra]],
            prompt_ids=self.prompt_ids + [[token_id]] * extra,
            completion_ids=[[*ids] for ids in [*self.completion_ids, *[[token_id]] * extra]],
            loss_mask=self.loss_mask + [[0]] * extra,
            logprobs=None if self.logprobs is None else self.logprobs + [[0.0]] * extra,
            known_rewards=self.known_rewards + [[float("nan")] * num_rewards] * extra,
            extra=[*self.extra, *[{}] * extra],
            completions=[own_copy(messages) for messages in [*self.completions, *[None] * extra]],
            parents=self.parents + [None] * extra,
            shared=self.shared + [0] * extra,
        )
