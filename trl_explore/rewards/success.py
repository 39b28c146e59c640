"""Which completions succeeded: one comparison with `success_threshold`, and one deciding reward, for all methods."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch  # the functions themselves do not need it: what shows numbers only stays light

# Totals are sums in float32: three perfect rewards weighted .15, .65 and .2 add up to 0.99999994.
TOLERANCE = 1e-6


def bar(threshold: float) -> float:
    """Smallest number that reaches a threshold: a millionth of it less; for 0, a millionth of 1."""
    return threshold - TOLERANCE * (abs(threshold) or 1.0)


def is_success(reward: float | None, *, threshold: float) -> bool:
    """Whether an answer counts as correct; NaN and `None` never do."""
    return reward is not None and reward >= bar(threshold)


def succeeded(rewards: "torch.Tensor", *, threshold: float) -> "torch.Tensor":
    """Rows that succeeded, by the rule of [`is_success`]; boolean of the same shape."""
    return rewards >= bar(threshold)


def failed(rewards: "torch.Tensor", *, threshold: float) -> "torch.Tensor":
    """Rows that were scored and did not succeed; NaN is neither success nor failure."""
    return rewards < bar(threshold)


def check_success_reward(success_reward: str | None, names: Sequence[str]) -> None:
    """Refuse the name of a reward function that is not there, or there twice."""
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
