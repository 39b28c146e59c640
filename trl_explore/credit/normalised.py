"""GRPO's advantages, computed from rewards that TRL has not normalized."""

import torch
from trl.trainer.utils import nanstd

from trl_explore.rows.advantages import equal_rewards


def normalised(rewards: torch.Tensor, *, scale: str) -> torch.Tensor:
    """Return rewards `(P, G)` minus the mean of their group. Divide them by the standard deviation of the group
    (`scale="group"`) or of the batch (`"batch"`), or do not divide (`"none"`). NaN does not count and gets 0."""
    centred = rewards - rewards.nanmean(dim=1, keepdim=True)
    if scale == "group":
        centred = centred / (nanstd(rewards, dim=1, keepdim=True) + 1e-4)
    elif scale != "none":
        centred = centred / (nanstd(rewards) + 1e-4)
    return centred.nan_to_num(nan=0.0)


def equal_groups(rewards: torch.Tensor) -> torch.Tensor:
    """Return the mask `(P, G)` of the groups whose rewards `(P, G)` are all equal up to rounding."""
    one = torch.ones(1, device=rewards.device)
    return equal_rewards(rewards.reshape(-1, 1), one, group_size=rewards.shape[1]).view(rewards.shape)
