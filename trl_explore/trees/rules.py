"""Outcomes, backed-up values, and the scores by which nodes are chosen. After DeepSearch
(https://huggingface.co/papers/2509.25454), equations 3-10."""

import math
from collections.abc import Callable

from trl_explore.rewards.success import is_success
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
