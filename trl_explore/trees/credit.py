"""What a finished tree's tokens are worth: node values, advantages, and which tokens are trained."""

import math
import statistics

from trl_explore.trees.state import Tree


def node_credit(tree: Tree, index: int, *, q_temperature: float = 1.0, q_max: float = 1.0) -> float:
    """
    What a node's tokens are worth before a baseline is subtracted (Eq. 16): `tanh(value / q_temperature) * q_max`, of
    a terminal node its outcome ([`Node.worth`]), 0 where it could not be scored.
    """
    node = tree.nodes[index]
    if node.terminal:
        return node.worth or 0.0
    return math.tanh(node.value / q_temperature) * q_max


def overlong_penalty(length: int, *, max_completion_length: int, buffer: int, penalty: float) -> float:
    """Soft penalty, at most 0, of a completion whose last tokens lie in the `buffer` before the budget's end."""
    return -max(0, length - (max_completion_length - buffer)) / buffer * penalty if buffer else 0.0


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
    Advantage of every token of a finished tree's trajectories, in the order of `Tree.rows`: `[G][T_i]` (Eq. 16-18).

    With `credit="outcome"`, every token is worth its trajectory's outcome, as in GRPO, and not its node's value.
    `"mean"` subtracts the mean terminal score; `"mean_std"` also divides by their standard deviation (of the
    population) plus 1e-6. `skip_uniform` gives 0 everywhere where all is correct or all wrong; the overlong penalty is
    added to every token and to the terminal score. What could not be scored gets zeros.
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
    baseline = statistics.fmean(scores.values()) if scores else 0.0
    scale = statistics.pstdev(scores.values()) + 1e-6 if normalization == "mean_std" and scores else 1.0
    silent = skip_uniform and is_uniform(tree)
    advantages = []
    for row in tree.rows:
        tokens: list[float] = []
        for index in tree.path(row):
            worth = node_credit(tree, index if credit == "value" else row, q_temperature=q_temperature, q_max=q_max)
            advantage = 0.0 if silent or row not in scores else (worth + penalties[row] - baseline) / scale
            tokens += [advantage] * len(tree.nodes[index].token_ids)
        advantages.append(tokens)
    return advantages


def is_uniform(tree: Tree) -> bool:
    """Return whether a tree has no contrast: its scored trajectories are all correct, or all wrong. Incomplete ones
    count as wrong. With scaled outcomes, a tree whose rewards differ has contrast."""
    # Outcomes cannot be compared: an `incomplete_score` would be a contrast between failures.
    kinds = set()
    for row in tree.results:
        node = tree.nodes[row]
        if node.scaled is not None:
            return False
        if node.outcome is not None:
            kinds.add(node.outcome > 0)
    return len(kinds) < 2


def first_appearance(tree: Tree) -> list[list[int]]:
    """Loss masks `[G][T_i]` that train every node once: 1 on tokens of nodes that no earlier trajectory holds."""
    seen: set[int] = set()
    masks = []
    for row in tree.rows:
        mask: list[int] = []
        for index in tree.path(row):
            mask += [int(index not in seen)] * len(tree.nodes[index].token_ids)
            seen.add(index)
        masks.append(mask)
    return masks
