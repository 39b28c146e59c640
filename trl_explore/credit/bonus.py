"""Outcome exploration (https://huggingface.co/papers/2509.06941): bonuses for rare answers.

The answers of a group are texts, `[G]`. A row without an answer is None. It does not count and gets no bonus.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from math import sqrt

Answers = Sequence[str | None]


def novelty(answers: Answers, seen: Mapping[str, int]) -> list[float | None]:
    """Return `min(1, 1 / sqrt(N))` for each answer, `[G]`, where N is the number of times it was `seen` before."""
    found: list[float | None] = []
    for answer in answers:
        if answer is None:
            found.append(None)
        else:
            found.append(1 / sqrt(max(seen.get(answer, 0), 1)))
    return found


def repetition(answers: Answers) -> list[float | None]:
    """Return `(1 - n) / N` for each answer, `[G]`, where n of the group's N answers are equal to it. It is 0 for an
    answer that occurs once, and negative for others."""
    counts = Counter(answer for answer in answers if answer is not None)
    found: list[float | None] = []
    for answer in answers:
        if answer is None:
            found.append(None)
        else:
            found.append((1 - counts[answer]) / counts.total())
    return found


def centred(values: Sequence[float | None]) -> list[float]:
    """Return the values minus their mean, `[G]`, and 0 for None."""
    known = [value for value in values if value is not None]
    mean = sum(known) / max(len(known), 1)
    return [0.0 if value is None else value - mean for value in values]
