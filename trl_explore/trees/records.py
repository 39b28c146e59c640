"""A finished search tree as one JSON object: what `dump_trees` writes and `trl-explore tree` shows."""

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
    """A finished tree for JSON, nodes in order of creation; `index` is its prompt's place in the process's batch. JSON
    has no NaN: what is not known is `None`."""
    outcomes = [o for row in tree.rows if (o := tree.nodes[row].outcome) is not None]
    worths = [w for row in tree.rows if (w := tree.nodes[row].worth) is not None]
    place = {node: position for position, node in enumerate(tree.rows)}
    nodes = []
    for node in tree.nodes:
        given = [w * r for w, r in zip(reward_weights, node.rewards, strict=False) if not math.isnan(r)]
        nodes.append(
            {
                "index": node.index,
                "parent": None if node.index == ROOT else node.parent,
                "depth": node.depth,
                "text": decode(node.token_ids),
                "token_ids": node.token_ids,
                "tokens": len(node.token_ids),
                "visits": node.visits,
                "value": node.value,
                "q": node.q,
                "credit": node_credit(tree, node.index, q_temperature=q_temperature, q_max=q_max),
                "entropy": None if node.index == ROOT or node.direct else node.entropy,
                "terminal": node.terminal,
                "finished": node.finished,
                "direct": node.direct,
                "outcome": node.outcome,
                "reward": math.fsum(given) if given else None,
                "rewards": [None if math.isnan(r) else r for r in node.rewards] or None,
                "iteration": node.iteration,
                "result": place.get(node.index),
            }
        )
    return {
        "step": step,
        "index": index,
        "prompt": decode(tree.prompt_ids),
        "prompt_tokens": len(tree.prompt_ids),
        "iterations": tree.iterations,
        "generated_tokens": tree.generated_tokens,
        "success_ratio": sum(o > 0 for o in outcomes) / len(outcomes) if outcomes else None,
        "baseline": math.fsum(worths) / len(worths) if worths else None,
        "reason": tree.reason,
        "results": list(tree.rows),
        "nodes": nodes,
    }
