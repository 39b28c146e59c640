"""Where to branch off the tail of a multi-turn trajectory, which branch to keep, and what its tokens are worth.

After BranPO (https://huggingface.co/papers/2602.03719), sections 4.2 to 4.4, algorithm 1 and appendix A.1. Rewards are
numbers of one row or of one prompt's group: NaN where a row could not be scored, `None` where a continuation was
discarded (truncated, crashed).
"""

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise

import torch
from trl.trainer.utils import nanstd

from trl_explore.gradients.novelty import check_choice
from trl_explore.rewards.success import is_success

DEFINITIONS = ("mean", "share")
GROUPS = ("prompt", "trajectory")
SELECTIONS = ("tail", "random")
SCALES = ("group", "none")


def turns(loss_mask: Sequence[int]) -> list[tuple[int, int]]:
    """
    Where the model's responses lie in a completion.

    Args:
        loss_mask (`Sequence[int]`):
            1 for tokens of the model, 0 for those of tool results, `[T]`.

    Returns:
        `list[tuple[int, int]]`: Start and end (exclusive) of each maximal run of ones, in order; a single-turn
        completion has one.

    Example:

    ```python
    >>> turns([1, 1, 0, 0, 1])
    [(0, 2), (4, 5)]
    ```
    """
    flips = [token for token, (left, right) in enumerate(pairwise([0, *loss_mask, 0])) if left != right]
    return list(zip(flips[::2], flips[1::2], strict=True))


def branch_count(accuracy: float, *, num_branches: int = 2, num_branches_solved: int = 1) -> int:
    """
    Continuations to sample at each branch point, at most (Eq. 15).

    Args:
        accuracy (`float`):
            Accuracy of the group, see [`group_accuracy`].
        num_branches (`int`, *optional*, defaults to `2`):
            Continuations where a rollout failed.
        num_branches_solved (`int`, *optional*, defaults to `1`):
            Continuations where the accuracy is 1, or above as rewards beyond 1 make it.

    Returns:
        `int`: How many.
    """
    return num_branches_solved if accuracy >= 1 else num_branches


def recursion_depth(
    reward: float, accuracy: float, *, threshold: float, depth_hard: int = 3, depth: int = 2, depth_solved: int = 1
) -> int:
    """
    Largest depth to branch a trajectory at (Eq. 16); the first rule that holds counts.

    Args:
        reward (`float`):
            Reward of the trajectory.
        accuracy (`float`):
            Accuracy of its group, see [`group_accuracy`].
        threshold (`float`):
            Smallest reward of a success.
        depth_hard (`int`, *optional*, defaults to `3`):
            Depth for a failure in a group with an accuracy below 0.5.
        depth (`int`, *optional*, defaults to `2`):
            Depth for any other failure, and for a success in a group with an accuracy below 1.
        depth_solved (`int`, *optional*, defaults to `1`):
            Depth for what is left.

    Returns:
        `int`: Responses to go back, 1 for the last one; 0 for a trajectory that could not be scored.
    """
    if math.isnan(reward) or math.isnan(accuracy):
        return 0
    failed = not is_success(reward, threshold=threshold)
    if accuracy < 0.5 and failed:
        return depth_hard
    return depth if accuracy < 1 or failed else depth_solved


def fork_depths(
    num_turns: int,
    number: int,
    *,
    nearest: int = 1,
    selection: str = "tail",
    generator: torch.Generator | None = None,
) -> list[int]:
    """
    Where to leave a trajectory, one depth after the other.

    Args:
        num_turns (`int`):
            Responses of the trajectory.
        number (`int`):
            Depths wanted; fewer where it has fewer responses.
        nearest (`int`, *optional*, defaults to `1`):
            Smallest depth: 1 for the last response.
        selection (`str`, *optional*, defaults to `"tail"`):
            `"tail"`: the smallest depths, in order (algorithm 1). `"random"`: any different ones, in any order.
        generator (`torch.Generator`, *optional*):
            Generator of the random draws.

    Returns:
        `list[int]`: Responses to go back, from `nearest` to `num_turns`.

    Raises:
        ValueError: If `selection` is unknown.
    """
    check_choice("selection", selection, SELECTIONS)
    depths = list(range(nearest, num_turns + 1))
    if selection == "random":
        depths = [depths[place] for place in torch.randperm(len(depths), generator=generator).tolist()]
    return depths[:number]


