"""Rewards to one number per row, and which rows carry a learning signal."""

from collections.abc import Sequence

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


def equal_rewards(
    rewards_per_func: torch.Tensor,
    weights: torch.Tensor,
    *,
    group_size: int,
    per_function: bool = False,
    tolerance: float = 1e-6,
) -> torch.Tensor:
    """
    Rows of groups whose completions are all worth the same, so that GRPO has nothing to compare. Rounding leaves
    advantages of up to 1e-3 there, which a look at the advantages does not tell from small ones.

    Args:
        rewards_per_func (`torch.Tensor`):
            Rewards of shape `(N, F)` over all processes, groups contiguous; NaN where a reward function returned
            `None`, which compares with nothing.
        weights (`torch.Tensor`):
            Weight of each reward function, shape `(F,)`.
        group_size (`int`):
            Rows per prompt G.
        per_function (`bool`, *optional*, defaults to `False`):
            Whether advantages are formed per function and then summed (`"normalize_then_sum"`): then each function's
            rewards must be equal, not only their totals.
        tolerance (`float`, *optional*, defaults to `1e-6`):
            Largest difference that counts as rounding, relative to the size of what is summed.

    Returns:
        `torch.Tensor`: Boolean mask of shape `(N,)`.
    """
    terms = rewards_per_func * weights.to(rewards_per_func.device)
    values = terms if per_function else combine_rewards(rewards_per_func, weights).unsqueeze(1)
    sizes = terms.abs() if per_function else terms.abs().nansum(dim=1, keepdim=True)
    values, sizes = (t.view(-1, group_size, t.shape[1]) for t in (values, sizes))
    unknown = values.isnan()
    spread = values.masked_fill(unknown, -torch.inf).amax(dim=1) - values.masked_fill(unknown, torch.inf).amin(dim=1)
    equal = (spread <= tolerance * sizes.nan_to_num().amax(dim=1)).all(dim=1)
    return equal.repeat_interleave(group_size)


def success_rewards(
    rewards_per_func: torch.Tensor, weights: torch.Tensor, names: Sequence[str], success_reward: str | None
) -> torch.Tensor:
    """
    The reward of each row that decides whether it succeeded.

    Args:
        rewards_per_func (`torch.Tensor`):
            Rewards of shape `(N, F)`; NaN where a reward function returned `None`.
        weights (`torch.Tensor`):
            Weight of each reward function, shape `(F,)`.
        names (`Sequence[str]`):
            Names of the reward functions, `[F]`.
        success_reward (`str` or `None`):
            The function whose reward decides, as it returned it; `None` for the weighted sum of all.

    Returns:
        `torch.Tensor`: Shape `(N,)`; NaN where what decides is unknown.
    """
    if success_reward is None:
        return combine_rewards(rewards_per_func, weights)
    return rewards_per_func[:, list(names).index(success_reward)]


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
