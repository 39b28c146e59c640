"""What a step is worth beside the other steps from its state, after GiGPO (https://huggingface.co/papers/2505.10978),
section 4.2."""

from collections.abc import Sequence

import torch

from trl_explore.rows.advantages import contrasts

SCALES = ("group", "none")


def step_returns(reward: float, num_steps: int, *, discount: float) -> list[float]:
    """Discounted return from each step of a trajectory `[K]` (Eq. 5) whose only reward comes with its last step."""
    return [reward * discount ** (num_steps - 1 - step) for step in range(num_steps)]


def step_advantages(
    rewards: Sequence[float], states: Sequence[Sequence[int]], *, discount: float, scale: str
) -> list[list[float]]:
    """
    Advantages of the steps of a prompt's trajectories, `[G][K_g]` (Eq. 7), each among all steps from its state.

    A state that a trajectory comes back to counts each time. 0 for a step that no other has the state of, for steps
    of a trajectory without a reward (NaN), and where the returns of a state are all equal.

    Args:
        rewards (`Sequence[float]`):
            Rewards of the trajectories, `[G]`.
        states (`Sequence[Sequence[int]]`):
            Number of the state of every step, `[G][K_g]`.
        discount (`float`):
            Factor per step back from the end.
        scale (`str`):
            `"group"` divides by the standard deviation of a state's returns, `"none"` does not.
    """
    returns = [step_returns(reward, len(own), discount=discount) for reward, own in zip(rewards, states, strict=True)]
    advantages = [[0.0] * len(own) for own in states]
    members: dict[int, list[tuple[int, int]]] = {}
    for row, own in enumerate(states):
        for step, state in enumerate(own):
            members.setdefault(state, []).append((row, step))
    for places in members.values():
        values = [returns[row][step] for row, step in places]
        for (row, step), advantage in zip(places, contrasts(values, scale=scale), strict=True):
            advantages[row][step] = advantage
    return advantages


def shuffled_states(states: Sequence[Sequence[int]], *, generator: torch.Generator) -> list[list[int]]:
    """The same states `[G][K_g]`, dealt out to the steps of a prompt at random."""
    pool = [state for own in states for state in own]
    mixed = iter([pool[place] for place in torch.randperm(len(pool), generator=generator).tolist()])
    return [[next(mixed) for _ in own] for own in states]