def group_accuracy(rewards: Sequence[float], *, definition: str, threshold: float) -> float:
    """
    How easy a prompt is, from its initial rollouts (appendix A.1).

    Args:
        rewards (`Sequence[float]`):
            Rewards of the group's initial rollouts, `[G]`; NaN is ignored.
        definition (`str`):
            `"mean"`: mean reward, as in the paper. `"share"`: share of successes, as in the authors' code.
        threshold (`float`):
            Smallest reward of a success.

    Returns:
        `float`: The accuracy; NaN if no rollout could be scored.

    Raises:
        ValueError: If `definition` is unknown.
    """
    check_choice("definition", definition, DEFINITIONS)
    scored = [reward for reward in rewards if not math.isnan(reward)]
    if definition == "share":
        scored = [float(is_success(reward, threshold=threshold)) for reward in scored]
    # Totals are float32: without rounding, perfect ones can have a mean below 1, and a half a mean beside 0.5.
    return round(statistics.fmean(scored), 6) if scored else math.nan


def is_contrastive(reward: float | None, original: float, *, threshold: float) -> bool:
    """
    Whether a continuation teaches something: it succeeded and the original failed, or the reverse (section 4.2).

    Args:
        reward (`float` or `None`):
            Reward of the continuation.
        original (`float`):
            Reward of the trajectory that it branches from.
        threshold (`float`):
            Smallest reward of a success.

    Returns:
        `bool`: `False` also if one of the two has no reward.
    """
    if reward is None or math.isnan(reward) or math.isnan(original):
        return False
    return is_success(reward, threshold=threshold) != is_success(original, threshold=threshold)


def first_contrastive(rewards: Sequence[float | None], original: float, *, threshold: float) -> int | None:
    """
    Which continuation to keep: the first contrastive one ends the search (algorithm 1).

    Args:
        rewards (`Sequence[float | None]`):
            Rewards of the continuations, in the order in which they were sampled.
        original (`float`):
            Reward of the trajectory that they branch from.
        threshold (`float`):
            Smallest reward of a success.

    Returns:
        `int` or `None`: Its index; `None` if there is none.
    """
    found = (index for index, reward in enumerate(rewards) if is_contrastive(reward, original, threshold=threshold))
    return next(found, None)


def seeks_shorter(
    rewards: Sequence[float], num_turns: Sequence[int], *, accuracy: float, threshold: float
) -> list[bool]:
    """
    Trajectories of a group that may hold a redundant step (section 4.4, appendix A.1): successes of a group with an
    accuracy above 0.5 that took more turns than the group's successes on average. They branch from the penultimate
    response (depth 2) instead of by [`recursion_depth`].

    Args:
        rewards (`Sequence[float]`):
            Rewards of the group's initial rollouts, `[G]`.
        num_turns (`Sequence[int]`):
            Responses of each, `[G]`.
        accuracy (`float`):
            Accuracy of the group, see [`group_accuracy`].
        threshold (`float`):
            Smallest reward of a success.

    Returns:
        `list[bool]`: `[G]`; `False` also for a trajectory without a penultimate response.
    """
    correct = [is_success(reward, threshold=threshold) for reward in rewards]
    if not accuracy > 0.5 or not any(correct):  # also for an accuracy of NaN
        return [False] * len(correct)
    mean = statistics.fmean(count for count, kept in zip(num_turns, correct, strict=True) if kept)
    return [kept and count > max(mean, 1) for count, kept in zip(num_turns, correct, strict=True)]


def first_shorter(
    rewards: Sequence[float | None], num_turns: Sequence[int], original_turns: int, *, threshold: float
) -> int | None:
    """
    Which continuation proves a step redundant (section 4.4): the first success with fewer turns than the original.

    Args:
        rewards (`Sequence[float | None]`):
            Rewards of the continuations, in the order in which they were sampled.
        num_turns (`Sequence[int]`):
            Responses of each in total, those of the shared prefix included.
        original_turns (`int`):
            Responses of the trajectory that they branch from.
        threshold (`float`):
            Smallest reward of a success.

    Returns:
        `int` or `None`: Its index; `None` if there is none.
    """
    for index, (reward, count) in enumerate(zip(rewards, num_turns, strict=True)):
        if count < original_turns and is_success(reward, threshold=threshold):
            return index
    return None


