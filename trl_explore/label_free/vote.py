"""The majority's answer, after TTRL and EVOL-RL (https://huggingface.co/papers/2509.15194), section 3.1."""

from collections import Counter
from collections.abc import Hashable, Sequence


def majority_answer(answers: Sequence[Hashable | None]) -> Hashable | None:
    """The answer that most rows of a prompt give, the earliest of equally many; `None` if no row has one."""
    counts = Counter(answer for answer in answers if answer is not None)
    return max(counts, key=counts.__getitem__) if counts else None
