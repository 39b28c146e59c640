"""A search tree and its limits. A node holds a chunk of sampled tokens, and the path from the root to a terminal node
is a completion. Trees are immutable: a function that grows a tree returns a new tree that shares the unchanged
nodes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

ROOT = 0
NO_PARENT = -1


class Node(NamedTuple):
    """A chunk of a completion. It is a tuple for speed, because a search makes and changes thousands of nodes."""

    index: int  # type: ignore[assignment]  # number of the node; it hides the method `tuple.index`, which is not used
    parent: int  # -1 for the root
    depth: int  # number of chunks from the root; 0 for the root
    token_ids: list[int]  # including an end-of-sequence token; empty for the root
    length: int = 0  # number of tokens from the root to the end of this node
    entropy: float = 0.0  # mean over its tokens in nats, at least 0
    total_entropy: float = 0.0  # sum of the token entropies from the root to the end of this node
    terminal: bool = False  # the completion ends here
    finished: bool = False  # True: it ends with an end-of-sequence token; False: a limit cut it off
    iteration: int = 0  # iteration in which it was sampled, from 1; 0 for the root
    direct: bool = False  # a whole completion sampled from the root without a search, to fill up the rows
    children: tuple[int, ...] = ()
    visits: int = 0
    value: float = 0.0  # sum of the decayed outcomes that were backed up through it
    outcome: float | None = None  # of a terminal node: +1, -1 or `incomplete_score`; None without a reward
    reward: float | None = None  # of a terminal node; None unless `reward_mapping="scaled"`, which scales outcomes
    scaled: float | None = None  # outcome on the scale of the tree's rewards, in [-1, 1]; None if they are equal
    rewards: tuple[float, ...] = ()  # raw rewards of a terminal node, `[F]`
    extra: Mapping[str, Any] = MappingProxyType({})  # values that reward functions logged, by column
    logprobs: list[float | None] | None = None  # under the sampling policy; None if not reported

    @property
    def q(self) -> float:
        """Mean value per visit; 0 without a visit."""
        if not self.visits:
            return 0.0
        return self.value / self.visits

    @property
    def worth(self) -> float | None:
        """Outcome that is backed up and credited: `scaled` if there is one, else `outcome`."""
        if self.scaled is None:
            return self.outcome
        return self.scaled


class Tree(NamedTuple):
    """The search tree of one prompt."""

    prompt_ids: list[int]
    nodes: tuple[Node, ...]  # in order of creation, the root first
    results: tuple[int, ...] = ()  # terminal nodes that were backed up, in this order; they become training rows
    current: tuple[int, ...] = (ROOT,)  # nodes that the next iteration visits; empty if the search has ended
    iterations: int = 0
    generated_tokens: int = 0  # including direct rollouts
    reason: str = ""  # why the search ended: "complete", "iterations", "tokens", "empty frontier" or "replayed"

    @classmethod
    def plant(cls, prompt_ids: list[int]) -> "Tree":
        """Return a tree that contains only the prompt. The root starts with one visit."""
        return cls(prompt_ids=prompt_ids, nodes=(Node(index=ROOT, parent=NO_PARENT, depth=0, token_ids=[], visits=1),))

    def path(self, index: int) -> list[int]:
        """Return the nodes from the root's child down to `index`. The list is empty for the root."""
        path: list[int] = []
        while index != ROOT:
            path.append(index)
            index = self.nodes[index].parent
        return path[::-1]

    def completion_ids(self, index: int) -> list[int]:
        """Return the tokens of the completion that ends at node `index`, `[T]`."""
        token_ids: list[int] = []
        for node in self.path(index):
            token_ids += self.nodes[node].token_ids
        return token_ids

    def completion_logprobs(self, index: int) -> list[float | None]:
        """Return the log-probabilities of the completion that ends at node `index`, under the sampling policy,
        `[T]`."""
        logprobs: list[float | None] = []
        for number in self.path(index):
            node = self.nodes[number]
            logprobs += node.logprobs or [None] * len(node.token_ids)
        return logprobs

    def trajectory_entropy(self, index: int) -> float:
        """Return the mean token entropy of the completion that ends at node `index`, in nats (Eq. 3)."""
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
        found = []
        for node in self.nodes:
            if node.terminal and node.outcome is not None and node.index not in taken:
                found.append(node.index)
        return found


@dataclass(frozen=True)
class Limits:
    """Shape and budget of each tree."""

    num_results: int  # number of trajectories of a finished tree, G
    width: int  # largest number of children per node
    max_depth: int  # depth at which a node is terminal
    node_length: int  # largest number of tokens per node
    max_completion_length: int  # largest number of tokens of a completion
    max_iterations: int
    max_tokens: int | None = None  # tokens that the search may sample, without direct rollouts; None for no limit
    min_width: int = 1  # least width, if the width decreases with depth
    parallel: int = 1  # number of nodes that an iteration visits
    width_decay: int = 0  # number by which the width decreases after every `max_depth // width` levels; 0: never

    def width_at(self, depth: int) -> int:
        """Return the largest number of children of a node at `depth`."""
        if not self.width_decay:
            return self.width
        levels_per_decrease = max(1, self.max_depth // self.width)
        num_decreases = depth // levels_per_decrease
        least = min(self.min_width, self.width)
        return max(least, self.width - num_decreases * self.width_decay)

    @property
    def deepest(self) -> int:
        """Number of levels of the deepest tree that `max_depth` and `max_completion_length` allow."""
        return min(self.max_depth, math.ceil(self.max_completion_length / self.node_length))

    @property
    def most_results(self) -> int:
        """Maximum number of terminal nodes of a tree, or `num_results` if that is smaller."""
        leaves = 1
        for depth in range(self.deepest):
            leaves *= self.width_at(depth)
            if leaves >= self.num_results:
                return self.num_results
        return leaves


class Leaf(NamedTuple):
    """A completion to score."""

    tree: int  # number of the tree
    completion_ids: list[int]
    finished: bool  # True if it ends with an end-of-sequence token


class Verdict(NamedTuple):
    """Outcome and rewards of a completion. The fields mean the same as in [`Node`]."""

    outcome: float | None
    reward: float | None = None
    rewards: tuple[float, ...] = ()
    extra: Mapping[str, Any] = MappingProxyType({})
