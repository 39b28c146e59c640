"""A search tree and its limits. A node holds a chunk of sampled tokens; the path from the root to a terminal node is a
completion. Nothing here changes: a function that grows a tree returns a new one that shares unchanged nodes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

ROOT = 0
NO_PARENT = -1


class Node(NamedTuple):
    """A chunk of a completion: a tuple, since a search makes and changes thousands of them."""

    index: int  # type: ignore[assignment]  # of the node; nobody asks a node for `tuple.index`
    parent: int  # -1 for the root
    depth: int  # chunks from the root, which has 0
    token_ids: list[int]  # an end-of-sequence token included; empty for the root
    length: int = 0  # tokens from the root to the end of this node
    entropy: float = 0.0  # mean over its tokens in nats, at least 0
    total_entropy: float = 0.0  # sum of the token entropies from the root to the end of this node
    terminal: bool = False  # the completion ends here
    finished: bool = False  # with an end-of-sequence token; not where a limit cut it off
    iteration: int = 0  # in which it was sampled, from 1; 0 for the root
    direct: bool = False  # a whole completion drawn from the root beside the search, to fill up the rows
    children: tuple[int, ...] = ()
    visits: int = 0
    value: float = 0.0  # sum of the decayed outcomes backed up through it
    outcome: float | None = None  # of a terminal node: +1, -1 or the incomplete score; `None` where unscorable
    reward: float | None = None  # of a terminal node, if outcomes are scaled to the tree's rewards
    scaled: float | None = None  # outcome on the scale of the tree's rewards, in [-1, 1]; `None` if they do not differ
    rewards: tuple[float, ...] = ()  # the reward functions' own values for a terminal node, `[F]`
    extra: Mapping[str, Any] = MappingProxyType({})  # what the reward functions logged, by column
    logprobs: list[float | None] | None = None  # under the sampler, where the backend reports them

    @property
    def q(self) -> float:
        """Mean value per visit; 0 without a visit."""
        return self.value / self.visits if self.visits else 0.0

    @property
    def worth(self) -> float | None:
        """The outcome that is backed up and credited: `scaled` if there is one, else `outcome`."""
        return self.outcome if self.scaled is None else self.scaled


class Tree(NamedTuple):
    """The search tree of one prompt."""

    prompt_ids: list[int]
    nodes: tuple[Node, ...]  # in order of creation, the root first
    results: tuple[int, ...] = ()  # terminal nodes whose trajectories were backed up, in that order: the training rows
    current: tuple[int, ...] = (ROOT,)  # nodes that the next iteration visits; none once the search has ended
    iterations: int = 0
    generated_tokens: int = 0  # direct rollouts included
    reason: str = ""  # of its end: "complete", "iterations", "tokens", "empty frontier" or "replayed"

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
    """Shape and budget of each tree."""

    num_results: int  # trajectories G that it ends with
    width: int  # children per node
    max_depth: int  # at which a node is terminal
    node_length: int  # most tokens per node
    max_completion_length: int  # most tokens from the root to a terminal node
    max_iterations: int
    max_tokens: int | None = None  # that the search may sample, direct rollouts on top; `None` sets no limit
    min_width: int = 1  # where the width shrinks with depth
    parallel: int = 1  # nodes that an iteration visits
    width_decay: int = 0  # children fewer per `max_depth / width` levels of depth; 0 keeps the width

    def width_at(self, depth: int) -> int:
        """Children of a node at `depth`."""
        if not self.width_decay:
            return self.width
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
    reward: float | None = None
    rewards: tuple[float, ...] = ()
    extra: Mapping[str, Any] = MappingProxyType({})
