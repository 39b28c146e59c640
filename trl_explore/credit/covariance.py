"""Clip-Cov and KL-Cov (https://huggingface.co/papers/2505.22617): the few tokens that drive entropy down."""

import torch

# Two forward passes in float32 give the same log-probability up to this, for example if rows share prefixes.
ROUNDING = 1e-5


def covariances(
    advantages: torch.Tensor, logprobs: torch.Tensor, *, mean_advantage: float, mean_logprob: float
) -> torch.Tensor:
    """What each token adds to the covariance of advantage and log-probability, of the shape of both."""
    return (advantages - mean_advantage) * (logprobs - mean_logprob)


def share_of(fraction: float, num_tokens: int) -> int:
    """How many tokens a fraction above 0 are: at least one."""
    return max(int(fraction * num_tokens), 1)


def num_largest(values: list[list[float]], number: int, *, process: int) -> int:
    """How many of the `number` largest values are a process's: its own largest ones. `values` are each process's,
    descending; of equal ones, those of the first process come first."""
    order = sorted((-value, index) for index, own in enumerate(values) for value in own)
    return sum(index == process for _, index in order[:number])


def with_penalty(
    advantages: torch.Tensor, log_ratios: torch.Tensor, chosen: torch.Tensor, *, coef: float
) -> torch.Tensor:
    """
    Return advantages `(B, T)` that add a penalty at `chosen` tokens.

    With them, `-ratio * advantage` has the gradient of `-ratio * advantage + coef * |log_ratio|`. A token whose log
    ratio is within `ROUNDING` of 0 has not moved and gets no penalty: the penalty has a slope of `coef` on either side
    of 0, so that the sign of a rounding error would decide its direction.
    """
    directions = log_ratios.sign().masked_fill(log_ratios.abs() <= ROUNDING, 0.0)
    penalised = advantages - coef * directions * (-log_ratios).exp()
    return torch.where(chosen, penalised, advantages)
