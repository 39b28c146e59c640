"""The prompts of a run in the trainer's own data order, taken as many at a time as are needed."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from datasets import Dataset
from trl.trainer.utils import RepeatSampler

from trl_explore.saving.fingerprints import digest

SAMPLED_ROWS = 8  # at each end of the data


class PromptOrder:
    """
    Places in a data set, in the order in which TRL's sampler goes through it, pass after pass; `taken` of them are
    gone. No place is left out of a pass or stands in it twice, however many are taken at a time.
    """

    def __init__(self, data: Any, *, shuffle: bool, seed: int) -> None:
        self.data, self.shuffle, self.seed = data, shuffle, seed
        self.begin()

    def begin(self, taken: int = 0) -> None:
        """Go to where so many places are gone."""
        self.taken = taken
        self._sampler = RepeatSampler(self.data, mini_repeat_count=1, shuffle=self.shuffle, seed=self.seed)
        passes, gone = divmod(taken, len(self.data))
        for _ in range(passes):
            list(self._sampler)
        self._ahead = deque(list(self._sampler)[gone:])

    def fingerprint(self) -> str | None:
        """Return a short name of the data, made of the first and last stored rows. None if nothing is stored."""
        if not isinstance(self.data, Dataset):
            return None
        size = len(self.data)
        places = sorted({*range(min(size, SAMPLED_ROWS)), *range(max(0, size - SAMPLED_ROWS), size)})
        # Stored rows, because a transform may make other rows of them every time.
        rows = self.data.with_format("arrow")[places].to_pylist()
        return digest(repr(row).encode() for row in [size, *rows])

    @property
    def passes(self) -> float:
        """Passes over the data so far."""
        return self.taken / len(self.data)

    def take(self, counts: Sequence[int], passed_over: Callable[[int], bool] | None = None) -> list[list[int]]:
        """As many places for each process as it needs, `[processes][count]`, the first process's first. `passed_over`
        is asked about each place; where a whole pass holds no other, places are taken all the same."""
        refused = 0
        dealt: list[list[int]] = [[] for _ in counts]
        for own, count in zip(dealt, counts, strict=True):
            while len(own) < count:
                self._ahead = self._ahead or deque(self._sampler)
                place = self._ahead.popleft()
                self.taken += 1
                if passed_over is not None and refused < len(self.data) and passed_over(place):
                    refused += 1
                    continue
                own.append(place)
                refused = refused if refused == len(self.data) else 0
        return dealt
