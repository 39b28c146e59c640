"""BranPO's choices: where to fork a multi-turn trajectory near its end, which other ending to keep, and the advantages
of both endings.

Follows BranPO (https://huggingface.co/papers/2602.03719), sections 4.2 to 4.4, algorithm 1 and appendix A.1. The depth
of a fork is the number of responses that are sampled again: 1 is the last response. A reward is NaN if a row has none,
and None if a continuation was discarded because it was cut off or its environment raised.
"""

import itertools
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
    """Return the maximum number of continuations at a fork (Eq. 15). If the accuracy is at least 1, the prompt counts
    as solved."""
    return num_branches_solved if accuracy >= 1 else num_branches


def recursion_depth(
    reward: float, accuracy: float, *, threshold: float, depth_hard: int = 3, depth: int = 2, depth_solved: int = 1
) -> int:
    """
    Return the maximum depth of a fork in a trajectory (Eq. 16).

    It is `depth_hard` for a failure at an accuracy below 0.5, `depth_solved` for a success at an accuracy of 1 or
    more, and `depth` otherwise. A trajectory without a reward gets 0.
    """
    if math.isnan(reward) or math.isnan(accuracy):
        return 0
    failed = not is_success(reward, threshold=threshold)
    if accuracy < 0.5 and failed:
        return depth_hard
    if accuracy < 1 or failed:
        return depth
    return depth_solved


def fork_depths(
    num_turns: int, number: int, *, nearest: int = 1, selection: str = "tail", generator: torch.Generator | None = None
) -> list[int]:
    """
    Return the depths at which a trajectory is forked, one per round.

    Args:
        num_turns (`int`):
            Number of responses of the trajectory, which is the maximum depth.
        number (`int`):
            Maximum number of depths.
        nearest (`int`, *optional*, defaults to `1`):
            Minimum depth.
        selection (`str`, *optional*, defaults to `"tail"`):
            `"tail"`: the smallest depths, ascending (algorithm 1). `"random"`: different random depths.
        generator (`torch.Generator`, *optional*):
            Random generator for `"random"`.
    """
    check_choice("selection", selection, SELECTIONS)
    depths = list(range(nearest, num_turns + 1))
    if selection == "random":
        order = torch.randperm(len(depths), generator=generator).tolist()
        depths = [depths[place] for place in order]
    return depths[:number]


def group_accuracy(rewards: Sequence[float], *, definition: str, threshold: float) -> float:
    """
    Return the accuracy of a prompt (appendix A.1). NaN if no completion has a reward.

    Args:
        rewards (`Sequence[float]`):
            Rewards of GRPO's completions. NaN is ignored.
        definition (`str`):
            `"mean"`: mean reward, as in the paper. `"share"`: share of successes, as in the authors' code.
        threshold (`float`):
            Minimum reward of a success.
    """
    check_choice("definition", definition, DEFINITIONS)
    scored = [reward for reward in rewards if not math.isnan(reward)]
    if definition == "share":
        scored = [float(is_success(reward, threshold=threshold)) for reward in scored]
    if not scored:
        return math.nan
    # Rewards are float32. Without rounding, the mean of perfect rewards could be slightly below 1.
    return round(statistics.fmean(scored), 6)


def is_contrastive(reward: float | None, original: float, *, threshold: float) -> bool:
    """Return whether one of two endings succeeded and the other failed (section 4.2). False if one has no reward."""
    if reward is None or math.isnan(reward) or math.isnan(original):
        return False
    return is_success(reward, threshold=threshold) != is_success(original, threshold=threshold)


def first_contrastive(rewards: Sequence[float | None], original: float, *, threshold: float) -> int | None:
    """Return the index of the first continuation whose outcome differs from the original's (algorithm 1), or None."""
    for index, reward in enumerate(rewards):
        if is_contrastive(reward, original, threshold=threshold):
            return index
    return None


