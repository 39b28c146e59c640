"""States in which an agent's steps start. Follows GiGPO (https://huggingface.co/papers/2505.10978), section 4.2.

A step is one turn. Its state is the observation before the turn: the prompt, or the latest answer of the tools.
"""

from collections.abc import Hashable, Sequence
from difflib import SequenceMatcher

from trl_explore.forks.trajectories import turns


def shown_tokens(
    prompt_ids: list[int], completion_ids: list[int], loss_mask: Sequence[int]
) -> list[tuple[int, int, list[int]]]:
    """
    Return first token, end (exclusive) and observation of each turn of a completion.

    The observation is the tokens between the previous turn and this turn. Before turn 0, it is the prompt.

    Args:
        prompt_ids (`list[int]`):
            Tokens of the prompt.
        completion_ids (`list[int]`):
            Tokens of the completion, `[T]`.
        loss_mask (`Sequence[int]`):
            1 for a token of the policy, 0 for a token of a tool, `[T]`.
    """
    steps, shown = [], prompt_ids
    end = 0
    for start, stop in turns(loss_mask):
        if start:
            shown = completion_ids[end:start]
        steps.append((start, stop, shown))
        end = stop
    return steps


def equal_states(observations: Sequence[Sequence[Hashable]]) -> list[list[int]]:
    """Return the number of the state of every step, `[G][K_g]`. Equal observations are the same state."""
    numbers: dict[Hashable, int] = {}
    states = []
    for row in observations:
        states.append([numbers.setdefault(observation, len(numbers)) for observation in row])
    return states


def similar_states(observations: Sequence[Sequence[str]], *, threshold: float) -> list[list[int]]:
    """
    Return the number of the state of every step, `[G][K_g]`. Similar observations are the same state.

    Two texts are similar if the share of matching characters is at least `threshold`. As in the authors' code, a text
    belongs to the first state whose first text is similar. So the result depends on the order of the trajectories.
    """
    first_texts: list[str] = []  # first text of each state
    states = []
    for row in observations:
        numbers = []
        for text in row:
            number = _first_similar(text, first_texts, threshold)
            if number is None:
                number = len(first_texts)
                first_texts.append(text)
            numbers.append(number)
        states.append(numbers)
    return states


def _first_similar(text: str, others: Sequence[str], threshold: float) -> int | None:
    """Return the index of the first text that is similar to `text`, or None."""
    for index, other in enumerate(others):
        match = SequenceMatcher(None, text, other)
        # `ratio` is slow, so compare its two quick upper bounds first.
        if min(match.real_quick_ratio(), match.quick_ratio()) >= threshold and match.ratio() >= threshold:
            return index
    return None
