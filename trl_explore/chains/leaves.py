"""The completions of one prompt as leaves of a tree: chains from the prompt, and what left them at forks. Follows
EPTree of TreeRL (https://huggingface.co/papers/2506.11902), section 3."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class TreeCompletion:
    """A completion: what it shares with the leaf that it left, and tokens of its own."""

    token_ids: list[int]  # its own, behind `start`
    parent: int | None = None  # place of the leaf that it left, before its own; `None`: a chain, from the prompt
    start: int = 0  # token of the completion where it left that
    logprobs: list[float | None] | None = None  # of its own tokens, where they are known
    reward: float = float("nan")  # NaN where unscorable
    solved: bool = False  # by what decides about success

    @property
    def length(self) -> int:
        """Tokens of the whole completion."""
        return self.start + len(self.token_ids)


def completion(leaves: Sequence[TreeCompletion], place: int) -> list[int]:
    """Tokens of the leaf at a place, shared ones first."""
    leaf = leaves[place]
    return leaf.token_ids if leaf.parent is None else completion(leaves, leaf.parent)[: leaf.start] + leaf.token_ids


def chain_of(leaves: Sequence[TreeCompletion], place: int) -> int:
    """The chain that a leaf grows on; its own place if it is one."""
    parent = leaves[place].parent
    return place if parent is None else chain_of(leaves, parent)


def shared_tokens(leaves: Sequence[TreeCompletion]) -> list[list[int]]:
    """Tokens that each two completions have in common because one of them left the other, or both a third, `[L][L]`;
    chains have none, however alike they are."""
    shared: list[list[int]] = []
    for leaf in leaves:
        of_parent = shared[leaf.parent or 0] if shared else []
        before = [min(leaf.start, number) for number in of_parent]  # a chain starts at 0
        for row, number in zip(shared, before, strict=True):
            row.append(number)
        shared.append([*before, leaf.length])
    return shared
