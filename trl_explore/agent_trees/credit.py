"""What the leaves of a prompt's trees are worth, after Tree-GRPO (https://huggingface.co/papers/2509.21240), section
3.3."""

import itertools
from collections.abc import Sequence

from trl_explore.rows.advantages import contrasts

SCALES = ("group", "none")


def leaf_advantages(rewards: Sequence[Sequence[float]], *, intra_weight: float, scale: str) -> list[list[float]]:
    """
    Advantages `[M][L_m]` of the leaves of a prompt's M trees: among all of the prompt, as in GRPO, plus `intra_weight`
    times that among the leaves of their own tree.

    0 where a leaf has no reward (NaN), and from a tree in which fewer than two have one.

    Args:
        rewards (`Sequence[Sequence[float]]`):
            Rewards of the leaves, `[M][L_m]`.
        intra_weight (`float`):
            Weight of the advantage inside a tree.
        scale (`str`):
            `"group"` divides by the standard deviation, of the prompt and of the tree; `"none"` does not.
    """
    among_all = iter(contrasts(list(itertools.chain(*rewards)), scale=scale))
    return [
        [next(among_all) + intra_weight * inside for inside in contrasts(list(tree), scale=scale)] for tree in rewards
    ]
