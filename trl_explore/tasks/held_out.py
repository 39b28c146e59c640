"""Held-out problems: a hash of the text selects one problem in 16, which no training set contains."""

import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from itertools import islice

from datasets import Dataset

HELD_OUT_ONE_IN = 16


def is_held_out(text: str) -> bool:
    """Return whether a problem is held out. The answer depends only on its text, so all seeds and runs agree."""
    return hashlib.sha256(text.encode()).digest()[0] % HELD_OUT_ONE_IN == 0


def different(draws: Iterable[str], number: int, fits: Callable[[str], bool], *, name: str, remedy: str) -> list[str]:
    """
    Return the first different problems that fulfill a condition.

    Args:
        draws (`Iterable[str]`):
            Random problems, which may repeat.
        number (`int`):
            Number of problems.
        fits (`Callable`):
            The condition.
        name (`str`):
            Name of the task, for the error message.
        remedy (`str`):
            End of the error message.

    Raises:
        ValueError: If the task seems to have fewer such problems.
    """
    problems: dict[str, None] = {}  # a set that keeps its order
    candidates = islice(draws, 100 * HELD_OUT_ONE_IN * (number + 1))  # far more than a task with enough problems needs
    while len(problems) < number and (problem := next(candidates, None)) is not None:
        if fits(problem):
            problems[problem] = None
    if len(problems) < number:
        raise ValueError(
            f"`num_examples` is {number}, but {name} has only about {len(problems)} such problems; ask for fewer or "
            f"{remedy}."
        )
    return list(problems)


class HeldOutTask(ABC):
    """Base class of tasks that sample their problems from seeds and hold some of them out."""

    accuracy_reward: Callable[..., list[float]]  # a method of each task, as TRL calls it

    @property
    def reward(self) -> Callable[..., list[float]]:
        return self.accuracy_reward

    def build_dataset(self, num_examples: int, *, seed: int) -> Dataset:
        return self._dataset(num_examples, random.Random(f"train/{seed}"), held_out=False)

    def evaluation_set(self, num_examples: int = 256, *, seed: int = 0) -> Dataset:
        return self._dataset(num_examples, random.Random(f"evaluation/{seed}"), held_out=True)

    @abstractmethod
    def _dataset(self, num_examples: int, rng: random.Random, *, held_out: bool) -> Dataset:
        """Return held-out problems or training problems, with the columns that the reward needs."""


def as_prompts(problems: Iterable[str]) -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": problem}] for problem in problems]
