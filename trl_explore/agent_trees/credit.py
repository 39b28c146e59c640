"""Advantages of the leaves of a prompt's trees. Follows Tree-GRPO (https://huggingface.co/papers/2509.21240), section
3.3."""

import itertools
from collections.abc import Sequence

from trl_explore.rows.advantages import contrasts

SCALES = ("group", "none")


def leaf_advantages(rewards: Sequence[Sequence[float]], *, intra_weight: float, scale: str) -> list[list[float]]:
    """
    Return the advantages of the leaves of a prompt's M trees, `[M][L_m]`.

    A leaf gets its advantage among all leaves of the prompt, as in GRPO, plus `intra_weight` times its advantage among
    the leaves of its tree. Both are 0 for a leaf without a reward (NaN), and if fewer than two leaves have a reward.

    Args:
        rewards (`Sequence[Sequence[float]]`):
            Rewards of the leaves, `[M][L_m]`.
        intra_weight (`float`):
            Weight of the advantage inside a tree.
        scale (`str`):
            `"group"`: divide by the standard deviation of the prompt, or of the tree. `"none"`: do not divide.
    """
    among_prompt = contrasts(list(itertools.chain(*rewards)), scale=scale)
    advantages = []
    first = 0  # index of the tree's first leaf among the leaves of the prompt
    for tree in rewards:
        of_tree = []
        for place, among_tree in enumerate(contrasts(list(tree), scale=scale)):
            of_tree.append(among_prompt[first + place] + intra_weight * among_tree)
        advantages.append(of_tree)
        first += len(tree)
    return advantages
