"""The state of a search tree, and the limits that it grows in.

A tree belongs to one prompt. A node holds a chunk of sampled tokens; the path from the root to a terminal node is a
completion. Nothing here changes: a function that grows a tree returns a new one that shares its unchanged nodes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

ROOT = 0
NO_PARENT = -1


class Node(NamedTuple):
    """
    A chunk of a completion: a tuple, since a search makes and changes thousands of them.

    Args:
        index (`int`):
            Position in the tree, in order of creation; the root has 0.
        parent (`int`):
            Index of the parent, -1 for the root.
        depth (`int`):
            Number of chunks from the root to this node; the root has 0.
        token_ids (`list[int]`):
            Sampled tokens, an end-of-sequence token included; empty for the root.
        length (`int`):
            Tokens of the completion so far, from the root to the end of this node.
        entropy (`float`):
            Mean entropy of the distributions its tokens were drawn from, in nats, at least 0; see [`mean_entropy`].
        total_entropy (`float`):
            Sum of the token entropies of the completion so far, from the root to the end of this node.
        terminal (`bool`):
            Whether the completion ends here.
        finished (`bool`):
            Whether it ends with an end-of-sequence token; `False` on a terminal node that a limit cut off.
        iteration (`int`):
            Iteration of the tree in which it was sampled, from 1; 0 for the root.
        direct (`bool`):
            Whether it is a whole completion drawn from the root beside the search, to fill up the rows.
        children (`tuple[int, ...]`):
            Indices of its children.
        visits (`int`):
            Visit count N, at least 0.
        value (`float`):
            Sum of the decayed outcomes backed up through it.
        outcome (`float`, *optional*):
            +1, -1 or the incomplete score of a terminal node; `None` where it could not be scored.
        rewards (`tuple[float, ...]`):
            The reward functions' own values for a terminal node, `[F]`.
        extra (`Mapping[str, Any]`):
            What the reward functions logged beside, by column.
        logprobs (`list[float]`, *optional*):
            Log-probabilities of its tokens under the sampler, where the backend reports them.
    """

    index: int  # type: ignore[assignment]  # of the node; nobody asks a node for `tuple.index`
    parent: int
    depth: int
    token_ids: list[int]
    length: int = 0
    entropy: float = 0.0
    total_entropy: float = 0.0
    terminal: bool = False
    finished: bool = False
    iteration: int = 0
    direct: bool = False
    children: tuple[int, ...] = ()
    visits: int = 0
    value: float = 0.0
    outcome: float | None = None
    rewards: tuple[float, ...] = ()
    extra: Mapping[str, Any] = MappingProxyType({})
    logprobs: list[float | None] | None = None

    @property
    def q(self) -> float:
        """Mean value per visit; 0 without a visit."""
        return self.value / self.visits if self.visits else 0.0


@dataclass(frozen=True)
class Tree:
    """
    The search tree of one prompt.

    Args:
        prompt_ids (`list[int]`):
            Tokens of the prompt.
        nodes (`tuple[Node, ...]`):
            Nodes in order of creation, the root first.
        results (`tuple[int, ...]`):
            Terminal nodes whose trajectories were backed up, in that order: the training rows.
        current (`int`, *optional*):
            Node that the next iteration visits; `None` once the search has ended.
        iterations (`int`):
            Iterations so far.
        generated_tokens (`int`):
            Tokens sampled for this tree, direct rollouts included.
        reason (`str`):
            Why the search ended: `"complete"`, `"iterations"`, `"tokens"`, `"empty frontier"` or `"replayed"`.
    """

    prompt_ids: list[int]
    nodes: tuple[Node, ...]
    results: tuple[int, ...] = ()
    current: int | None = ROOT
    iterations: int = 0
    generated_tokens: int = 0
    reason: str = ""

    @classmethod
    def plant(cls, prompt_ids: list[int]) -> "Tree":
        """A tree that holds the prompt only. Making the root counts as its first visit."""
        return cls(prompt_ids=prompt_ids, nodes=(Node(index=ROOT, parent=NO_PARENT, depth=0, token_ids=[], visits=1),))

    def path(self, index: int) -> list[int]:
        """Nodes from the root's child down to `index`; empty for the root."""
        path: list[int] = []
        while index != ROOT:
            path.append(index)
            index = self.nodes[index].parent
        return path[::-1]

    def completion_ids(self, index: int) -> list[int]:
        """Tokens of the completion that ends at node `index`, `[T]`."""
        return [token for node in self.path(index) for token in self.nodes[node].token_ids]

    def completion_logprobs(self, index: int) -> list[float | None]:
        """Log-probabilities under the sampler of the completion that ends at node `index`, `[T]`."""
        path = [self.nodes[node] for node in self.path(index)]
        return [value for node in path for value in node.logprobs or [None] * len(node.token_ids)]

    def trajectory_entropy(self, index: int) -> float:
        """Mean token entropy over the whole completion that ends at node `index` (Eq. 3)."""
        node = self.nodes[index]
        return node.total_entropy / max(node.length, 1)

    @property
    def rows(self) -> list[int]:
        """Terminal nodes of the training rows, in order of creation."""
        return sorted(self.results)

    @property
    def candidates(self) -> list[int]:
        """Scored terminal nodes that were not backed up yet."""
        taken = set(self.results)
        return [n.index for n in self.nodes if n.terminal and n.outcome is not None and n.index not in taken]


@dataclass(frozen=True)
class Limits:
    """
    Shape and budget of the trees.

    Args:
        num_results (`int`):
            Trajectories G that each tree ends with.
        width (`int`):
            Children per node.
        max_depth (`int`):
            Depth at which a node is terminal.
        node_length (`int`):
            Most tokens per node.
        max_completion_length (`int`):
            Most tokens from the root to a terminal node.
        max_iterations (`int`):
            Most iterations per tree.
        max_tokens (`int`, *optional*):
            Most tokens that the search may sample per tree; `None` sets no limit. Direct rollouts come on top.
        min_width (`int`, *optional*, defaults to `1`):
            Fewest children per node where the width shrinks with depth.
        width_decay (`int`, *optional*, defaults to `0`):
            Children fewer per `max_depth / width` levels of depth; 0 keeps the width.
    """

    num_results: int
    width: int
    max_depth: int
    node_length: int
    max_completion_length: int
    max_iterations: int
    max_tokens: int | None = None
    min_width: int = 1
    width_decay: int = 0

    def width_at(self, depth: int) -> int:
        """Children of a node at `depth`."""
        levels = max(1, self.max_depth // self.width)
        return max(min(self.min_width, self.width), self.width - depth // levels * self.width_decay)

    @property
    def deepest(self) -> int:
        """Levels of the deepest tree that both the depth and the completion budget allow."""
        return min(self.max_depth, math.ceil(self.max_completion_length / self.node_length))

    @property
    def most_results(self) -> int:
        """Terminal nodes that a tree can end with, counted up to `num_results`."""
        leaves = 1
        for depth in range(self.deepest):
            leaves *= self.width_at(depth)
            if leaves >= self.num_results:
                return self.num_results
        return leaves


class Leaf(NamedTuple):
    """A completion to be scored: number of its `tree`, its `completion_ids`, and whether it `finished` by itself."""

    tree: int
    completion_ids: list[int]
    finished: bool


class Verdict(NamedTuple):
    """What a completion is worth; the fields are those of [`Node`]."""

    outcome: float | None
    rewards: tuple[float, ...] = ()
    extra: Mapping[str, Any] = MappingProxyType({})
