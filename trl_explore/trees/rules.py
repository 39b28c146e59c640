"""The numbers that a tree search runs on: outcomes, backed-up values, and the scores by which nodes are chosen.

After DeepSearch (https://huggingface.co/papers/2509.25454), equations 3-10.
"""

import math
from collections.abc import Callable

from trl_explore.rewards.success import is_success
from trl_explore.rows.rollouts import Continuation


def terminal_outcome(
    reward: float | None, *, finished: bool, success_threshold: float, incomplete_score: float
) -> float | None:
    """
    Outcome of a terminal node (Eq. 6).

    Args:
        reward (`float`, *optional*):
            Reward that decides about the completion; `None` or NaN where it is not known.
        finished (`bool`):
            Whether the completion ended by itself.
        success_threshold (`float`):
            Smallest reward of a correct completion.
        incomplete_score (`float`):
            Outcome of a wrong completion that a limit cut off.

    Returns:
        `float` or `None`: +1 if correct, else -1 or `incomplete_score`; `None` where there is no reward.
    """
    if reward is None or math.isnan(reward):
        return None
    if is_success(reward, threshold=success_threshold):
        return 1.0
    return -1.0 if finished else incomplete_score


def mean_entropy(continuation: Continuation) -> float:
    """
    Mean token entropy of a continuation (Eq. 3).

    Args:
        continuation ([`~trl_explore.rows.rollouts.Continuation`]):
            Sampled tokens.

    Returns:
        `float`: Mean of the token entropies in nats; where only log-probabilities are known, their negative mean,
        which estimates it; 0 where nothing is known.
    """
    if continuation.entropies is not None:
        return math.fsum(continuation.entropies) / len(continuation.entropies)
    if continuation.logprobs is not None:
        known = [value for value in continuation.logprobs if value is not None]
        return -math.fsum(known) / max(len(known), 1)
    return 0.0


def backup_value(value: float, reward: float, *, step: int, length: int, decay_min: float) -> float:
    """
    New value of one node when an outcome is backed up through it (Eq. 4-7).

    Args:
        value (`float`):
            The node's value so far.
        reward (`float`):
            Outcome of the terminal node, in [-1, 1].
        step (`int`):
            Position of the node on the trajectory, from 1.
        length (`int`):
            Nodes on the trajectory, at least 1.
        decay_min (`float`):
            Smallest decay factor, in [0, 1].

    Returns:
        `float`: `value` plus the decayed outcome; a success clears an earlier penalty, and a failure leaves a node on
        a successful path as it is, so that such a node never turns negative.
    """
    decayed = max(step / length, decay_min) * reward
    if value < 0 < reward:
        return decayed
    if reward < 0 < value:
        return value
    return value + decayed


def uct_score(q: float, visits: int, parent_visits: int, *, coef: float) -> float:
    """
    Upper confidence bound of a child (Eq. 8).

    Args:
        q (`float`):
            Mean value of the child.
        visits (`int`):
            Visits of the child.
        parent_visits (`int`):
            Visits of its parent.
        coef (`float`):
            Weight of the exploration bonus.

    Returns:
        `float`: `q + coef * sqrt(ln(parent_visits) / visits)`; without a visit on either side the bonus is 0.
    """
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
    """
    How promising it is to expand a node, compared over the whole tree (Eq. 9-10).

    Args:
        parent_q (`float`):
            Mean value of the node's parent.
        entropy (`float`):
            Mean token entropy of the node, in nats.
        depth (`int`):
            Depth of the node.
        max_depth (`int`):
            Depth limit of the tree.
        quality_weight (`float`):
            Weight lambda 1 of `tanh(parent_q)`.
        entropy_weight (`float`):
            Weight lambda 2 of the entropy; negative values prefer confident nodes.
        depth_weight (`float`):
            Weight lambda 3 of the depth bonus.
        depth_bonus (`str`, *optional*, defaults to `"sqrt"`):
            `"sqrt"` is `sqrt(depth / max_depth)`, `"linear"` is `depth`, `"log"` is `ln(depth + 1)`.

    Returns:
        `float`: The score.
    """
    bonus = DEPTH_BONUSES[depth_bonus](depth, max_depth)
    return quality_weight * math.tanh(parent_q) + entropy_weight * entropy + depth_weight * bonus
