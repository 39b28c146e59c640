"""Majority answer of TTRL and EVOL-RL (https://huggingface.co/papers/2509.15194, section 3.1)."""

from collections import Counter
from collections.abc import Hashable, Sequence


def majority_answer(answers: Sequence[Hashable | None]) -> Hashable | None:
    """
    Return the most frequent answer of a prompt.

    Args:
        answers (`Sequence`):
            Answer of each row, `[M]`. `None` for no answer.

    Returns:
        `Hashable` or `None`: The answer. Of equally frequent answers, the first in `answers`. `None` if there are no
        answers.
    """
    counts = Counter(answers)
    del counts[None]
    if not counts:
        return None
    return counts.most_common(1)[0][0]
