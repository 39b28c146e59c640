"""Credit of the tokens of a finished tree: node values, advantages and loss masks."""

import math
import statistics
from collections.abc import Sequence

from trl_explore.trees.state import Tree


def node_credit(tree: Tree, index: int, *, q_temperature: float = 1.0, q_max: float = 1.0) -> float:
    """
    Return the credit of a node's tokens before a baseline is subtracted (Eq. 16).

    It is `tanh(value / q_temperature) * q_max`. For a terminal node it is the outcome ([`Node.worth`]), or 0 if the
    node has none.
    """
    node = tree.nodes[index]
    if node.terminal:
        return node.worth or 0.0
    return math.tanh(node.value / q_temperature) * q_max


def overlong_penalty(length: int, *, max_completion_length: int, buffer: int, penalty: float) -> float:
    """Return the penalty of a completion of `length` tokens. It falls linearly from 0 to `-penalty` over the last
    `buffer` tokens before `max_completion_length`."""
    if not buffer:
        return 0.0
    tokens_in_buffer = max(0, length - (max_completion_length - buffer))
    return -tokens_in_buffer / buffer * penalty


def tree_advantages(
    tree: Tree,
    *,
    q_temperature: float = 1.0,
    q_max: float = 1.0,
    credit: str = "value",
    normalization: str = "mean",
    skip_uniform: bool = False,
    max_completion_length: int = 0,
    overlong_buffer: int = 0,
    overlong_penalty_weight: float = 1.0,
) -> list[list[float]]:
    """
    Return the advantage of every token of a finished tree's trajectories (Eq. 16-18).

    The score of a trajectory is its outcome plus its overlong penalty. The advantage of a token is its credit plus the
    overlong penalty of its trajectory, minus the mean score of the tree.

    Args:
        tree ([`Tree`]):
            A finished tree.
        q_temperature (`float`, *optional*, defaults to `1.0`):
            See [`node_credit`].
        q_max (`float`, *optional*, defaults to `1.0`):
            See [`node_credit`].
        credit (`str`, *optional*, defaults to `"value"`):
            `"value"` credits a token with the value of its node, `"outcome"` with the outcome of its trajectory, like
            GRPO.
        normalization (`str`, *optional*, defaults to `"mean"`):
            `"mean"` subtracts the mean score. `"mean_std"` also divides by the standard deviation of the scores (of
            the population) plus 1e-6. It does not divide in a tree without contrast (see [`is_uniform`]), or if the
            standard deviation is less than 1e-6.
        skip_uniform (`bool`, *optional*, defaults to `False`):
            If True, all advantages are 0 in a tree without contrast (see [`is_uniform`]).
        max_completion_length (`int`, *optional*, defaults to `0`):
            See [`overlong_penalty`].
        overlong_buffer (`int`, *optional*, defaults to `0`):
            Buffer of the overlong penalty, in tokens; 0 for no penalty.
        overlong_penalty_weight (`float`, *optional*, defaults to `1.0`):
            Largest overlong penalty.

    Returns:
        `list[list[float]]`: Advantages `[G][T_i]`, in the order of `Tree.rows`. A trajectory without a score gets 0.
    """
    scores, penalties = {}, {}
    for row in tree.rows:
        outcome = tree.nodes[row].worth
        if outcome is None:
            continue
        penalties[row] = overlong_penalty(
            tree.nodes[row].length,
            max_completion_length=max_completion_length,
            buffer=overlong_buffer,
            penalty=overlong_penalty_weight,
        )
        scores[row] = outcome + penalties[row]
    baseline, scale = 0.0, 1.0
    if scores:
        baseline = statistics.fmean(scores.values())
        deviation = statistics.pstdev(scores.values())
        # Without contrast, a division by a deviation near 0 would give inner nodes advantages of a million.
        if normalization == "mean_std" and deviation >= 1e-6 and not is_uniform(tree):
            scale = deviation + 1e-6
    is_skipped = skip_uniform and is_uniform(tree)
    advantages = []
    for row in tree.rows:
        tokens: list[float] = []
        for index in tree.path(row):
            credited_node = index if credit == "value" else row
            token_credit = node_credit(tree, credited_node, q_temperature=q_temperature, q_max=q_max)
            advantage = 0.0
            if not is_skipped and row in scores:
                advantage = (token_credit + penalties[row] - baseline) / scale
            tokens += [advantage] * len(tree.nodes[index].token_ids)
        advantages.append(tokens)
    return advantages


def is_uniform(tree: Tree) -> bool:
    """Return whether a tree has no contrast: its scored trajectories are all correct, or all wrong. Incomplete ones
    count as wrong. With scaled outcomes, a tree whose rewards differ has contrast."""
    # Compare signs and not outcomes, because two failures can have different outcomes, -1 and `incomplete_score`.
    kinds = set()
    for row in tree.results:
        node = tree.nodes[row]
        if node.scaled is not None:
            return False
        if node.outcome is not None:
            kinds.add(node.outcome > 0)
    return len(kinds) < 2


def first_appearance(tree: Tree, trained: Sequence[bool] | None = None) -> list[list[int]]:
    """
    Return loss masks `[G][T_i]` that train every node once: 1 on the tokens of nodes that no earlier trained
    trajectory contains.

    Args:
        tree ([`Tree`]):
            A finished tree.
        trained (`Sequence[bool]`, *optional*):
            False for trajectories that TRL masks as a whole, `[G]`, in the order of `Tree.rows`. None: TRL masks none.
    """
    if trained is None:
        trained = [True] * len(tree.rows)
    seen: set[int] = set()
    masks = []
    for row, is_trained in zip(tree.rows, trained, strict=True):
        path = tree.path(row)
        mask: list[int] = []
        for index in path:
            mask += [int(index not in seen)] * len(tree.nodes[index].token_ids)
        if is_trained:
            seen.update(path)
        masks.append(mask)
    return masks
