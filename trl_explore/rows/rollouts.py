"""What a method samples: continuations of token prefixes, and rows (prompt, completion, loss mask) made of them.

Dimension letters used throughout the package: P prompts, G generations per prompt, B = P·G rows on this process,
N rows over all processes, R sampling requests, K siblings, T completion tokens, F reward functions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol


@dataclass(frozen=True)
class Continuation:
    """
    Tokens sampled after a prefix.

    Args:
        token_ids (`list[int]`):
            Sampled tokens, the end-of-sequence token included where one was sampled. Never empty.
        logprobs (`list[float]`, *optional*):
            Log-probability of each sampled token under the sampler, where the backend reports it; `None` for a token
            without one.
        entropies (`list[float]`, *optional*):
            Entropy of the distribution that each token was drawn from, in nats, where it was asked for.
        finished (`bool`, *optional*, defaults to `True`):
            Whether the continuation ended with an end-of-sequence token, and not because its budget ran out.
    """

    token_ids: list[int]
    logprobs: list[float | None] | None = None
    finished: bool = True
    entropies: list[float] | None = None


class Sampler(Protocol):
    """The one way a method asks the policy for tokens: all prefixes of a stage in one call."""

    def __call__(
        self, prefixes: list[list[int]], num_samples: int | Sequence[int], max_new_tokens: int | Sequence[int]
    ) -> list[list[Continuation]]:
        """
        Sample continuations of every prefix.

        Args:
            prefixes (`list[list[int]]`):
                Token ids of each request's prompt and partial completion, `[R][T_i]`.
            num_samples (`int` or `Sequence[int]`):
                Continuations per request.
            max_new_tokens (`int` or `Sequence[int]`):
                Budget of new tokens per request.

        Returns:
            `list[list[Continuation]]`: `[R][num_samples_i]`.
        """
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
    """
    Completions sampled for the prompts of a batch, exactly one per row.

    Args:
        completion_ids (`list[list[int]]`):
            Completion tokens `[B][T_i]`.
        logprobs (`list[list[float]]`, *optional*):
            Log-probabilities under the sampler, `[B][T_i]`, where the backend reports them.
        loss_mask (`list[list[int]]`, *optional*):
            1 where a token is trained, 0 where it only conditions, `[B][T_i]`; all are trained by default.
        known_rewards (`list[list[float]]`, *optional*):
            Rewards `[F]` of rows that the method scored while sampling, `[B]`; no row is scored twice.
        extra (`Sequence[Mapping[str, Any]]`, *optional*):
            What the reward functions logged beside then, by column, `[B]`.
    """

    completion_ids: list[list[int]]
    logprobs: list[list[float | None]] | None = None
    loss_mask: list[list[int]] | None = None
    known_rewards: list[list[float]] | None = None
    extra: Sequence[Mapping[str, Any]] | None = None


@dataclass
class Rows:
    """
    Ragged training rows that are already sampled, in groups of `group_size` consecutive siblings.

    Args:
        examples (`list[dict]`):
            The data-set example behind each row; its columns reach the reward functions as for the main rows. `[B]`.
        prompt_ids (`list[list[int]]`):
            Prompt tokens `[B][P_i]`.
        completion_ids (`list[list[int]]`):
            Completion tokens, shared prefix and new suffix, `[B][T_i]`.
        loss_mask (`list[list[int]]`):
            1 where a token is trained, 0 where it only conditions, `[B][T_i]`.
        group_size (`int`):
            Siblings per group; advantages are normalised inside a group.
        logprobs (`list[list[float]]`, *optional*):
            Log-probabilities under the sampler, `[B][T_i]`.
        known_rewards (`list[list[float] | None]`):
            Rewards `[F]` of rows that were scored before; `None` asks the reward functions. `[B]`.
        completions (`list[list[dict] | None]`):
            What rows of several turns say, as messages; `None` leaves it to TRL to decode the tokens. `[B]`.
        parents (`list[int | None]`):
            Main row of the same process that each row leaves; `None` where it is of an earlier batch. `[B]`.
    """

    examples: list[dict[str, Any]]
    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    loss_mask: list[list[int]]
    group_size: int
    logprobs: list[list[float | None]] | None = None
    known_rewards: list[list[float] | None] = field(default_factory=list)
    completions: list[list[dict[str, Any]] | None] = field(default_factory=list)
    parents: list[int | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.known_rewards:
            self.known_rewards = [None] * len(self)
        if not self.completions:
            self.completions = [None] * len(self)
        if not self.parents:
            self.parents = [None] * len(self)
        counts = {
            "examples": len(self.examples),
            "prompt_ids": len(self.prompt_ids),
            "loss_mask": len(self.loss_mask),
            "known_rewards": len(self.known_rewards),
            "completions": len(self.completions),
            "parents": len(self.parents),
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
        Append rows that train nothing, so that every process scores the same number.

        Args:
            num_rows (`int`):
                Number of rows wanted, a multiple of the group size.
            example (`dict`):
                Any example of this process, so that the rows have its columns.
            token_id (`int`):
                An end-of-sequence token, the only token of the appended completions.
            num_rewards (`int`):
                Number of reward functions F; the appended rows count as unscorable (NaN) for each.

        Returns:
            [`Rows`]: These rows followed by the appended ones, whose loss mask is 0.
        """
        extra = num_rows - len(self)
        return replace(
            self,
            examples=self.examples + [dict(example) for _ in range(extra)],
            prompt_ids=self.prompt_ids + [[token_id]] * extra,
            completion_ids=self.completion_ids + [[token_id]] * extra,
            loss_mask=self.loss_mask + [[0]] * extra,
            logprobs=None if self.logprobs is None else self.logprobs + [[0.0]] * extra,
            known_rewards=self.known_rewards + [[float("nan")] * num_rewards] * extra,
            completions=self.completions + [None] * extra,
            parents=self.parents + [None] * extra,
        )
