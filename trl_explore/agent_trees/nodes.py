"""Choice of the nodes at which a tree of turns is expanded. Follows Tree-GRPO
(https://huggingface.co/papers/2509.21240), section 3.2.

A node is one turn: the model's response and the answer of the tools. The root is the prompt. To expand the node before
a turn is to sample that turn, and all later turns, again.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Span(NamedTuple):
    """Turns at which a leaf can be forked. An earlier leaf of its tree must not have the same tokens before the turn,
    because each node would then be listed twice."""

    first: int  # from 0
    end: int  # exclusive


def open_nodes(spans: Sequence[Span]) -> list[tuple[int, int]]:
    """Return the nodes that can be expanded, as pairs of a leaf's index and the turn that is sampled again. Turn 0
    expands the root."""
    nodes = []
    for leaf, span in enumerate(spans):
        for turn in range(span.first, span.end):
            nodes.append((leaf, turn))
    return nodes


def draw_nodes(spans: Sequence[Span], number: int, *, generator: torch.Generator) -> dict[tuple[int, int], int]:
    """Sample `number` nodes with replacement. Return the number of times that each sampled node is expanded."""
    nodes = open_nodes(spans)
    drawn: dict[tuple[int, int], int] = {}
    for place in torch.randint(len(nodes), (number,), generator=generator).tolist():
        drawn[nodes[place]] = drawn.get(nodes[place], 0) + 1
    return drawn


def draw_leaves(num_branches: int, number: int | None, *, generator: torch.Generator) -> list[int]:
    """Sample the branches of a tree that are trained. Return their indices, ascending. `number` is the number of
    trained leaves. The main row is one of them, so at most `number - 1` branches are trained. None: all are."""
    if number is None or number > num_branches:
        return list(range(num_branches))
    return sorted(torch.randperm(num_branches, generator=generator)[: number - 1].tolist())
