"""Rewards to one number per row, and which rows carry a learning signal."""

import torch


def combine_rewards(rewards_per_func: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """
    Weighted sum of the rewards of each row, as GRPO forms it.

    Args:
        rewards_per_func (`torch.Tensor`):
            Rewards of shape `(N, F)`; NaN where a reward function returned `None`.
        weights (`torch.Tensor`):
            Weight of each reward function, shape `(F,)`.

    Returns:
        `torch.Tensor`: Shape `(N,)`; NaN for rows that no reward function scored.
    """
    total = (rewards_per_func * weights.to(rewards_per_func.device)).nansum(dim=1)
    return total.masked_fill(rewards_per_func.isnan().all(dim=1), torch.nan)


def has_signal(advantages: torch.Tensor, *, tolerance: float = 1e-8) -> torch.Tensor:
    """
    Rows that can move the policy: at least one advantage differs from 0.

    Args:
        advantages (`torch.Tensor`):
            Advantages of shape `(B,)` or `(B, T)`.
        tolerance (`float`, *optional*, defaults to `1e-8`):
            Largest absolute advantage that counts as 0.

    Returns:
        `torch.Tensor`: Boolean mask of shape `(B,)`.
    """
    nonzero = advantages.abs() > tolerance
    return nonzero if nonzero.dim() == 1 else nonzero.any(dim=1)
