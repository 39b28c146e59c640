"""MaxRL (https://huggingface.co/papers/2602.02710): the gradient of `log p`, where p is the success rate."""

import torch

from trl_explore.credit.normalised import equal_groups
from trl_explore.rewards.checks import RewardError


def maxrl(rewards: torch.Tensor) -> torch.Tensor:
    """
    Return the advantages `(r - mean) / mean`, `(P, G)`. They are 0 if the mean of the group is 0.

    Args:
        rewards (`torch.Tensor`):
            Rewards of shape `(P, G)`, at least 0. NaN does not count and gets advantage 0.

    Raises:
        RewardError: If a reward is negative, because a negative mean would change the sign of the advantages.
    """
    if (rewards < 0).any():
        row = int((rewards < 0).flatten().nonzero()[0])
        raise RewardError(
            f"`advantage='maxrl'` divides by a group's mean reward, so none may be negative, and row {row} of the "
            f"batch has {rewards.flatten()[row].item():g}: add a constant to the rewards, or set `advantage='grpo'`."
        )
    mean = rewards.nanmean(dim=1, keepdim=True)
    has_signal = (mean > 0) & ~equal_groups(rewards)  # False if the mean is NaN
    return ((rewards - mean) / mean).masked_fill(~has_signal, 0.0).nan_to_num(nan=0.0)
