"""A finished search tree as a JSON object, which `dump_trees` writes and `trl-explore tree` shows."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from trl_explore.trees.credit import node_credit
from trl_explore.trees.state import ROOT, Tree


def tree_record(
    tree: Tree,
    *,
    step: int,
    index: int,
    decode: Callable[[list[int]], str],
    reward_weights: Sequence[float],
    q_temperature: float,
    q_max: float,
) -> dict[str, Any]:
    """
    Return a finished tree for JSON. Unknown values are None, because JSON has no NaN.

    Args:
        tree ([`Tree`]):
            The tree.
        step (`int`):
            Training step.
        index (`int`):
            Number of the prompt in the batch of this process.
        decode (`Callable`):
            Decodes tokens.
        reward_weights (`Sequence[float]`):
            Weights of the reward functions, `[F]`.
        q_temperature (`float`):
            See [`node_credit`].
        q_max (`float`):
            See [`node_credit`].

    Returns:
        `dict`: The record. Its nodes are in order of creation.
    """
    outcomes, worths = [], []  # of training rows; rows without a reward are left out
    for row in tree.rows:
        end = tree.nodes[row]
        if end.outcome is not None:
            outcomes.append(end.outcome)
        if end.worth is not None:
            worths.append(end.worth)
    row_numbers = {node: number for number, node in enumerate(tree.rows)}
    nodes = []
    for node in tree.nodes:
        weighted: list[float] = []
        rewards: list[float | None] = []
        for reward in node.rewards:
            rewards.append(None if math.isnan(reward) else reward)
        for weight, reward in zip(reward_weights, node.rewards, strict=False):  # an unscored node has no rewards
            if not math.isnan(reward):
                weighted.append(weight * reward)
        is_root = node.index == ROOT
        nodes.append(
            {
                "index": node.index,
                "parent": None if is_root else node.parent,
                "depth": node.depth,
                "text": decode(node.token_ids),
                "token_ids": node.token_ids,
                "tokens": len(node.token_ids),
                "visits": node.visits,
                "value": node.value,
                "q": node.q,
                "credit": node_credit(tree, node.index, q_temperature=q_temperature, q_max=q_max),
                "entropy": None if is_root or node.direct else node.entropy,
                "terminal": node.terminal,
                "finished": node.finished,
                "direct": node.direct,
                "outcome": node.outcome,
                "worth": node.worth,
                "reward": _sum(weighted),
                "rewards": rewards or None,
                "iteration": node.iteration,
                "result": row_numbers.get(node.index),
            }
        )
    return {
        "step": step,
        "index": index,
        "prompt": decode(tree.prompt_ids),
        "prompt_tokens": len(tree.prompt_ids),
        "iterations": tree.iterations,
        "generated_tokens": tree.generated_tokens,
        "success_ratio": _mean([outcome > 0 for outcome in outcomes]),
        "baseline": _mean(worths),
        "reason": tree.reason,
        "results": list(tree.rows),
        "nodes": nodes,
    }


def _sum(values: Sequence[float]) -> float | None:
    """Return the sum, or None without values."""
    if not values:
        return None
    return math.fsum(values)


def _mean(values: Sequence[float]) -> float | None:
    """Return the mean, or None without values."""
    if not values:
        return None
    return math.fsum(values) / len(values)