def seeks_shorter(
    rewards: Sequence[float], num_turns: Sequence[int], *, accuracy: float, threshold: float
) -> list[bool]:
    """
    Return whether each trajectory of a prompt may contain a redundant step (section 4.4, appendix A.1).

    The accuracy of the prompt must exceed 0.5. The trajectory must be a success with at least 2 turns, and with more
    turns than the mean of the prompt's successes. The explorer forks such trajectories at depth 2.
    """
    correct = [is_success(reward, threshold=threshold) for reward in rewards]
    if not accuracy > 0.5 or not any(correct):  # an accuracy of NaN does not exceed 0.5
        return [False] * len(correct)
    mean_turns = statistics.fmean(itertools.compress(num_turns, correct))
    seeks = []
    for is_correct, count in zip(correct, num_turns, strict=True):
        seeks.append(is_correct and count >= 2 and count > mean_turns)
    return seeks


def first_shorter(
    rewards: Sequence[float | None], num_turns: Sequence[int], original_turns: int, *, threshold: float
) -> int | None:
    """Return the index of the first success with fewer turns than the original, or None. It proves that a step of the
    original is redundant (section 4.4). `num_turns` includes the turns of the shared prefix."""
    for index, (reward, count) in enumerate(zip(rewards, num_turns, strict=True)):
        if count < original_turns and is_success(reward, threshold=threshold):
            return index
    return None


def branch_advantages(
    rewards: Sequence[Sequence[float]], *, group: str = "prompt", scale: str = "group", eps: float = 1e-4
) -> tuple[list[float], list[list[float]]]:
    """
    Return the advantages of the prefixes and of the endings of one prompt's N trajectories (Eq. 10-12).

    Without any branch, both are GRPO's advantages (theorem B.1).

    Args:
        rewards (`Sequence[Sequence[float]]`):
            Rewards of the endings of each trajectory, `[N][C_n]`: the original ending first, then kept branches.
        group (`str`, *optional*, defaults to `"prompt"`):
            `"prompt"`: compare an ending with all endings of the prompt (Eq. 12). `"trajectory"`: compare it with the
            endings of its trajectory (algorithm 1). A single ending then gets the advantage of its prefix, because
            with 0 it would not be trained.
        scale (`str`, *optional*, defaults to `"group"`):
            `"group"`: divide by the standard deviation. `"none"`: do not divide.
        eps (`float`, *optional*, defaults to `1e-4`):
            Added to the standard deviation.

    Returns:
        `tuple[list[float], list[list[float]]]`: Advantages of the prefixes, `[N]`, and of the endings, `[N][C_n]`.
    """
    check_choice("group", group, GROUPS)
    check_choice("scale", scale, SCALES)
    # The reward of a prefix is the mean reward of its endings.
    means = [torch.tensor(ending_rewards).nanmean().item() for ending_rewards in rewards]
    prefixes = relative_rewards(means, scale=scale, eps=eps)
    endings: list[list[float]] = []
    if group == "trajectory":
        for ending_rewards, prefix in zip(rewards, prefixes, strict=True):
            if len(ending_rewards) > 1:
                endings.append(relative_rewards(ending_rewards, scale=scale, eps=eps))
            else:
                endings.append([prefix])
        return prefixes, endings
    advantages = relative_rewards(list(itertools.chain(*rewards)), scale=scale, eps=eps)
    first = 0  # index of the trajectory's first ending among the endings of the prompt
    for ending_rewards in rewards:
        endings.append(advantages[first : first + len(ending_rewards)])
        first += len(ending_rewards)
    return prefixes, endings


def credit(prefix: float, ending: float, start: int, *, num_tokens: int, redundant: bool = False) -> list[float]:
    """Return the advantages of a main row's tokens, `[T]`: `prefix` before token `start`, then `ending` (section 4.3).
    If a shorter continuation has shown that the ending is redundant, the ending gets 0 (Eq. 14)."""
    if redundant:
        ending = 0.0
    return [prefix] * start + [ending] * (num_tokens - start)
