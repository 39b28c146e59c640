"""Advantages of the tokens of a tree of completions: the value of a token's node, relative to the values of the root
and of the parent node. Follows TreeRL (https://huggingface.co/papers/2506.11902), section 4."""

import math
from collections.abc import Collection, Mapping, Sequence

from trl_explore.chains.leaves import TreeCompletion, shared_tokens


def token_advantages(leaves: Sequence[TreeCompletion], trained: Collection[int] | None = None) -> list[list[float]]:
    """
    Return `A(s) = [V(s) - V(root) + V(s) - V(parent)] / sqrt(leaves(s))` for every token of every completion.

    A node s is a stretch of tokens between two forks. V(s) is the mean reward of the completions that run through s,
    and leaves(s) is their number. Completions without a reward (NaN) are left out of both, and their tokens get 0.

    Args:
        leaves (`Sequence[TreeCompletion]`):
            The completions of one prompt, parents first.
        trained (`Collection[int]`, *optional*):
            Indices of the completions whose rows are trained. leaves(s) counts only these. None: all completions.

    Returns:
        `list[list[float]]`: Advantages `[L][T_i]`.
    """
    shared = shared_tokens(leaves)
    if trained is None:
        trained = range(len(leaves))
    scored = [i for i, leaf in enumerate(leaves) if not math.isnan(leaf.reward)]
    # Subtract one reward from all rewards. The formula uses only differences of rewards, so it gives the same result.
    # But if all rewards are equal, they are now 0, and no rounding error leaves a tiny advantage.
    rewards = {i: leaves[i].reward - leaves[scored[0]].reward for i in scored}
    advantages = []
    for i, leaf in enumerate(leaves):
        if i in rewards:
            advantages.append(_advantages_of_one(shared[i], rewards, trained))
        else:
            advantages.append([0.0] * leaf.length)
    return advantages


def _advantages_of_one(shared: Sequence[int], rewards: Mapping[int, float], trained: Collection[int]) -> list[float]:
    """
    Return the advantages of the tokens of one completion, `[T]`.

    Args:
        shared (`Sequence[int]`):
            Number of tokens that it shares with each completion of the tree, `[L]`.
        rewards (`Mapping[int, float]`):
            Rewards of the completions that have one, by index.
        trained (`Collection[int]`):
            Indices of the completions that leaves(s) counts.
    """
    advantages: list[float] = []
    root = parent = _mean_reward(rewards, list(rewards))
    # A node ends where another completion forks. The last node ends with this completion, whose length is in `shared`.
    node_ends = {shared[i] for i in rewards if shared[i] > 0}
    for end in sorted(node_ends):
        below = [i for i in rewards if shared[i] >= end]
        value = _mean_reward(rewards, below)
        trained_below = [i for i in below if i in trained]
        advantage = (value - root + value - parent) / math.sqrt(max(len(trained_below), 1))
        advantages += [advantage] * (end - len(advantages))
        parent = value
    return advantages


def _mean_reward(rewards: Mapping[int, float], places: Sequence[int]) -> float:
    return math.fsum(rewards[i] for i in places) / len(places)
