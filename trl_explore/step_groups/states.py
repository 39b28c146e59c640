"""The states that an agent's steps were taken in: what it was shown last, and which of that is one state.

After GiGPO (https://huggingface.co/papers/2505.10978), section 4.2: its anchor state is what the environment shows.
"""

from collections.abc import Hashable, Sequence
from difflib import SequenceMatcher

from trl_explore.forks.trajectories import turns


def shown_tokens(
    prompt_ids: list[int], completion_ids: list[int], loss_mask: Sequence[int]
) -> list[tuple[int, int, list[int]]]:
    """Start and end of each turn of a completion, and the tokens that stood before it since the turn before: the
    prompt, or what was answered. `loss_mask` `[T]` is 1 on the policy's own tokens."""
    steps, shown = [], prompt_ids
    end = 0
    for start, stop in turns(loss_mask):
        if start:
            shown = completion_ids[end:start]
        steps.append((start, stop, shown))
        end = stop
    return steps


def equal_states(observations: Sequence[Sequence[Hashable]]) -> list[list[int]]:
    """Number of the state of every step `[G][K_g]`: equal observations are one state."""
    numbers: dict[Hashable, int] = {}
    return [[numbers.setdefault(seen, len(numbers)) for seen in row] for row in observations]


def similar_states(observations: Sequence[Sequence[str]], *, threshold: float) -> list[list[int]]:
    """As [`equal_states`], where texts are one state whose ratio of matching characters reaches `threshold`. As in the
    authors' code a text joins the first state whose first text is similar, so the order of trajectories matters."""
    first: list[str] = []

    def number_of(seen: str) -> int:
        for number, text in enumerate(first):
            match = SequenceMatcher(None, seen, text)
            # The quick ones are upper bounds.
            if min(match.real_quick_ratio(), match.quick_ratio()) >= threshold and match.ratio() >= threshold:
                return number
        first.append(seen)
        return len(first) - 1

    return [[number_of(seen) for seen in row] for row in observations]
