"""Outcomes, backed-up values, and the scores by which nodes are chosen. After DeepSearch
(https://huggingface.co/papers/2509.25454), equations 3-10."""

import math
from collections.abc import Callable, Sequence

from trl_explore.rewards.success import TOLERANCE, is_success
from trl_explore.rows.rollouts import Continuation


def terminal_outcome(
    reward: float | None, *, finished: bool, success_threshold: float, incomplete_score: float
) -> float | None:
    """Outcome of a terminal node (Eq. 6): +1 if correct, else -1, or `incomplete_score` where a limit cut it off;
    `None` without a reward (`None` or NaN)."""
    if reward is None or math.isnan(reward):
        return None
    if is_success(reward, threshold=success_threshold):
        return 1.0
    return -1.0 if finished else incomplete_score


def scaled_outcomes(rewards: Sequence[float], outcomes: Sequence[float]) -> list[float] | None:
    """
    Outcomes of the completions of a prompt on the scale of their rewards: the smallest reward is worth -1, the largest
    +1, and the others lie between them in proportion.

    Args:
        rewards (`Sequence[float]`):
            Rewards of the completions, at least one, `[G]`; none is NaN.
        outcomes (`Sequence[float]`):
            Their [`terminal_outcome`]s, `[G]`. A failure is worth at least its outcome, so that `incomplete_score`
            holds here too.

    Returns:
        `list[float]` or `None`: Outcomes in [-1, 1], `[G]`. Rewards of 0 and 1 give the outcomes of Eq. 6. `None` if
        all rewards are equal up to rounding: then there is no scale.
    """
    lowest, highest = min(rewards), max(rewards)
    if highest - lowest <= TOLERANCE * max(abs(lowest), abs(highest)):
        return None
    scaled = []
    for reward, outcome in zip(rewards, outcomes, strict=True):
        value = 2 * (reward - lowest) / (highest - lowest) - 1
        scaled.append(max(value, outcome) if outcome < 0 else value)
    return scaled


def mean_entropy(continuation: Continuation) -> float:
    """Mean token entropy in nats (Eq. 3), or, where only those are known, the negative mean of the log-probabilities,
    which estimates it; 0 where nothing is known."""
    if continuation.entropies is not None:
        return math.fsum(continuation.entropies) / len(continuation.entropies)
    if continuation.logprobs is not None:
        known = [value for value in continuation.logprobs if value is not None]
        return -math.fsum(known) / max(len(known), 1)
    return 0.0


def backup_value(value: float, reward: float, *, step: int, length: int, decay_min: float) -> float:
    """New value of the `step`-th (from 1) of `length` nodes for an outcome in [-1, 1] (Eq. 4-7): a success clears an
    earlier penalty, a failure leaves a node on a successful path as it is, so that it never turns negative."""
    decayed = max(step / length, decay_min) * reward
    if value < 0 < reward:
        return decayed
    if reward < 0 < value:
        return value
    return value + decayed


def uct_score(q: float, visits: int, parent_visits: int, *, coef: float) -> float:
    """`q + coef * sqrt(ln(parent_visits) / visits)` (Eq. 8); without a visit on either side the bonus is 0."""
    if visits < 1 or parent_visits < 1:
        return q
    return q + coef * math.sqrt(math.log(parent_visits) / visits)


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
    """How promising it is to expand a node (Eq. 9-10), `entropy` in nats; the depth bonus is `sqrt(depth / max_depth)`
    (`"sqrt"`), `depth` (`"linear"`) or `ln(depth + 1)` (`"log"`)."""
    bonus = DEPTH_BONUSES[depth_bonus](depth, max_depth)
    return quality_weight * math.tanh(parent_q) + entropy_weight * entropy + depth_weight * bonus
