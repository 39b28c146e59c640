"""Advantages that train for the best of `k` attempts. They are computed over all subsets of `k` rows of a group.

The methods are [Pass@k training](https://huggingface.co/papers/2508.10751) and
[PKPO](https://huggingface.co/papers/2505.15201). Rewards have the shape `(P, G)`. Rows whose reward is NaN are in no
subset and get advantage 0. If fewer than `k` rows of a group have a reward, these rows are the only subset. If only
one row has a reward, it gets advantage 0.
"""

from collections.abc import Callable
from functools import partial
from math import comb, sqrt

import torch

from trl_explore.rewards.checks import RewardError
from trl_explore.rewards.success import TOLERANCE, succeeded


def outcomes(rewards: torch.Tensor, *, threshold: float | None) -> torch.Tensor:
    """
    Return 1 for rows that succeeded, 0 for rows that failed, and NaN if unknown, in the shape of `rewards`.

    Raises:
        RewardError: If there is no threshold and a reward is neither 0 nor 1.
    """
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
    """Return the probability that a random subset of `k` rows contains a right row. `num_right` of the `num_rows` rows
    are right."""
    return 1 - comb(num_rows - num_right, k) / comb(num_rows, k)


def pass_at_k_advantages(successes: torch.Tensor, *, k: int) -> torch.Tensor:
    """
    Return the advantages of pass@k training, `(P, G)`.

    A subset of `k` rows succeeds if one of its rows succeeds. The advantage of a row is the mean success of the
    subsets that contain it, minus the mean success of all subsets, divided by the standard deviation over all subsets.
    With `k=1`, this is GRPO with the standard deviation of the population. A group with fewer than `k` failures gets
    0, because all its subsets succeed.

    Args:
        successes (`torch.Tensor`):
            1 for rows that succeeded, 0 for rows that failed, NaN if unknown, `(P, G)`.
        k (`int`):
            Number of rows of a subset. It must be less than G: with `k=G`, there is one subset and all advantages are
            0.
    """
    return _by_group(successes, k, _pass_at_k_advantages)


def _pass_at_k_advantages(successes: list[float], k: int) -> list[float]:
    n, right = len(successes), round(sum(successes))
    rate = solve_rate(n, right, k)
    wrong_rate = 1.0  # mean success of the subsets that contain a given failure
    if right < n:
        wrong_rate = 1 - comb(n - right - 1, k - 1) / comb(n - 1, k - 1)
    spread = sqrt(rate * (1 - rate)) + 1e-6
    advantages = []
    for success in successes:
        own_rate = 1.0 if success else wrong_rate
        advantages.append((own_rate - rate) / spread)
    return advantages


def pkpo(rewards: torch.Tensor, *, k: int, leave_one_out: bool = False) -> torch.Tensor:
    """
    Return the advantages of PKPO, `(P, G)`. With them, the policy gradient of a group estimates, without bias, the
    gradient of the expected largest reward of `k` rows.

    The advantage of a row is the sum of the largest rewards of the subsets of `k` rows that contain the row, divided
    by the number of all subsets. With `leave_one_out`, subtract from each largest reward the largest reward of the
    subset's other rows. The mean of the gradient stays the same, and its variance decreases. With `k=1`, a subset has
    no other rows, and nothing is subtracted.

    Args:
        rewards (`torch.Tensor`):
            Rewards of shape `(P, G)`; NaN if unknown.
        k (`int`):
            Number of rows of a subset.
        leave_one_out (`bool`, *optional*, defaults to `False`):
            If True, use the leave-one-out baseline.
    """
    return _by_group(rewards, k, partial(_pkpo, leave_one_out=leave_one_out))


def _pkpo(rewards: list[float], k: int, *, leave_one_out: bool) -> list[float]:
    # Rows with equal rewards get equal credit (by Pascal's rule), so their order after sorting does not matter.
    n = len(rewards)
    order = sorted(range(n), key=rewards.__getitem__)
    g, credit = [rewards[row] for row in order], [0.0] * n  # `g`: rewards in ascending order
    for i in range(n):
        if k == 1:
            of_best = [g[i]]
        elif leave_one_out:
            # Row i gets credit only in subsets whose best row is i. Row j is the second best row of these subsets.
            of_best = [(g[i] - g[j]) * comb(j, k - 2) for j in range(i)]
        else:
            # First the subsets whose best row is i. Then, for each better row j, the subsets with row i whose best row
            # is j.
            of_best = [g[i] * comb(i, k - 1)]
            of_best.extend(g[j] * comb(j - 1, k - 2) for j in range(i + 1, n))
        credit[order[i]] = sum(of_best) / comb(n, k)
    return credit


def _by_group(values: torch.Tensor, k: int, credit: Callable[[list[float], int], list[float]]) -> torch.Tensor:
    """Return the credit of each group, `(P, G)`, computed from its values that are not NaN."""
    found = torch.zeros_like(values)
    for index, group in enumerate(values):
        known = ~group.isnan()
        num_rows = int(known.sum())
        if num_rows > 1:
            found[index, known] = found.new_tensor(credit(group[known].tolist(), min(k, num_rows)))
    return found
