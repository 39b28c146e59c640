"""Turn the rewards of a row into one number, and find the rows that carry a learning signal."""

import math
from collections.abc import Sequence

import torch
from trl.trainer.utils import nanstd

RESIDUE = 2e-3  # rounding leaves advantages up to about half of this in a group of equal rewards


def combine_rewards(rewards_per_func: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum `(N,)` of rewards `(N, F)`, as GRPO computes it. NaN for rows that no function
    scored."""
    total = (rewards_per_func * weights.to(rewards_per_func.device)).nansum(dim=1)
    return total.masked_fill(rewards_per_func.isnan().all(dim=1), torch.nan)


def as_columns(totals: torch.Tensor, rewards_per_func: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return rewards `(N, F)` whose weighted sum is `totals`, `(N,)`. The column with the largest weight holds them,
    and the other columns are 0. A row whose total is NaN is NaN in all columns."""
    weights = weights.to(totals.device)
    column = int(weights.abs().argmax())
    columns = torch.zeros_like(rewards_per_func).masked_fill(totals.isnan().unsqueeze(1), torch.nan)
    columns[:, column] = totals / weights[column]
    return columns


def equal_rewards(
    rewards_per_func: torch.Tensor,
    weights: torch.Tensor,
    *,
    group_size: int,
    per_function: bool = False,
    tolerance: float = 1e-6,
) -> torch.Tensor:
    """
    Return the mask of the rows in groups of equal rewards.

    Do not look for such groups by their advantages: rounding leaves advantages of up to 1e-3 in them.

    Args:
        rewards_per_func (`torch.Tensor`):
            Rewards `(N, F)`, in groups of consecutive rows. NaN is ignored.
        weights (`torch.Tensor`):
            Weights of the reward functions, `(F,)`.
        group_size (`int`):
            Number of rows per group.
        per_function (`bool`, *optional*, defaults to `False`):
            If True, the rewards of each function must be equal. If False, only their weighted sum.
        tolerance (`float`, *optional*, defaults to `1e-6`):
            Largest difference that still counts as equal, relative to the size of the rewards.

    Returns:
        `torch.Tensor`: Boolean mask of shape `(N,)`.
    """
    terms = rewards_per_func * weights.to(rewards_per_func.device)
    if per_function:
        values, sizes = terms, terms.abs()
    else:
        values = combine_rewards(rewards_per_func, weights).unsqueeze(1)
        sizes = terms.abs().nansum(dim=1, keepdim=True)
    values = values.view(-1, group_size, values.shape[1])
    sizes = sizes.view(-1, group_size, sizes.shape[1])
    unknown = values.isnan()
    spread = values.masked_fill(unknown, -torch.inf).amax(dim=1) - values.masked_fill(unknown, torch.inf).amin(dim=1)
    equal = (spread <= tolerance * sizes.nan_to_num().amax(dim=1)).all(dim=1)
    return equal.repeat_interleave(group_size)


def success_rewards(
    rewards_per_func: torch.Tensor, weights: torch.Tensor, names: Sequence[str], success_reward: str | None
) -> torch.Tensor:
    """Return the reward `(N,)` that decides whether a row succeeded, from rewards `(N, F)`. This is the reward of the
    function `success_reward`, or the weighted sum of all rewards if `success_reward` is None. NaN if it is unknown."""
    if success_reward is None:
        return combine_rewards(rewards_per_func, weights)
    return rewards_per_func[:, list(names).index(success_reward)]


def relative_rewards(rewards: Sequence[float], *, scale: str = "group", eps: float = 1e-4) -> list[float]:
    """Return the advantages of one group, equal to GRPO's bit for bit: in float32 and in TRL's order of operations.
    `scale="group"` divides by the sample standard deviation. Rewards of NaN do not count, and their advantage is 0. If
    fewer than two rows have a reward, all advantages are 0."""
    values = torch.tensor(rewards, dtype=torch.float32)
    advantages = values - values.nanmean()
    if scale == "group":
        advantages = advantages / (nanstd(values) + eps)  # NaN with a single reward
    return advantages.nan_to_num(nan=0.0).tolist()


def contrasts(rewards: Sequence[float], *, scale: str = "group") -> list[float]:
    """Return [`relative_rewards`], or exactly 0 if all rewards are equal: rounding would leave up to 1e-3."""
    known = [reward for reward in rewards if not math.isnan(reward)] or [0.0]
    if max(known) - min(known) <= 1e-6 * max(map(abs, known)):
        return [0.0] * len(rewards)
    return relative_rewards(rewards, scale=scale)


def is_credit(value: float | Sequence[float]) -> bool:
    """Return whether an advantage, or one of the advantages of a row's tokens, is more than the rounding that
    [`relative_rewards`] leaves in a group of equal rewards."""
    return bool((torch.tensor(value).abs() > RESIDUE).any())


def has_signal(advantages: torch.Tensor, *, tolerance: float = 1e-8) -> torch.Tensor:
    """Return the mask `(B,)` of rows that can change the policy: rows with an advantage whose absolute value exceeds
    `tolerance`. `advantages` has shape `(B,)` or `(B, T)`."""
    nonzero = advantages.abs() > tolerance
    if nonzero.dim() == 2:
        nonzero = nonzero.any(dim=1)
    return nonzero
