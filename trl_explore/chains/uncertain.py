"""Choice of forks in TreeRL: the sampled tokens with the lowest probability. Follows EPTree of TreeRL
(https://huggingface.co/papers/2506.11902), section 3.2."""

import re
from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from heapq import nlargest
from itertools import accumulate

import torch

from trl_explore.chains.leaves import TreeCompletion, chain_of
from trl_explore.pivots.choice import Decoder, token_texts

SELECTIONS = ("uncertain", "random")
ForkPoint = tuple[int, int]  # index of a completion, and the first of its tokens that is sampled again


def open_forks(leaves: Sequence[TreeCompletion], ends: Sequence[int]) -> list[ForkPoint]:
    """
    Return the points at which completions can be forked: at their own tokens, where no branch forks yet.

    Args:
        leaves (`Sequence[TreeCompletion]`):
            The completions of one prompt.
        ends (`Sequence[int]`):
            Each completion may be forked only before this token, `[L]`.
    """
    used = {(leaf.parent, leaf.start) for leaf in leaves}
    points = []
    for i, leaf in enumerate(leaves):
        first = leaf.start
        if leaf.parent is not None:
            first += 1  # a fork at the first token of a branch is a fork of its parent
        for token in range(first, min(leaf.length, ends[i])):
            if (i, token) not in used:
                points.append((i, token))
    return points


def choose_forks(
    leaves: Sequence[TreeCompletion],
    points: Sequence[ForkPoint],
    number: int,
    *,
    selection: str,
    generator: torch.Generator,
) -> list[ForkPoint]:
    """
    Choose forks for each chain, in the chain or in the branches that descend from it.

    Args:
        leaves (`Sequence[TreeCompletion]`):
            The completions of one prompt.
        points (`Sequence[tuple[int, int]]`):
            Points at which they can be forked.
        number (`int`):
            Number of forks per chain. A chain with fewer points is forked at all of them.
        selection (`str`):
            `"uncertain"`: the points with the highest `-log p`. `"random"`: random points.
        generator (`torch.Generator`):
            Draws random points.
    """
    chains = [chain_of(leaves, i) for i in range(len(leaves))]
    points_of_chain: dict[int, list[ForkPoint]] = {chain: [] for chain in chains}
    for point in points:
        points_of_chain[chains[point[0]]].append(point)
    chosen: list[ForkPoint] = []
    for candidates in points_of_chain.values():
        if selection == "uncertain":
            chosen += nlargest(number, candidates, key=partial(uncertainty, leaves))
        else:
            order = torch.randperm(len(candidates), generator=generator)[:number].tolist()
            chosen += [candidates[i] for i in order]
    return chosen


def uncertainty(leaves: Sequence[TreeCompletion], point: ForkPoint) -> float:
    """Return `-log p` of the token at a point, or 0 if its probability is unknown."""
    place, token = point
    leaf = leaves[place]
    logprob = leaf.logprobs[token - leaf.start] if leaf.logprobs else None
    if not logprob:  # None or 0
        return 0.0
    return -logprob


def first_text_end(
    ids: Sequence[int], tokenizer: Decoder, texts: Sequence[str], *, cache: dict[int, str]
) -> int | None:
    """
    Return the index of the token in which the first occurrence of any of the texts ends, or None if no text occurs.

    The search ignores case.

    Args:
        ids (`Sequence[int]`):
            Tokens to search, `[T]`.
        tokenizer (`Decoder`):
            Decodes the tokens.
        texts (`Sequence[str]`):
            Texts to find.
        cache (`dict[int, str]`):
            Texts of tokens that were decoded before; new ones are added.
    """
    parts = token_texts(ids, tokenizer, cache=cache)
    whole = "".join(parts)
    found = []
    for text in texts:
        # Not `lower()`, which can change the number of characters.
        match = re.search(re.escape(text), whole, re.IGNORECASE)
        if match:
            found.append(match.end())
    if not found:
        return None
    token_ends = list(accumulate(map(len, parts)))
    return bisect_left(token_ends, min(found))


def choose_trained(leaves: Sequence[TreeCompletion], number: int | None, *, generator: torch.Generator) -> list[int]:
    """
    Return the indices of the completions that are trained: all chains, and random branches up to `number` completions.

    If no chain succeeded, a successful branch is chosen before all other branches. If `number` is None, all
    completions are trained. Completions that TRL masks are left out, and do not count.
    """
    trainable = [i for i, leaf in enumerate(leaves) if leaf.is_trained]
    if number is None or number >= len(trainable):
        return trainable
    chains, branches = [], []
    for i in trainable:
        if leaves[i].parent is None:
            chains.append(i)
        else:
            branches.append(i)
    order = torch.randperm(len(branches), generator=generator).tolist()
    shuffled = [branches[i] for i in order]  # the first of these are trained
    if not any(leaves[i].solved for i in chains):
        successes = [i for i in shuffled if leaves[i].solved]
        if successes:
            shuffled.remove(successes[0])
            shuffled.insert(0, successes[0])
    return sorted(chains + shuffled[: number - len(chains)])
