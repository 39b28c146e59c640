"""Credit for the success of `k` attempts together: every row's part in the subsets of its group.

[Pass@k training](https://huggingface.co/papers/2508.10751) and [PKPO](https://huggingface.co/papers/2505.15201).
Groups are `(P, G)`; rows of NaN are in no subset and get 0, and so does a row that no other is left
beside. Where fewer than `k` rows are left, all of them are the subset.
"""

from collections.abc import Callable
from functools import partial
from math import comb, sqrt

import torch

from trl_explore.rewards.checks import RewardError
from trl_explore.rewards.success import TOLERANCE, succeeded


def outcomes(rewards: torch.Tensor, *, threshold: float | None) -> torch.Tensor:
    """1 where a row succeeded, 0 where it failed, NaN where that is not known. Without a threshold, rewards must be 0
    or 1 already: others are a [`~trl_explore.rewards.checks.RewardError`]."""
    if threshold is None:
        wrong = ((rewards.abs() > TOLERANCE) & ((rewards - 1).abs() > TOLERANCE)).flatten().nonzero()
        if len(wrong):
            row = int(wrong[0])
            raise RewardError(
                f"`advantage='passk'` counts successes, so rewards must be 0 or 1 (this configuration has no "
                f"`success_threshold`), and row {row} of the batch has {rewards.flatten()[row].item():g}: let "
                "`success_reward` name a function that returns 0 and 1, or set `advantage='pkpo'`, which takes any."
            )
        threshold = 1.0
    return succeeded(rewards, threshold=threshold).to(rewards.dtype).masked_fill(rewards.isnan(), torch.nan)


def solve_rate(num_rows: int, num_right: int, k: int) -> float:
    """Probability that a subset of `k` rows has a right one."""
    return 1 - comb(num_rows - num_right, k) / comb(num_rows, k)


def pass_at_k(successes: torch.Tensor, *, k: int) -> torch.Tensor:
    """Pass@k training: the mean success of the subsets that a row is in, normalised over all subsets. With `k=1` it is
    GRPO with the population's deviation. Nothing where fewer than `k` rows are wrong."""
    return _by_group(successes, k, _pass_at_k)


def _pass_at_k(successes: list[float], k: int) -> list[float]:
    n, right = len(successes), round(sum(successes))
    rate = solve_rate(n, right, k)
    wrong_rate = 1 - comb(n - right - 1, k - 1) / comb(n - 1, k - 1) if right < n else 1.0
    spread = sqrt(rate * (1 - rate)) + 1e-6
    return [((1.0 if success else wrong_rate) - rate) / spread for success in successes]


def pkpo(rewards: torch.Tensor, *, k: int, leave_one_out: bool = False) -> torch.Tensor:
    """
    PKPO: credit whose sum over rows, each times its score, has the gradient of the expected best of `k` as its mean.

    A row's credit is the mean over all subsets of their largest reward, where the row is in, and 0 elsewhere. With
    `leave_one_out`, what the subset's other rows reach without it is subtracted: the same mean with less variance.
    """
    return _by_group(rewards, k, partial(_pkpo, leave_one_out=leave_one_out))


def _pkpo(rewards: list[float], k: int, *, leave_one_out: bool) -> list[float]:
    # By Pascal's rule equal neighbours have equal credit in either sum, so that the order of ties does not matter.
    n = len(rewards)
    order = sorted(range(n), key=rewards.__getitem__)
    g, credit = [rewards[row] for row in order], [0.0] * n
    for i in range(n):
        if leave_one_out:  # only where it is the best of a subset; the second best is `j`
            of_best = [(g[i] - g[j]) * comb(j, k - 2) for j in range(i)] if k > 1 else [g[i]]
        else:
            of_best = [g[i] * comb(i, k - 1), *(g[j] * comb(j - 1, k - 2) for j in range(i + 1, n) if k > 1)]
        credit[order[i]] = sum(of_best) / comb(n, k)
    return credit


def _by_group(values: torch.Tensor, k: int, credit: Callable[[list[float], int], list[float]]) -> torch.Tensor:
    found = torch.zeros_like(values)
    for group, known, into in zip(values, ~values.isnan(), found, strict=True):
        if (num_rows := int(known.sum())) > 1:
            into[known] = into.new_tensor(credit(group[known].tolist(), min(k, num_rows)))
    return found
