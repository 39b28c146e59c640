"""Outcome exploration (https://huggingface.co/papers/2509.06941): rare answers are worth more than frequent ones.

Answers are texts, those of one group; `None` is a row without one, which counts nowhere and gets nothing.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from math import sqrt

Answers = Sequence[str | None]


def novelty(answers: Answers, seen: Mapping[str, int]) -> list[float | None]:
    """`min(1, 1 / sqrt(N))` of each answer, `N` being how often it was `seen` before."""
    return [None if answer is None else 1 / sqrt(max(seen.get(answer, 0), 1)) for answer in answers]


def repetition(answers: Answers) -> list[float | None]:
    """Minus the share of the group's other rows that give the same answer, of all that give one."""
    counts = Counter(answer for answer in answers if answer is not None)
    return [None if answer is None else (1 - counts[answer]) / counts.total() for answer in answers]


def centred(values: Sequence[float | None]) -> list[float]:
    """Values minus their mean; 0 for those that are not there."""
    known = [value for value in values if value is not None]
    mean = sum(known) / max(len(known), 1)
    return [0.0 if value is None else value - mean for value in values]
