"""Outcomes of completions, values of nodes, and scores for the choice of nodes. After DeepSearch
(https://huggingface.co/papers/2509.25454), equations 3-10."""

import math
from collections.abc import Callable, Sequence

from trl_explore.rewards.success import TOLERANCE, is_success
from trl_explore.rows.rollouts import Continuation


def terminal_outcome(
    reward: float | None, *, finished: bool, success_threshold: float, incomplete_score: float
) -> float | None:
    """Return the outcome of a terminal node (Eq. 6): +1 if it is correct; else -1 if it `finished`, or
    `incomplete_score` if a limit cut it off. None if the reward is None or NaN."""
    if reward is None or math.isnan(reward):
        return None
    if is_success(reward, threshold=success_threshold):
        return 1.0
    return -1.0 if finished else incomplete_score


def scaled_outcomes(rewards: Sequence[float], outcomes: Sequence[float]) -> list[float] | None:
    """
    Return outcomes that are proportional to rewards: -1 for the smallest reward and +1 for the largest.

    Args:
        rewards (`Sequence[float]`):
            Rewards of the completions of a prompt, `[G]`. There is at least one, and no reward is NaN.
        outcomes (`Sequence[float]`):
            [`terminal_outcome`] of each completion, `[G]`. The scaled outcome of a failure is never lower than this
            outcome. So an incomplete completion gets at least `incomplete_score`.

    Returns:
        `list[float]` or `None`: Outcomes in [-1, 1], `[G]`. Rewards of 0 and 1 give the outcomes of Eq. 6. None if
        all rewards are equal up to rounding.
    """
    lowest, highest = min(rewards), max(rewards)
    if highest - lowest <= TOLERANCE * max(abs(lowest), abs(highest)):
        return None
    scaled = []
    for reward, outcome in zip(rewards, outcomes, strict=True):
        value = 2 * (reward - lowest) / (highest - lowest) - 1
        if outcome <= 0:  # a failure
            value = max(value, outcome)
        scaled.append(value)
    return scaled


def mean_entropy(continuation: Continuation) -> float:
    """Return the mean token entropy in nats (Eq. 3). If only log-probabilities are known, return their negative mean,
    which estimates the entropy. If neither is known, return 0."""
    if continuation.entropies is not None:
        return math.fsum(continuation.entropies) / len(continuation.entropies)
    if continuation.logprobs is not None:
        known = [value for value in continuation.logprobs if value is not None]
        return -math.fsum(known) / max(len(known), 1)
    return 0.0


def backup_value(value: float, reward: float, *, step: int, length: int, decay_min: float) -> float:
    """
    Return the new value of a node after a trajectory through it got an outcome (Eq. 4-7).

    A success replaces a negative value. A failure does not change a positive value, so a node on a successful path
    never becomes negative.

    Args:
        value (`float`):
            Value of the node so far.
        reward (`float`):
            Outcome of the trajectory, in [-1, 1].
        step (`int`):
            Position of the node in the trajectory, from 1.
        length (`int`):
            Number of nodes of the trajectory.
        decay_min (`float`):
            Least factor by which the outcome is multiplied; the factor is `step / length` if that is larger.
    """
    decayed = max(step / length, decay_min) * reward
    if value < 0 < reward:
        return decayed
    if reward < 0 < value:
        return value
    return value + decayed


def uct_score(q: float, visits: int, parent_visits: int, *, coef: float) -> float:
    """Return `q + coef * sqrt(ln(parent_visits) / visits)` (Eq. 8). Return `q` if either number of visits is 0."""
    if visits < 1 or parent_visits < 1:
        return q
    return q + coef * math.sqrt(math.log(parent_visits) / visits)


# Bonus of a node by `depth_bonus`. The arguments are the depth of the node and the depth limit.
DEPTH_BONUSES: dict[str, Callable[[int, int], float]] = {
    "sqrt": lambda depth, max_depth: math.sqrt(depth / max_depth),
    "linear": lambda depth, max_depth: float(depth),
    "log": lambda depth, max_depth: math.log(depth + 1),
}


def frontier_score(
    parent_q: float,
    entropy: float,
    depth: int,
    *,
    max_depth: int,
    quality_weight: float,
    entropy_weight: float,
    depth_weight: float,
    depth_bonus: str = "sqrt",
) -> float:
    """Return the score for expanding a node (Eq. 9-10). `entropy` is in nats. `depth_bonus` is `"sqrt"` for
    `sqrt(depth / max_depth)`, `"linear"` for `depth`, or `"log"` for `ln(depth + 1)`."""
    bonus = DEPTH_BONUSES[depth_bonus](depth, max_depth)
    return quality_weight * math.tanh(parent_q) + entropy_weight * entropy + depth_weight * bonus
