"""The interface of an explorer, and the objects that it receives and returns.

An explorer samples completions of prompts in its own way. It gets prompts and returns completions, with their credit
if it differs from GRPO's. It never sets attributes of the trainer, so one run can have several explorers.
"""

import math
import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from trl_explore.rows.policy import Policy
from trl_explore.rows.rollouts import Rollout
from trl_explore.rows.scorer import Scorer
from trl_explore.rows.streams import RowDict
from trl_explore.sampling.sampler import Sampler

if TYPE_CHECKING:
    from trl_explore.trainers.config import ExplorationConfig

# GRPO's own sampling: it returns one completion for each list of prompt tokens.
PlainSampling = Callable[[list[list[int]]], Rollout]


@dataclass(frozen=True)
class Sample:
    """A completion that GRPO sampled."""

    token_ids: list[int]
    rewards: list[float]  # `[F]`; NaN if a reward function returned None


@dataclass(frozen=True)
class PromptGroup:
    """A prompt of the generation batch."""

    example: dict[str, Any]  # copy of the row of the data set
    prompt_ids: list[int]
    samples: Sequence[Sample] = ()  # GRPO's completions of this prompt; empty if GRPO sampled none


@dataclass
class Explored:
    """R completions that an explorer sampled for one prompt."""

    completion_ids: list[list[int]]  # `[R][T_i]`
    logprobs: list[list[float | None]] | None = None  # under the sampling policy, `[R][T_i]`; None: not known
    loss_mask: list[list[int]] | None = None  # 1 for a token that is trained, else 0, `[R][T_i]`; None: train all
    rewards: list[list[float]] | None = None  # `[R][F]`; None: the trainer asks the reward functions
    logged: Sequence[Mapping[str, Any]] = ()  # values that reward functions logged with `log_extra`, by column, `[R]`
    advantages: list[list[float]] | None = None  # per token, `[R][T_i]`; None: GRPO's, computed over the R completions
    columns: dict[str, list[Any]] = field(default_factory=dict)  # columns of the completions table, `[R]` each


