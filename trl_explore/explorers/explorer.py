"""The interface of an explorer, and the objects that it receives and returns.

An explorer samples completions of prompts in its own way. It gets prompts and returns completions, with their credit
if it differs from GRPO's. It never sets attributes of the trainer, so one run can have several explorers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from trl_explore.rows.policy import Policy
from trl_explore.rows.rollouts import Rollout
from trl_explore.rows.scorer import Scorer
from trl_explore.rows.streams import RowDict
from trl_explore.sampling.sampler import Sampler

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

    example: dict[str, Any]  # row of the data set; copy it before you change it
    prompt_ids: list[int]
    samples: Sequence[Sample] = ()  # GRPO's completions of this prompt; empty if GRPO sampled none


@dataclass
class Explored:
    """R completions that an explorer sampled for one prompt."""

    completion_ids: list[list[int]]  # `[R][T_i]`
    logprobs: list[list[float | None]] | None = None  # under the sampler, `[R][T_i]`; None: not known
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
    """

    name = ""  # for error messages
    needs_samples = False  # True if `explore` reads `PromptGroup.samples`: GRPO then samples every prompt first
    args: Any  # the trainer's configuration; a subclass may narrow the type
    plain_columns: Mapping[str, Any] = {}  # the column names of `Explored.columns`, with the value for rows of GRPO

    def __init__(self, policy: Policy, sample: Sampler, scorer: Scorer) -> None:
        self.policy, self.sample, self.scorer = policy, sample, scorer
        self.args = policy.args

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
        if not any(one.advantages for one in explored):
            return rows["advantages"]
        ids = rows["completion_ids"]
        advantages = torch.zeros(ids.shape, device=ids.device)  # (R, T)
        row = 0
        for one in explored:
            for values in one.advantages or []:
                advantages[row, : len(values)] = torch.tensor(values)
                row += 1
        return advantages

    def state_dict(self) -> dict[str, Any]:
        """Return the explorer's state for the checkpoint: tensors, numbers, strings, and containers of these."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""

    def files(self) -> list[str]:
        """Return the names of the files and folders in `output_dir` that the explorer writes."""
        return []


def split_rollout(rollout: Rollout, size: int) -> list[Explored]:
    """Split a rollout into prompts. Each prompt has `size` consecutive completions."""
    explored = []
    for start in range(0, len(rollout.completion_ids), size):
        rows = slice(start, start + size)
        logprobs = None if rollout.logprobs is None else rollout.logprobs[rows]
        explored.append(Explored(rollout.completion_ids[rows], logprobs))
    return explored


def check_explored(name: str, explored: Sequence[Explored], *, num_prompts: int, size: int) -> None:
    """
    Check that an explorer returned one result per prompt, `size` completions per result, and one value per token.

    Raises:
        ValueError: If a number is wrong. The message names the explorer and the number.
    """
    if len(explored) != num_prompts:
        raise ValueError(f"Explorer {name!r} returned {len(explored)} results for {num_prompts} prompts.")
    for one in explored:
        if len(one.completion_ids) != size:
            raise ValueError(
                f"Explorer {name!r} returned {len(one.completion_ids)} completions for a prompt, but a prompt has "
                f"`num_generations={size}` rows: return as many."
            )
        for field_name, values in (
            ("logprobs", one.logprobs),
            ("loss_mask", one.loss_mask),
            ("advantages", one.advantages),
        ):
            if values is None:
                continue
            lengths = [len(row) for row in values]
            expected = [len(ids) for ids in one.completion_ids]
            if lengths != expected:
                raise ValueError(
                    f"Explorer {name!r} returned `{field_name}` of lengths {lengths} for completions of {expected} "
                    "tokens: give one value for each token."
                )