def relative_rewards(rewards: Sequence[float], *, scale: str = "group", eps: float = 1e-4) -> list[float]:
    """
    Advantages of one group, bit for bit those of GRPO: in float32, and in TRL's order of operations.

    Args:
        rewards (`Sequence[float]`):
            Rewards of the group, `[G]`; NaN enters neither mean nor standard deviation.
        scale (`str`, *optional*, defaults to `"group"`):
            `"group"` divides by the group's standard deviation (of the sample), `"none"` does not.
        eps (`float`, *optional*, defaults to `1e-4`):
            Added to the standard deviation.

    Returns:
        `list[float]`: `[G]`; 0 for NaN, and for all rows if fewer than two have a reward.
    """
    values = torch.tensor(rewards, dtype=torch.float32)
    advantages = values - values.nanmean()
    if scale == "group":
        advantages = advantages / (nanstd(values) + eps)  # NaN with a single reward
    return advantages.nan_to_num(nan=0.0).tolist()


def branch_advantages(
    rewards: Sequence[Sequence[float]], *, group: str = "prompt", scale: str = "group", eps: float = 1e-4
) -> tuple[list[float], list[list[float]]]:
    """
    Advantages of the prefixes and of the suffixes of one prompt (Eq. 10-12). Without any branch both are GRPO's
    (theorem B.1).

    Args:
        rewards (`Sequence[Sequence[float]]`):
            Per trajectory the rewards of its suffixes, `[N][|C_n|]`: first the original's, then those of the kept
            branches; NaN where one could not be scored.
        group (`str`, *optional*, defaults to `"prompt"`):
            What a suffix is compared with. `"prompt"`: all suffixes of the prompt (Eq. 12). `"trajectory"`: those of
            the same trajectory (algorithm 1). There the suffix of an unbranched trajectory has nothing to be compared
            with; it gets the base advantage, as GRPO gives it (theorem B.1), where 0 would drop it from the loss.
        scale (`str`, *optional*, defaults to `"group"`):
            See [`relative_rewards`], like `eps`.
        eps (`float`, *optional*, defaults to `1e-4`):
            Added to the standard deviations.

    Returns:
        `tuple[list[float], list[list[float]]]`: Base advantages, `[N]`, and branch advantages, `[N][|C_n|]`.

    Raises:
        ValueError: If `group` or `scale` is unknown.
    """
    check_choice("group", group, GROUPS)
    check_choice("scale", scale, SCALES)
    base = relative_rewards([torch.tensor(row).nanmean().item() for row in rewards], scale=scale, eps=eps)
    if group == "trajectory":
        rows = zip(rewards, base, strict=True)
        return base, [relative_rewards(row, scale=scale, eps=eps) if len(row) > 1 else [own] for row, own in rows]
    suffixes = iter(relative_rewards([reward for row in rewards for reward in row], scale=scale, eps=eps))
    return base, [[next(suffixes) for _ in row] for row in rewards]


def credit(base: float, branch: float, start: int, *, num_tokens: int, redundant: bool = False) -> list[float]:
    """
    Advantages of the tokens of an initial rollout (section 4.3).

    Args:
        base (`float`):
            Base advantage, of the prefix.
        branch (`float`):
            Branch advantage, of the suffix.
        start (`int`):
            First token of the suffix, in 0 to `num_tokens`.
        num_tokens (`int`):
            Tokens of the completion, T.
        redundant (`bool`, *optional*, defaults to `False`):
            Whether a shorter continuation has shown the suffix to be redundant, which masks its advantage (Eq. 14).

    Returns:
        `list[float]`: `[T]`.
    """
    return [base] * start + [0.0 if redundant else branch] * (num_tokens - start)


def suffix_mask(loss_mask: Sequence[int], start: int) -> list[int]:
    """
    Loss mask of a branch: the prefix that it shares is trained in the original's row only.

    Args:
        loss_mask (`Sequence[int]`):
            1 for tokens of the model, 0 for those of tool results, `[T]`.
        start (`int`):
            First token of the suffix, in 0 to T.

    Returns:
        `list[int]`: `[T]`.
    """
    return [0] * start + list(loss_mask[start:])
