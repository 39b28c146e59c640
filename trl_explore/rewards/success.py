"""Success of completions: one comparison with `success_threshold`, which all methods share."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch  # only for type hints, so that commands that only print numbers start fast

# Sums in float32 are inexact: three rewards of 1 with weights .15, .65 and .2 add up to 0.99999994.
TOLERANCE = 1e-6


def lowest_success(threshold: float) -> float:
    """Return the smallest reward that reaches `threshold`: a millionth of its size lower, or 1e-6 lower if it is 0."""
    return threshold - TOLERANCE * (abs(threshold) or 1.0)


def is_success(reward: float | None, *, threshold: float) -> bool:
    """Return whether a reward reaches `threshold`. NaN and `None` do not."""
    return reward is not None and reward >= lowest_success(threshold)


def succeeded(rewards: "torch.Tensor", *, threshold: float) -> "torch.Tensor":
    """Return which rewards reach `threshold`, as a boolean tensor of the same shape. NaN does not."""
    return rewards >= lowest_success(threshold)


def failed(rewards: "torch.Tensor", *, threshold: float) -> "torch.Tensor":
    """Return which rewards are below `threshold`, as a boolean tensor of the same shape. NaN is not below."""
    return rewards < lowest_success(threshold)


def check_success_reward(success_reward: str | None, names: Sequence[str]) -> None:
    """
    Check that exactly one reward function has the name `success_reward`.

    Args:
        success_reward (`str` or `None`):
            Name that the user set. `None` is always valid.
        names (`Sequence[str]`):
            Names of the reward functions.

    Raises:
        `ValueError`: If no reward function or several have this name.
    """
    if success_reward is None or names.count(success_reward) == 1:
        return
    if success_reward in names:
        raise ValueError(
            f"`success_reward={success_reward!r}` names {names.count(success_reward)} reward functions: give them "
            "different names (`__name__` of a function), so that one of them decides."
        )
    raise ValueError(
        f"`success_reward={success_reward!r}` is none of the reward functions: name one of {', '.join(names)}, or "
        "leave it out for the sum of all."
    )
