"""GRPO's own advantages, for rewards that TRL has not seen."""

import torch
from trl.trainer.utils import nanstd

from trl_explore.rows.advantages import equal_rewards


def normalised(rewards: torch.Tensor, *, scale: str) -> torch.Tensor:
    """Rewards `(P, G)` minus their group's mean, divided as `scale_rewards` says: by the deviation of the `"group"`,
    of the `"batch"`, or by nothing (`"none"`). Rows of NaN count nowhere and get 0."""
    centred = rewards - rewards.nanmean(dim=1, keepdim=True)
    if scale != "none":
        centred = centred / ((nanstd(rewards, dim=1, keepdim=True) if scale == "group" else nanstd(rewards)) + 1e-4)
    return centred.nan_to_num(nan=0.0)


def equal_groups(rewards: torch.Tensor) -> torch.Tensor:
    """Mask `(P, G)` of groups whose rewards `(P, G)` are all equal up to rounding."""
    one = torch.ones(1, device=rewards.device)
    return equal_rewards(rewards.reshape(-1, 1), one, group_size=rewards.shape[1]).view(rewards.shape)
