"""Where EPTree forks: at the tokens of a tree that surprised the policy most. Follows TreeRL
(https://huggingface.co/papers/2506.11902), section 3.2."""

from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from heapq import nlargest
from itertools import accumulate

import torch

from trl_explore.chains.leaves import TreeCompletion, chain_of
from trl_explore.pivots.choice import Decoder, token_texts

SELECTIONS = ("uncertain", "random")
Place = tuple[int, int]  # place of a leaf, and the token of its completion that is sampled anew


def open_places(leaves: Sequence[TreeCompletion], ends: Sequence[int]) -> list[Place]:
    """Where leaves may be forked, before token `ends` `[L]` of their completions: at every token of their own but a
    branch's first, which is where it left, and where nothing left before."""
    taken = {(leaf.parent, leaf.start) for leaf in leaves}
    return [
        (i, token)
        for i, leaf in enumerate(leaves)
        for token in range(leaf.start + (leaf.parent is not None), min(leaf.length, ends[i]))
        if (i, token) not in taken
    ]


def choose_forks(
    leaves: Sequence[TreeCompletion],
    places: Sequence[Place],
    number: int,
    *,
    selection: str,
    generator: torch.Generator,
) -> list[Place]:
    """So many `places` of every chain and what grows on it, or all where there are fewer: those with the highest
    `-log p` of the sampled token (`"uncertain"`; not known counts as certain), or any (`"random"`)."""
    chains = [chain_of(leaves, i) for i in range(len(leaves))]
    of_chain: dict[int, list[Place]] = {chain: [] for chain in chains}
    for place in places:
        of_chain[chains[place[0]]].append(place)
    if selection == "uncertain":
        return [fork for own in of_chain.values() for fork in nlargest(number, own, key=partial(uncertainty, leaves))]
    drawn = {chain: torch.randperm(len(own), generator=generator)[:number] for chain, own in of_chain.items()}
    return [of_chain[chain][i] for chain, found in drawn.items() for i in found.tolist()]


def uncertainty(leaves: Sequence[TreeCompletion], fork: Place) -> float:
    """`-log p` of the token that is sampled anew; 0 where it is not known."""
    place, token = fork
    leaf = leaves[place]
    logprob = leaf.logprobs[token - leaf.start] if leaf.logprobs else None
    return -logprob if logprob else 0.0


def said_at(ids: Sequence[int], tokenizer: Decoder, texts: Sequence[str], *, cache: dict[int, str]) -> int | None:
    """The first of the tokens with which one of some texts is said, in whatever case; `None` where none is."""
    parts = token_texts(ids, tokenizer, cache=cache)
    whole, ends = "".join(parts).lower(), list(accumulate(map(len, parts)))
    found = [whole.index(text.lower()) + len(text) for text in texts if text.lower() in whole]
    return bisect_left(ends, min(found)) if found else None


def drawn_leaves(leaves: Sequence[TreeCompletion], number: int | None, *, generator: torch.Generator) -> list[int]:
    """Places of the leaves that are trained: all chains, and branches drawn up to `number`, all for `None`. Where no
    chain succeeded, one of the successful branches is among them."""
    if number is None or number >= len(leaves):
        return list(range(len(leaves)))
    chains, branches = ([i for i, leaf in enumerate(leaves) if (leaf.parent is None) == own] for own in (True, False))
    drawn = [branches[i] for i in torch.randperm(len(branches), generator=generator).tolist()]
    if not any(leaves[i].solved for i in chains):
        first = next((i for i in drawn if leaves[i].solved), None)
        drawn.sort(key=lambda i: i != first)
    return sorted(chains + drawn[: number - len(chains)])
