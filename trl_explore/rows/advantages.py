"""Rewards to one number per row, and which rows carry a learning signal."""

import math
from collections.abc import Sequence

import torch
from trl.trainer.utils import nanstd


def combine_rewards(rewards_per_func: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted sum `(N,)` of rewards `(N, F)`, as GRPO forms it; NaN for rows that no reward function scored."""
    total = (rewards_per_func * weights.to(rewards_per_func.device)).nansum(dim=1)
    return total.masked_fill(rewards_per_func.isnan().all(dim=1), torch.nan)


def as_columns(totals: torch.Tensor, rewards_per_func: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Rewards `(N, F)` whose weighted sum is `totals`, `(N,)`: in the column of the largest weight; NaN stays NaN."""
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
    """Mask `(N,)` of rows whose group's rewards `(N, F)` are all equal (`per_function`: equal in each function), up to
    a relative `tolerance`; NaN compares with nothing. Advantages cannot tell: rounding leaves up to 1e-3 there."""
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
    """The reward that decides whether a row succeeded, `(N,)` from `(N, F)`: that of the function `success_reward`, or
    for `None` the weighted sum of all; NaN where it is unknown."""
    if success_reward is None:
        return combine_rewards(rewards_per_func, weights)
    return rewards_per_func[:, list(names).index(success_reward)]


def relative_rewards(rewards: Sequence[float], *, scale: str = "group", eps: float = 1e-4) -> list[float]:
    """Advantages of one group, bit for bit GRPO's: in float32, in TRL's order of operations; `"group"` divides by the
    sample standard deviation. 0 for NaN, which enters no statistic, and for all if fewer than two have a reward."""
    values = torch.tensor(rewards, dtype=torch.float32)
    advantages = values - values.nanmean()
    if scale == "group":
        advantages = advantages / (nanstd(values) + eps)  # NaN with a single reward
    return advantages.nan_to_num(nan=0.0).tolist()


def contrasts(rewards: Sequence[float], *, scale: str = "group") -> list[float]:
    """As [`relative_rewards`], and exactly 0 where all rewards are equal: rounding would leave up to 1e-3."""
    known = [reward for reward in rewards if not math.isnan(reward)] or [0.0]
    if max(known) - min(known) <= 1e-6 * max(map(abs, known)):
        return [0.0] * len(rewards)
    return relative_rewards(rewards, scale=scale)


def has_signal(advantages: torch.Tensor, *, tolerance: float = 1e-8) -> torch.Tensor:
    """Mask `(B,)` of rows that can move the policy: an advantage, `(B,)` or `(B, T)`, exceeds `tolerance` in size."""
    nonzero = advantages.abs() > tolerance
    return nonzero if nonzero.dim() == 1 else nonzero.any(dim=1)
