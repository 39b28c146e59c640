"""Problems that no training set contains: one in 16, by a hash of the text, whatever the seeds and sizes."""

import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from itertools import islice

from datasets import Dataset

HELD_OUT_ONE_IN = 16


def is_held_out(text: str) -> bool:
    return hashlib.sha256(text.encode()).digest()[0] % HELD_OUT_ONE_IN == 0


def different(draws: Iterable[str], number: int, fits: Callable[[str], bool], *, name: str, remedy: str) -> list[str]:
    """The first `number` different problems that fit; a `ValueError` if the task hardly has so many."""
    problems: dict[str, None] = {}  # a set that keeps its order
    enough = islice(draws, 100 * HELD_OUT_ONE_IN * (number + 1))
    while len(problems) < number and (problem := next(enough, None)) is not None:
        if fits(problem):
            problems[problem] = None
    if len(problems) < number:
        raise ValueError(
            f"`num_examples` is {number}, but {name} has only about {len(problems)} such problems; ask for fewer or "
            f"{remedy}."
        )
    return list(problems)


class HeldOutTask(ABC):
    """What tasks share whose problems are drawn from seeds, and partly held out."""

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
        """Problems of one of the two kinds, with what the reward needs."""


def as_prompts(problems: Iterable[str]) -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": problem}] for problem in problems]
