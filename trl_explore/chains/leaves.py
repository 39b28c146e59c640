"""Completions of one prompt as the leaves of a tree. Follows EPTree of TreeRL
(https://huggingface.co/papers/2506.11902), section 3.

A chain is sampled from the prompt. A branch forks from another completion, its parent, and shares the parent's tokens
before the fork. Completions refer to each other by their index in a list in which parents come first.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class TreeCompletion:
    """A completion: tokens that it shares with its parent, and then its own tokens."""

    token_ids: list[int]  # its own tokens: those from token `start` of the completion
    parent: int | None = None  # index of the completion from which it forks; None: a chain
    start: int = 0  # number of tokens that it shares with its parent; 0 for a chain
    logprobs: list[float | None] | None = None  # of its own tokens; None if unknown
    reward: float = float("nan")  # NaN if it has no reward
    solved: bool = False  # True if it succeeded
    is_trained: bool = True  # False if TRL masks the whole completion because it is truncated

    @property
    def length(self) -> int:
        """Return the number of tokens of the whole completion."""
        return self.start + len(self.token_ids)


def completion(leaves: Sequence[TreeCompletion], place: int) -> list[int]:
    """Return all tokens of the completion at index `place`, `[T]`."""
    leaf = leaves[place]
    if leaf.parent is None:
        return leaf.token_ids
    return completion(leaves, leaf.parent)[: leaf.start] + leaf.token_ids


def chain_of(leaves: Sequence[TreeCompletion], place: int) -> int:
    """Return the index of the chain from which the completion at index `place` descends. A chain returns itself."""
    parent = leaves[place].parent
    return place if parent is None else chain_of(leaves, parent)


def shared_tokens(leaves: Sequence[TreeCompletion]) -> list[list[int]]:
    """
    Return the length of the prefix that each two completions share by a fork, `[L][L]`.

    Two chains share 0 tokens, even if their texts begin alike. A completion shares all its tokens with itself.
    """
    shared: list[list[int]] = []
    for leaf in leaves:
        with_earlier = [0] * len(shared)  # number of tokens shared with each earlier completion
        if leaf.parent is not None:
            with_earlier = [min(leaf.start, number) for number in shared[leaf.parent]]
        for row, number in zip(shared, with_earlier, strict=True):
            row.append(number)
        shared.append([*with_earlier, leaf.length])
    return shared
