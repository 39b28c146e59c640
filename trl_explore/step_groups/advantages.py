"""Advantages of steps among all steps that start in the same state. Follows GiGPO
(https://huggingface.co/papers/2505.10978), section 4.2."""

import itertools
from collections.abc import Sequence

import torch

from trl_explore.rows.advantages import contrasts

SCALES = ("group", "none")


def step_returns(reward: float, num_steps: int, *, discount: float) -> list[float]:
    """Return the discounted return of each step of a trajectory, `[K]` (Eq. 5). The last step gets the only reward."""
    return [reward * discount ** (num_steps - 1 - step) for step in range(num_steps)]


def step_advantages(
    rewards: Sequence[float], states: Sequence[Sequence[int]], *, discount: float, scale: str
) -> list[list[float]]:
    """
    Return the advantages of the steps of a prompt's trajectories, `[G][K_g]` (Eq. 7).

    A step is compared with all steps that start in the same state, also with steps of its own trajectory. The
    advantage is 0 if no other step starts in this state, if all these steps have the same return, or if the step's
    trajectory has no reward (NaN).

    Args:
        rewards (`Sequence[float]`):
            Rewards of the trajectories, `[G]`.
        states (`Sequence[Sequence[int]]`):
            Id of the state in which each step starts, `[G][K_g]`. Equal ids are the same state.
        discount (`float`):
            Factor by which the return decreases per step before the end.
        scale (`str`):
            `"group"`: divide by the standard deviation of a state's returns. `"none"`: do not divide.
    """
    returns, advantages = [], []
    for reward, row_states in zip(rewards, states, strict=True):
        returns.append(step_returns(reward, len(row_states), discount=discount))
        advantages.append([0.0] * len(row_states))
    groups: dict[int, list[tuple[int, int]]] = {}  # row and step of the steps that start in each state
    for row, row_states in enumerate(states):
        for step, state in enumerate(row_states):
            groups.setdefault(state, []).append((row, step))
    for group in groups.values():
        group_returns = [returns[row][step] for row, step in group]
        for (row, step), advantage in zip(group, contrasts(group_returns, scale=scale), strict=True):
            advantages[row][step] = advantage
    return advantages


def shuffled_states(states: Sequence[Sequence[int]], *, generator: torch.Generator) -> list[list[int]]:
    """Return the states of a prompt's steps in random order, `[G][K_g]`. This is a control: the groups of steps keep
    their sizes, but consist of random steps."""
    pool = list(itertools.chain(*states))
    order = torch.randperm(len(pool), generator=generator).tolist()
    shuffled = []
    first = 0
    for row_states in states:
        places = order[first : first + len(row_states)]
        shuffled.append([pool[place] for place in places])
        first += len(row_states)
    return shuffled
