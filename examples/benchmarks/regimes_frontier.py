"""Places of arms relative to the frontier that GRPO and its rivals reach in two metrics, such as pass@1 and pass@k.

An arm is compared with the others by a weighted sum of the two metrics. The weights are chosen so that the arm looks
best on the development seeds. With these weights, the fresh seeds decide its place:

- *outside*: the arm is clearly ahead of every other arm, that is, every 95 % interval excludes 0.
- *inside*: the arm is clearly behind the arm that had the highest weighted sum on the development seeds.
- *on*: all other cases.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from trl_explore.compare.costs import interval

WEIGHTS = np.linspace(0.0, 1.0, 21)  # of the first metric; the second metric has the rest

Verdict = Literal["outside", "on", "inside"]


@dataclass(frozen=True)
class Place:
    """
    Place of an arm relative to the frontier.

    Args:
        verdict (`str`):
            `"outside"`, `"on"` or `"inside"`.
        weight (`float`):
            Weight of the first metric, from 0 to 1.
        rival (`int`):
            Index of the other arm over which this arm's mean lead is smallest.
        lead (`float`):
            Mean lead over that arm in the weighted sum, in percentage points.
        half (`float`, *optional*):
            Half the length of the lead's 95 % interval over seeds. None for fewer than three seeds.
    """

    verdict: Verdict
    weight: float
    rival: int
    lead: float
    half: float | None


def place(
    arm: np.ndarray, others: np.ndarray, *, development_arm: np.ndarray, development_others: np.ndarray
) -> Place:
    """
    Return the place of an arm relative to the frontier that other arms make.

    Args:
        arm (`np.ndarray` of shape `(S, 2)`):
            Two metrics of the arm for each of S fresh seeds, from 0 to 1.
        others (`np.ndarray` of shape `(A, S, 2)`):
            The same metrics of the A other arms, on the same seeds.
        development_arm (`np.ndarray` of shape `(D, 2)`):
            Metrics of the arm on the D development seeds.
        development_others (`np.ndarray` of shape `(A, D, 2)`):
            Metrics of the other arms on the development seeds.

    Returns:
        [`Place`]: The verdict, with the weight and the lead that it is based on.
    """
    weights = np.stack([WEIGHTS, 1 - WEIGHTS])  # (2, W)
    development_sums = development_others.mean(axis=1) @ weights  # (A, W)
    development_leads = development_arm.mean(axis=0) @ weights - development_sums.max(axis=0)  # (W,)
    chosen = int(np.argmax(development_leads))
    leads = [interval((100 * (arm - other) @ weights[:, chosen]).tolist()) for other in others]

    def is_clear(index: int, sign: int) -> bool:
        """Return whether the lead over an arm is clearly positive (`sign` 1) or clearly negative (`sign` -1)."""
        mean, half = leads[index]
        return half is not None and sign * mean > half

    best_in_development = int(np.argmax(development_sums[:, chosen]))
    verdict: Verdict = "on"
    if all(is_clear(index, 1) for index in range(len(leads))):
        verdict = "outside"
    elif is_clear(best_in_development, -1):
        verdict = "inside"
    closest = min(range(len(leads)), key=lambda index: leads[index][0])
    lead, half = leads[closest]
    return Place(verdict, float(WEIGHTS[chosen]), closest, lead, half)
