"""Whether an arm lies outside what GRPO and its rivals reach in pass@1 and pass@k together.

The weighting of the two metrics under which an arm looks best is chosen on the development seeds. It is outside if
it is clearly ahead of every rival under that weighting on the fresh seeds, and inside if it is clearly behind the one
that was best under it on the development seeds; else it is on the frontier.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from trl_explore.compare.costs import interval

WEIGHTS = np.linspace(0.0, 1.0, 21)  # of the first of two metrics


@dataclass(frozen=True)
class Place:
    """
    Where an arm lies.

    Args:
        verdict (`str`):
            `"outside"`, `"on"` or `"inside"`.
        weight (`float`):
            Weight of the first metric, in `[0, 1]`.
        rival (`int`):
            Which of the others is closest: over it the mean lead is least.
        lead (`float`):
            That lead, in points of a hundred.
        half (`float`, *optional*):
            Half of its 95 % interval over seeds. None for fewer than three seeds.
    """

    verdict: Literal["outside", "on", "inside"]
    weight: float
    rival: int
    lead: float
    half: float | None


def place(arm: np.ndarray, others: np.ndarray, *, first_arm: np.ndarray, first_others: np.ndarray) -> Place:
    """
    Where an arm lies, by the rule above.

    Args:
        arm (`np.ndarray` of shape `(S, 2)`):
            Two metrics of an arm, by fresh seed, in `[0, 1]`.
        others (`np.ndarray` of shape `(A, S, 2)`):
            Those of the arms that make the frontier, on the same seeds.
        first_arm (`np.ndarray` of shape `(D, 2)`):
            The arm on development seeds.
        first_others (`np.ndarray` of shape `(A, D, 2)`):
            The others there.

    Returns:
        [`Place`]: The verdict, and what it stands on.
    """
    directions = np.stack([WEIGHTS, 1 - WEIGHTS])  # (2, W)
    means = first_others.mean(axis=1) @ directions  # (A, W)
    chosen = int(np.argmax(first_arm.mean(axis=0) @ directions - means.max(axis=0)))
    weighting = directions[:, chosen]
    leads = [interval((100 * (arm - other) @ weighting).tolist()) for other in others]

    def clear(which: int, sign: int) -> bool:
        mean, half = leads[which]
        return half is not None and sign * mean > half

    best = int(np.argmax(means[:, chosen]))
    closest = min(range(len(leads)), key=lambda which: leads[which][0])
    ahead = all(clear(which, 1) for which in range(len(leads)))
    verdict: Literal["outside", "on", "inside"] = "outside" if ahead else "inside" if clear(best, -1) else "on"
    return Place(verdict, float(WEIGHTS[chosen]), closest, *leads[closest])