class Explorer:
    """
    Base class of explorers, which sample `num_generations` completions of a prompt in their own way.

    Every process calls each method the same number of times, even if it has no prompt to explore.

    Args:
        policy ([`~trl_explore.rows.policy.Policy`]):
            The trainer. `policy.args` is its configuration, and `policy.log_metric(name, value)` logs a metric.
        sample ([`~trl_explore.sampling.sampler.Sampler`]):
            Samples continuations of token prefixes.
        scorer ([`~trl_explore.rows.scorer.Scorer`]):
            Asks the reward functions about completions.
        args ([`~trl_explore.trainers.ExplorationConfig`], *optional*):
            The explorer's configuration. By default, the trainer's. With `explore="auto"`, each explorer has its own.
    """

    name = ""  # for error messages
    needs_samples = False  # True if `explore` reads `PromptGroup.samples`: GRPO then samples every prompt first
    args: "ExplorationConfig"  # the configuration; a subclass may narrow the type
    plain_columns: Mapping[str, Any] = {}  # the column names of `Explored.columns`, with the value for rows of GRPO

    def __init__(
        self, policy: Policy, sample: Sampler, scorer: Scorer, *, args: "ExplorationConfig | None" = None
    ) -> None:
        self.policy, self.sample, self.scorer = policy, sample, scorer
        self.args = args or policy.args

    @property
    def max_completion_length(self) -> int:
        """Return the maximum number of tokens of a completion. If your explorer reads it, its trainer must refuse
        `max_completion_length=None`."""
        length = self.args.max_completion_length
        assert length is not None
        return length

    def explore(self, groups: Sequence[PromptGroup], plain: PlainSampling) -> list[Explored]:
        """
        Sample completions of prompts.

        Args:
            groups (`Sequence[PromptGroup]`):
                This process's prompts to explore; may be empty. A prompt has `samples` if GRPO sampled it first, for
                example if `needs_samples` is True or with `explore_prompts="unsolved"`.
            plain (`Callable[[list[list[int]]], Rollout]`):
                GRPO's own sampling: it returns one completion for each list of prompt tokens.

        Returns:
            `list[Explored]`: `num_generations` completions of each prompt, in the order of `groups`.
        """
        raise NotImplementedError

    def credit(self, explored: Sequence[Explored], rows: RowDict) -> torch.Tensor:
        """
        Return the advantages of the explored rows: `Explored.advantages` if an explorer set them, else GRPO's.

        Args:
            explored (`Sequence[Explored]`):
                The completions that `explore` returned. All of them have rewards.
            rows (`dict`):
                The same completions as TRL scored them, R rows. `rows["advantages"]` holds GRPO's advantages, `(R,)`.

        Returns:
            `torch.Tensor`: Advantages of shape `(R,)` or `(R, T)`.
        """
        if all(one.advantages is None for one in explored):
            return rows["advantages"]
        num_tokens = rows["completion_ids"].shape[1]
        advantages = rows["advantages"].unsqueeze(1).repeat(1, num_tokens)  # (R, T)
        row = 0
        for one in explored:
            for place in range(len(one.completion_ids)):
                if one.advantages is not None:  # else the row keeps GRPO's advantage
                    values = one.advantages[place]
                    advantages[row] = 0.0  # on the padding after the completion
                    advantages[row, : len(values)] = torch.tensor(values)
                row += 1
        return advantages

    def state_dict(self) -> dict[str, Any]:
        """Return the explorer's state for the checkpoint: tensors, numbers, strings, and containers of these."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""

    def forget_data(self) -> None:
        """Drop all state about prompts. Called after a user replaced `train_dataset`."""


def split_rollout(rollout: Rollout, size: int) -> list[Explored]:
    """Split a rollout into prompts. Each prompt has `size` consecutive completions."""
    explored = []
    for start in range(0, len(rollout.completion_ids), size):
        rows = slice(start, start + size)
        logprobs = None if rollout.logprobs is None else rollout.logprobs[rows]
        explored.append(Explored(rollout.completion_ids[rows], logprobs))
    return explored


def check_explored(
    name: str,
    explored: Any,
    *,
    num_prompts: int,
    size: int,
    num_rewards: int,
    max_length: int | None,
    columns: Collection[str] = (),
) -> None:
    """
    Check the result of an explorer.

    Args:
        name (`str`):
            Name of the explorer, for messages.
        explored:
            The explorer's result.
        num_prompts (`int`):
            Number of prompts that it was given.
        size (`int`):
            Number of completions per prompt.
        num_rewards (`int`):
            Number of reward functions (F).
        max_length (`int`, *optional*):
            Maximum number of tokens of a completion. None: no limit.
        columns (`Collection[str]`, *optional*):
            Names of the columns that the explorer declares in `plain_columns`.

    Raises:
        ValueError: If something is wrong. The message names the explorer, the field, the value and the remedy.
    """
    start = f"Explorer {name!r} returned"
    if not isinstance(explored, list | tuple) or not all(isinstance(one, Explored) for one in explored):
        raise ValueError(f"{start} {reprlib.repr(explored)}: return a list with one `Explored` for each prompt.")
    if len(explored) != num_prompts:
        raise ValueError(f"{start} {len(explored)} results for {num_prompts} prompts.")
    for one in explored:
        _check_completions(start, one.completion_ids, size=size, max_length=max_length)
        lengths = [len(ids) for ids in one.completion_ids]
        for field_name, values in (
            ("logprobs", one.logprobs),
            ("loss_mask", one.loss_mask),
            ("advantages", one.advantages),
        ):
            if values is not None:
                _check_per_token(start, field_name, values, lengths)
        for values in one.advantages or []:
            if not all(math.isfinite(value) for value in values):
                raise ValueError(f"{start} `advantages` that are not finite: {reprlib.repr(values)}.")
        for values in one.loss_mask or []:
            if not all(value in (0, 1) for value in values):
                raise ValueError(f"{start} a `loss_mask` of {reprlib.repr(values)}: use 1 to train a token, else 0.")
        if one.columns.keys() != set(columns):
            raise ValueError(
                f"{start} the columns {sorted(one.columns)}, but its `plain_columns` has {sorted(columns)}: name each "
                "column in both."
            )
        for field_name, values in (*one.columns.items(), ("logged", one.logged or lengths)):
            if len(values) != len(lengths):
                raise ValueError(
                    f"{start} {len(values)} values in `{field_name}` for {len(lengths)} completions: give one value "
                    "for each completion."
                )
        if one.rewards is not None:
            _check_rewards(start, one.rewards, size=size, num_rewards=num_rewards)


def _check_completions(start: str, completion_ids: Any, *, size: int, max_length: int | None) -> None:
    if len(completion_ids) != size:
        raise ValueError(
            f"{start} {len(completion_ids)} completions for a prompt, but a prompt has `num_generations={size}` rows: "
            "return as many."
        )
    for ids in completion_ids:
        if isinstance(ids, str | int) or not isinstance(ids, Sized):
            raise ValueError(f"{start} {reprlib.repr(ids)} as a completion: give a list of token ids.")
        if len(ids) == 0:
            raise ValueError(f"{start} an empty completion: give at least one token.")
        if max_length is not None and len(ids) > max_length:
            raise ValueError(
                f"{start} a completion of {len(ids)} tokens, more than `max_completion_length={max_length}`: lower "
                "`max_new_tokens` by the number of tokens that are kept."
            )


def _check_per_token(start: str, field_name: str, values: Any, lengths: list[int]) -> None:
    found = [len(row) if isinstance(row, list | tuple) else 0 for row in values]
    if found != lengths:
        raise ValueError(
            f"{start} `{field_name}` of lengths {found} for completions of {lengths} tokens: give one list for each "
            "completion, with one value for each token."
        )


def _check_rewards(start: str, rewards: Any, *, size: int, num_rewards: int) -> None:
    found = [len(row) if isinstance(row, list | tuple) else 0 for row in rewards]
    if found != [num_rewards] * size:
        raise ValueError(
            f"{start} `rewards` with {found} values for {size} completions and {num_rewards} reward function(s): give "
            "one list for each completion, with one reward for each function."
        )
