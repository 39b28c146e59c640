"""MaxRL (https://huggingface.co/papers/2602.02710): a group's deviations over its mean, the gradient of `log p`."""

import torch

from trl_explore.credit.normalised import equal_groups
from trl_explore.rewards.checks import RewardError


def maxrl(rewards: torch.Tensor) -> torch.Tensor:
    """`(r - mean) / mean` of rewards `(P, G)`, at least 0; 0 where the mean is. Rows of NaN count nowhere and get 0.
    A negative reward is a [`~trl_explore.rewards.checks.RewardError`]: below 0, a mean would turn signs."""
    if (rewards < 0).any():
        row = int((rewards < 0).flatten().nonzero()[0])
        raise RewardError(
            f"`advantage='maxrl'` divides by a group's mean reward, so none may be negative, and row {row} of the "
            f"batch has {rewards.flatten()[row].item():g}: add a constant to the rewards, or set `advantage='grpo'`."
        )
    mean = rewards.nanmean(dim=1, keepdim=True)
    without_signal = ~(mean > 0) | equal_groups(rewards)
    return ((rewards - mean) / mean).masked_fill(without_signal, 0.0).nan_to_num(nan=0.0)
