"""Novelty of the reasoning among the rows of a prompt, and the rewards of EVOL-RL for it.

Section 3.2 of https://huggingface.co/papers/2509.15194.
"""

import math
from collections.abc import Sequence

import torch


def similarities(embeddings: torch.Tensor) -> torch.Tensor:
    """
    Compute the cosine of each pair of embeddings.

    Args:
        embeddings (`torch.Tensor`):
            Embeddings of the rows, `(M, D)`.

    Returns:
        `torch.Tensor`: Cosines, `(M, M)`, clamped to [0, 1].
    """
    unit = torch.nn.functional.normalize(embeddings.double(), dim=1, eps=1e-8)
    return (unit @ unit.T).clamp(0.0, 1.0)


def novelties(similarity: torch.Tensor, right: Sequence[bool]) -> list[float]:
    """
    Compute the novelty of each row of a prompt.

    The novelty of a row is one minus the average of two similarities: the mean similarity to the other rows of its
    class (right or wrong), and the largest similarity to any other row. If a row is alone in its class, the mean is
    over all other rows.

    Args:
        similarity (`torch.Tensor`):
            Similarities of the rows, `(M, M)`, in [0, 1].
        right (`Sequence[bool]`):
            Class of each row, `[M]`: True if its answer is right.

    Returns:
        `list[float]`: Novelties, `[M]`, in [0, 1]. If there is only one row, its novelty is 0.5.
    """
    found = []
    for row, is_right in enumerate(right):
        others = [other for other in range(len(right)) if other != row]
        if not others:
            return [0.5]
        same_class = [other for other in others if right[other] == is_right]
        mean = similarity[row, same_class or others].mean()
        largest = similarity[row, others].max()
        found.append(1.0 - 0.5 * float(mean) - 0.5 * float(largest))
    return found


def band_rewards(novelty: Sequence[float], right: Sequence[bool], *, width: float) -> list[float]:
    """
    Convert novelties to rewards.

    Right rows get rewards in the band from `1 - width` to 1, and wrong rows in the band from -1 to `-1 + width`. In
    each class, the least novel row gets the lower end of the band, and the most novel row gets the upper end. If all
    rows of a class are equally novel, they get the middle of the band. A single row in its class gets the upper end.

    Args:
        novelty (`Sequence[float]`):
            Novelty of each row, `[M]`. It is NaN for a row without an answer. This row gets the reward -1.
        right (`Sequence[bool]`):
            Class of each row, `[M]`: True if its answer is right.
        width (`float`):
            Width of both bands, in [0, 1).

    Returns:
        `list[float]`: Rewards, `[M]`.
    """
    rewards = [-1.0] * len(right)
    for label, start in ((True, 1.0 - width), (False, -1.0)):
        rows = _rows_of_class(novelty, right, label)
        if not rows:
            continue
        low, high = min(novelty[row] for row in rows), max(novelty[row] for row in rows)
        for row in rows:
            if len(rows) == 1:
                share = 1.0
            elif high - low <= 1e-9:
                share = 0.5
            else:
                share = (novelty[row] - low) / (high - low)
            rewards[row] = start + width * share
    return rewards


def shuffled_in_classes(novelty: Sequence[float], right: Sequence[bool], *, generator: torch.Generator) -> list[float]:
    """
    Permute the novelties within each class at random.

    Args:
        novelty (`Sequence[float]`):
            Novelty of each row, `[M]`. NaN values keep their positions.
        right (`Sequence[bool]`):
            Class of each row, `[M]`: True if its answer is right.
        generator (`torch.Generator`):
            Source of randomness.

    Returns:
        `list[float]`: Permuted novelties, `[M]`.
    """
    mixed = list(novelty)
    for label in (True, False):
        rows = _rows_of_class(novelty, right, label)
        for row, place in zip(rows, torch.randperm(len(rows), generator=generator).tolist(), strict=True):
            mixed[row] = novelty[rows[place]]
    return mixed


def _rows_of_class(novelty: Sequence[float], right: Sequence[bool], label: bool) -> list[int]:
    """Return the indices of the rows whose class is `label` and whose novelty is not NaN."""
    rows = []
    for row, is_right in enumerate(right):
        if is_right == label and not math.isnan(novelty[row]):
            rows.append(row)
    return rows
