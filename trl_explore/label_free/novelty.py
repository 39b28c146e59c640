"""How unusual the reasoning of a row is among those of its prompt, and the reward that follows. After EVOL-RL
(https://huggingface.co/papers/2509.15194), section 3.2."""

import math
from collections.abc import Sequence

import torch


def similarities(embeddings: torch.Tensor) -> torch.Tensor:
    """Cosines of the rows of `(M, D)`, cut to [0, 1], `(M, M)`."""
    unit = torch.nn.functional.normalize(embeddings.double(), dim=1, eps=1e-8)
    return (unit @ unit.T).clamp(0.0, 1.0)


def novelties(similarity: torch.Tensor, right: Sequence[bool]) -> list[float]:
    """
    How unusual each of a prompt's rows is: one minus the mean of its mean similarity to the other rows of its class,
    right or wrong, and its largest similarity to any other row. A row alone in its class is compared with all.

    Args:
        similarity (`torch.Tensor`):
            Similarities of the rows, `(M, M)` in [0, 1].
        right (`Sequence[bool]`):
            Class of each row, `[M]`.
    """
    found = []
    for row, own in enumerate(right):
        others = [other for other in range(len(right)) if other != row]
        if not others:
            return [0.5]
        of_class = [other for other in others if right[other] == own] or others
        mean, largest = similarity[row, of_class].mean(), similarity[row, others].max()
        found.append(1.0 - 0.5 * float(mean) - 0.5 * float(largest))
    return found


def band_rewards(novelty: Sequence[float], right: Sequence[bool], *, width: float) -> list[float]:
    """
    Rewards `[M]`: of right rows from `1 - width` to 1, of wrong ones from -1 to `-1 + width`, the more unusual of its
    class the higher. In the middle of its band where all of a class are equally unusual; at its upper end where a
    class has one row. NaN novelties give the lower end of the lower band, -1.

    Args:
        novelty (`Sequence[float]`):
            How unusual each row is, `[M]`; NaN for a row without an answer.
        right (`Sequence[bool]`):
            Class of each row, `[M]`.
        width (`float`):
            Width of both bands, in [0, 1).
    """
    rewards = [-1.0] * len(right)
    for label, start in ((True, 1.0 - width), (False, -1.0)):
        rows = [row for row, own in enumerate(right) if own == label and not math.isnan(novelty[row])]
        values = [novelty[row] for row in rows]
        for row, value in zip(rows, values, strict=True):
            low, high = min(values), max(values)
            share = 1.0 if len(rows) == 1 else 0.5 if high - low <= 1e-9 else (value - low) / (high - low)
            rewards[row] = start + width * share
    return rewards


def shuffled_in_classes(novelty: Sequence[float], right: Sequence[bool], *, generator: torch.Generator) -> list[float]:
    """The same novelties, dealt out at random to the rows of their class; NaN stays where it is."""
    mixed = list(novelty)
    for label in (True, False):
        rows = [row for row, own in enumerate(right) if own == label and not math.isnan(novelty[row])]
        for row, place in zip(rows, torch.randperm(len(rows), generator=generator).tolist(), strict=True):
            mixed[row] = novelty[rows[place]]
    return mixed
