"""What the tokens of a tree are worth: values of its nodes, and how far each is above the root and above its parent.
Follows TreeRL (https://huggingface.co/papers/2506.11902), section 4."""

import math
from collections.abc import Collection, Sequence

from trl_explore.chains.leaves import TreeCompletion, shared_tokens


def token_advantages(leaves: Sequence[TreeCompletion], trained: Collection[int] | None = None) -> list[list[float]]:
    """
    `A(s) = [V(s) - V(root) + V(s) - V(parent)] / sqrt(leaves(s))` for every token of every completion, `[L][T_i]`.

    A node s is a stretch of tokens between two forks, V(s) the mean reward of the leaves below it. Unscorable leaves
    are in no mean and no count, and their tokens get 0.

    Args:
        leaves (`Sequence[TreeCompletion]`):
            The leaves of one prompt, parents first.
        trained (`Collection[int]`, *optional*):
            Places of the leaves whose rows are trained, which are those that the root counts; all by default.

    Returns:
        `list[list[float]]`: Advantages `[L][T_i]`.
    """
    shared = shared_tokens(leaves)
    scored = [i for i, leaf in enumerate(leaves) if not math.isnan(leaf.reward)]
    counted = range(len(leaves)) if trained is None else trained
    # Only differences matter: equal rewards then have exactly no advantage.
    worth = {i: leaves[i].reward - leaves[scored[0]].reward for i in scored}

    def value(places: list[int]) -> float:
        return math.fsum(worth[i] for i in places) / len(places)

    def of_leaf(place: int) -> list[float]:
        advantages: list[float] = []
        root = parent = value(scored)
        for end in sorted({shared[place][i] for i in scored} - {0}):
            below = [i for i in scored if shared[place][i] >= end]
            here, rows = value(below), sum(i in counted for i in below)
            advantage = (here - root + here - parent) / math.sqrt(max(rows, 1))
            advantages += [advantage] * (end - len(advantages))
            parent = here
        return advantages

    return [of_leaf(i) if i in worth else [0.0] * leaf.length for i, leaf in enumerate(leaves)]
