"""Where the tree of a trajectory grows: at any of its nodes but the leaves.

After Tree-GRPO (https://huggingface.co/papers/2509.21240), section 3.2. A node is one turn: thought, action and
answer; the root is the prompt. A trajectory of K turns has K nodes, the last of which is a leaf.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Span(NamedTuple):
    """Turns of a leaf's trajectory before which it can be left: those that it does not share with an earlier leaf."""

    first: int
    end: int  # exclusive


def open_nodes(spans: Sequence[Span]) -> list[tuple[int, int]]:
    """Leaf and turn of each node of a tree that is no leaf: leaving before turn 0 is growing from the root."""
    return [(leaf, turn) for leaf, span in enumerate(spans) for turn in range(span.first, span.end)]


def draw_nodes(spans: Sequence[Span], number: int, *, generator: torch.Generator) -> dict[tuple[int, int], int]:
    """How often each node is expanded, of so many draws with replacement."""
    nodes = open_nodes(spans)
    drawn: dict[tuple[int, int], int] = {}
    for place in torch.randint(len(nodes), (number,), generator=generator).tolist():
        drawn[nodes[place]] = drawn.get(nodes[place], 0) + 1
    return drawn


def draw_leaves(num_branches: int, number: int | None, *, generator: torch.Generator) -> list[int]:
    """Places of the branches of a tree that are trained beside its first trajectory, ascending: with it `number`
    leaves, drawn at random; all for `None`."""
    if number is None or number > num_branches:
        return list(range(num_branches))
    return sorted(torch.randperm(num_branches, generator=generator)[: number - 1].tolist())
