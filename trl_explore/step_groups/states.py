"""States in which an agent's steps start. Follows GiGPO (https://huggingface.co/papers/2505.10978), section 4.2.

A step is one turn. Its state is the observation before the turn: the prompt, or the latest answer of the tools.
"""

from collections.abc import Hashable, Sequence
from difflib import SequenceMatcher

from trl_explore.forks.trajectories import turns


def turns_with_observations(
    prompt_ids: list[int], completion_ids: list[int], loss_mask: Sequence[int]
) -> list[tuple[int, int, list[int]]]:
    """
    Return first token, end (exclusive) and observation of each turn of a completion.

    The observation of a turn is the tokens between the previous turn and this turn. If the completion starts with the
    turn, the observation is the prompt.

    Args:
        prompt_ids (`list[int]`):
            Tokens of the prompt.
        completion_ids (`list[int]`):
            Tokens of the completion, `[T]`.
        loss_mask (`Sequence[int]`):
            1 for a token of the policy, 0 for a token of a tool, `[T]`.
    """
    steps = []
    previous_end = 0
    for start, end in turns(loss_mask):
        observation = prompt_ids if start == 0 else completion_ids[previous_end:start]
        steps.append((start, end, observation))
        previous_end = end
    return steps


def equal_states(observations: Sequence[Sequence[Hashable]]) -> list[list[int]]:
    """Return the id of the state in which every step starts, `[G][K_g]`. Equal observations are the same state."""
    ids: dict[Hashable, int] = {}  # id of the state, by observation
    states = []
    for row in observations:
        for observation in row:
            ids.setdefault(observation, len(ids))
        states.append([ids[observation] for observation in row])
    return states


def similar_states(observations: Sequence[Sequence[str]], *, threshold: float) -> list[list[int]]:
    """
    Return the id of the state in which every step starts, `[G][K_g]`. Similar observations are the same state.

    Two texts are similar if the share of matching characters is at least `threshold`. As in the authors' code, a text
    belongs to the first state whose first text is similar. So the result depends on the order of the trajectories.
    """
    first_texts: list[str] = []  # first text of each state
    states = []
    for row in observations:
        row_states = []
        for text in row:
            state = _first_similar(text, first_texts, threshold)
            if state is None:
                state = len(first_texts)
                first_texts.append(text)
            row_states.append(state)
        states.append(row_states)
    return states


def _first_similar(text: str, others: Sequence[str], threshold: float) -> int | None:
    """Return the index of the first text that is similar to `text`, or None."""
    for index, other in enumerate(others):
        matcher = SequenceMatcher(None, text, other)
        # `ratio` is slow, so compare its two quick upper bounds first.
        upper_bound = min(matcher.real_quick_ratio(), matcher.quick_ratio())
        if upper_bound >= threshold and matcher.ratio() >= threshold:
            return index
    return None
