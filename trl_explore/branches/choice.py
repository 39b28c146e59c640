"""Where to branch off the tail of a multi-turn trajectory, which branch to keep, and what its tokens are worth.

After BranPO (https://huggingface.co/papers/2602.03719), sections 4.2 to 4.4, algorithm 1 and appendix A.1. Rewards are
numbers of one row or of one prompt's group: NaN where a row could not be scored, `None` where a continuation was
discarded (truncated, crashed).
"""

import math
import statistics
from collections.abc import Sequence

import torch

from trl_explore.gradients.novelty import check_choice
from trl_explore.rewards.success import is_success
from trl_explore.rows.advantages import relative_rewards

DEFINITIONS = ("mean", "share")
GROUPS = ("prompt", "trajectory")
SELECTIONS = ("tail", "random")
SCALES = ("group", "none")


def branch_count(accuracy: float, *, num_branches: int = 2, num_branches_solved: int = 1) -> int:
    """Most continuations at a branch point (Eq. 15); an accuracy above 1, from larger rewards, counts as solved."""
    return num_branches_solved if accuracy >= 1 else num_branches


def recursion_depth(
    reward: float, accuracy: float, *, threshold: float, depth_hard: int = 3, depth: int = 2, depth_solved: int = 1
) -> int:
    """Largest depth to branch at (Eq. 16), 1 for the last response: `depth_hard` for a failure at an accuracy below
    0.5, `depth` for other failures and successes below 1, `depth_solved` for the rest; 0 for an unscored one."""
    if math.isnan(reward) or math.isnan(accuracy):
        return 0
    failed = not is_success(reward, threshold=threshold)
    if accuracy < 0.5 and failed:
        return depth_hard
    return depth if accuracy < 1 or failed else depth_solved


def fork_depths(
    num_turns: int, number: int, *, nearest: int = 1, selection: str = "tail", generator: torch.Generator | None = None
) -> list[int]:
    """Depths to leave a trajectory at, `nearest` (1: the last response) to `num_turns`, so maybe fewer than `number`:
    the smallest (`"tail"`, algorithm 1) or different ones in any order (`"random"`); else ValueError."""
    check_choice("selection", selection, SELECTIONS)
    depths = list(range(nearest, num_turns + 1))
    if selection == "random":
        depths = [depths[place] for place in torch.randperm(len(depths), generator=generator).tolist()]
    return depths[:number]


def group_accuracy(rewards: Sequence[float], *, definition: str, threshold: float) -> float:
    """How easy a prompt is, from its initial rollouts (appendix A.1): `"mean"` reward, as in the paper, or `"share"`
    of successes, as in the authors' code. NaN rewards are ignored; NaN if there is no other."""
    check_choice("definition", definition, DEFINITIONS)
    scored = [reward for reward in rewards if not math.isnan(reward)]
    if definition == "share":
        scored = [float(is_success(reward, threshold=threshold)) for reward in scored]
    # Totals are float32: without rounding, perfect ones can have a mean below 1, and a half a mean beside 0.5.
    return round(statistics.fmean(scored), 6) if scored else math.nan


def is_contrastive(reward: float | None, original: float, *, threshold: float) -> bool:
    """Whether one of the two succeeded and the other failed (section 4.2); `False` where one has no reward."""
    if reward is None or math.isnan(reward) or math.isnan(original):
        return False
    return is_success(reward, threshold=threshold) != is_success(original, threshold=threshold)


def first_contrastive(rewards: Sequence[float | None], original: float, *, threshold: float) -> int | None:
    """Index of the first contrastive continuation, in the order sampled, which ends the search (algorithm 1)."""
    found = (index for index, reward in enumerate(rewards) if is_contrastive(reward, original, threshold=threshold))
    return next(found, None)


def seeks_shorter(
    rewards: Sequence[float], num_turns: Sequence[int], *, accuracy: float, threshold: float
) -> list[bool]:
    """Trajectories of a group that may hold a redundant step (section 4.4, appendix A.1): where accuracy exceeds 0.5,
    successes with more turns than the successes' mean, and at least 2. They branch at depth 2."""
    correct = [is_success(reward, threshold=threshold) for reward in rewards]
    if not accuracy > 0.5 or not any(correct):  # also for an accuracy of NaN
        return [False] * len(correct)
    mean = statistics.fmean(count for count, kept in zip(num_turns, correct, strict=True) if kept)
    return [kept and count > max(mean, 1) for count, kept in zip(num_turns, correct, strict=True)]


def first_shorter(
    rewards: Sequence[float | None], num_turns: Sequence[int], original_turns: int, *, threshold: float
) -> int | None:
    """Index of the continuation that proves a step redundant (section 4.4): the first success with fewer turns in
    total, those of the shared prefix included, than the original."""
    for index, (reward, count) in enumerate(zip(rewards, num_turns, strict=True)):
        if count < original_turns and is_success(reward, threshold=threshold):
            return index
    return None


def branch_advantages(
    rewards: Sequence[Sequence[float]], *, group: str = "prompt", scale: str = "group", eps: float = 1e-4
) -> tuple[list[float], list[list[float]]]:
    """
    Advantages of the prefixes, `[N]`, and suffixes, `[N][|C_n|]`, of one prompt (Eq. 10-12), from the suffixes'
    rewards: first the original's, then those of kept branches. Without any branch both are GRPO's (theorem B.1).

    A suffix is compared with all of the `"prompt"` (Eq. 12) or with those of its `"trajectory"` (algorithm 1). There
    that of an unbranched one has nothing to be compared with; it gets the base advantage, where 0 would drop it from
    the loss.
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
    """Advantages `[T]` of an initial rollout (section 4.3): `base` before token `start`, `branch` from it on, masked
    where a shorter continuation has shown the suffix to be redundant (Eq. 14)."""
    return [base] * start + [0.0 if redundant else branch] * (num_tokens - start)
