"""Clip-Cov and KL-Cov (https://huggingface.co/papers/2505.22617): find the tokens that reduce the entropy most."""

import torch

# Two forward passes in float32 give the same log-probability up to this, for example if rows share prefixes.
ROUNDING = 1e-5


def covariances(
    advantages: torch.Tensor, logprobs: torch.Tensor, *, mean_advantage: float, mean_logprob: float
) -> torch.Tensor:
    """Return the contribution of each token to the covariance of advantages and log-probabilities, `(N,)`. All tensors
    have the same shape."""
    return (advantages - mean_advantage) * (logprobs - mean_logprob)


def share_of(fraction: float, num_tokens: int) -> int:
    """Return `fraction` of `num_tokens`, at least 1."""
    return max(int(fraction * num_tokens), 1)


def num_largest(values: list[list[float]], number: int, *, process: int) -> int:
    """
    Return how many of the `number` largest values of all processes belong to one process.

    Args:
        values (`list[list[float]]`):
            Values of each process, in descending order. Of equal values, the value of the first process counts as
            larger.
        number (`int`):
            Number of values to choose from all processes.
        process (`int`):
            Index of the process.

    Returns:
        `int`: Number of chosen values of this process. They are its largest values.
    """
    order: list[tuple[float, int]] = []  # negative value and process
    for index, own in enumerate(values):
        order.extend((-value, index) for value in own)
    order.sort()
    return sum(index == process for _, index in order[:number])


def with_penalty(
    advantages: torch.Tensor, log_ratios: torch.Tensor, chosen: torch.Tensor, *, coef: float
) -> torch.Tensor:
    """
    Return advantages `(B, T)` that include a penalty for the `chosen` tokens, a mask `(B, T)`.

    With the returned advantages, the loss `-ratio * advantage` has the gradient of
    `-ratio * advantage + coef * |log_ratio|`. A token whose log ratio is within `ROUNDING` of 0 has not changed and
    gets no penalty. Otherwise, the sign of a rounding error would decide the direction of its gradient.
    """
    directions = log_ratios.sign().masked_fill(log_ratios.abs() <= ROUNDING, 0.0)
    penalised = advantages - coef * directions * (-log_ratios).exp()
    return torch.where(chosen, penalised, advantages)
