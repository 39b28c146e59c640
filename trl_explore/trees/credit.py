"""What a finished tree's tokens are worth: node values, advantages, and which tokens are trained."""

import math
import statistics

from trl_explore.trees.state import Tree


def node_credit(tree: Tree, index: int, *, q_temperature: float = 1.0, q_max: float = 1.0) -> float:
    """
    What the tokens of a node are worth before a baseline is subtracted (Eq. 16).

    Args:
        tree ([`~trl_explore.trees.search.Tree`]):
            A finished tree.
        index (`int`):
            The node.
        q_temperature (`float`, *optional*, defaults to `1.0`):
            Value at which an intermediate node's credit is tanh(1) of its limit, positive.
        q_max (`float`, *optional*, defaults to `1.0`):
            Limit of an intermediate node's credit.

    Returns:
        `float`: `tanh(value / q_temperature) * q_max` for an intermediate node; the outcome of a terminal one, 0 where
        it could not be scored.
    """
    node = tree.nodes[index]
    if node.terminal:
        return node.outcome or 0.0
    return math.tanh(node.value / q_temperature) * q_max


def overlong_penalty(length: int, *, max_completion_length: int, buffer: int, penalty: float) -> float:
    """
    Soft penalty of a completion that comes close to the budget.

    Args:
        length (`int`):
            Tokens of the completion.
        max_completion_length (`int`):
            The budget in tokens.
        buffer (`int`):
            Tokens before the budget's end over which the penalty grows; 0 switches it off.
        penalty (`float`):
            Penalty at the budget's end.

    Returns:
        `float`: At most 0.
    """
    return -max(0, length - (max_completion_length - buffer)) / buffer * penalty if buffer else 0.0


def tree_advantages(
    tree: Tree,
    *,
    q_temperature: float = 1.0,
    q_max: float = 1.0,
    normalization: str = "mean",
    skip_uniform: bool = False,
    max_completion_length: int = 0,
    overlong_buffer: int = 0,
    overlong_penalty_weight: float = 1.0,
) -> list[list[float]]:
    """
    Advantage of every token of a finished tree's trajectories (Eq. 16-18).

    Args:
        tree ([`~trl_explore.trees.search.Tree`]):
            A finished tree.
        q_temperature (`float`, *optional*, defaults to `1.0`):
            See [`node_credit`].
        q_max (`float`, *optional*, defaults to `1.0`):
            See [`node_credit`].
        normalization (`str`, *optional*, defaults to `"mean"`):
            `"mean"` subtracts the mean terminal score of the trajectories; `"mean_std"` also divides by their standard
            deviation (of the population) plus 1e-6.
        skip_uniform (`bool`, *optional*, defaults to `False`):
            Whether a tree whose trajectories are all correct or all wrong gets advantage 0 everywhere.
        max_completion_length (`int`, *optional*, defaults to `0`):
            See [`overlong_penalty`], like the two that follow.
        overlong_buffer (`int`, *optional*, defaults to `0`):
            Tokens over which the penalty grows.
        overlong_penalty_weight (`float`, *optional*, defaults to `1.0`):
            Penalty at the budget's end. It is added to every token of a trajectory and to its terminal score.

    Returns:
        `list[list[float]]`: One list per trajectory in the order of `Tree.rows`, `[G][T_i]`;
        zeros for a trajectory that could not be scored.
    """
    scores, penalties = {}, {}
    for row in tree.rows:
        outcome = tree.nodes[row].outcome
        if outcome is None:
            continue
        penalties[row] = overlong_penalty(
            tree.nodes[row].length,
            max_completion_length=max_completion_length,
            buffer=overlong_buffer,
            penalty=overlong_penalty_weight,
        )
        scores[row] = outcome + penalties[row]
    baseline = statistics.fmean(scores.values()) if scores else 0.0
    scale = statistics.pstdev(scores.values()) + 1e-6 if normalization == "mean_std" and scores else 1.0
    silent = skip_uniform and is_uniform(tree)
    advantages = []
    for row in tree.rows:
        tokens: list[float] = []
        for index in tree.path(row):
            credit = node_credit(tree, index, q_temperature=q_temperature, q_max=q_max)
            advantage = 0.0 if silent or row not in scores else (credit + penalties[row] - baseline) / scale
            tokens += [advantage] * len(tree.nodes[index].token_ids)
        advantages.append(tokens)
    return advantages


def is_uniform(tree: Tree) -> bool:
    """
    Whether a tree has nothing to compare.

    Args:
        tree ([`~trl_explore.trees.search.Tree`]):
            A finished tree.

    Returns:
        `bool`: `True` if its trajectories that could be scored are all correct or all wrong, incomplete ones among
        the wrong.
    """
    # Not the outcomes themselves: an `incomplete_score` would be a contrast between failures.
    return len({o > 0 for row in tree.results if (o := tree.nodes[row].outcome) is not None}) < 2


def first_appearance(tree: Tree) -> list[list[int]]:
    """
    Loss masks that train every node once, however many trajectories share it.

    Args:
        tree ([`~trl_explore.trees.search.Tree`]):
            A finished tree.

    Returns:
        `list[list[int]]`: One mask per trajectory in the order of `Tree.rows`, `[G][T_i]`: 1 on
        the tokens of nodes that no earlier trajectory holds.
    """
    seen: set[int] = set()
    masks = []
    for row in tree.rows:
        mask: list[int] = []
        for index in tree.path(row):
            mask += [int(index not in seen)] * len(tree.nodes[index].token_ids)
            seen.add(index)
        masks.append(mask)
    return masks
