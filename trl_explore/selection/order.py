"""Prompts of a run in the order of the trainer's sampler, for batches that need a varying number of prompts."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from datasets import Dataset
from trl.trainer.utils import RepeatSampler

from trl_explore.saving.fingerprints import digest

SAMPLED_ROWS = 8  # number of rows at each end of the data that enter the fingerprint


class PromptOrder:
    """
    Gives out the places (row numbers) of a data set in the order of TRL's sampler, pass after pass.

    A pass contains every place exactly once, for any number of places per call of `take`.

    Args:
        data (`Any`):
            The data set.
        shuffle (`bool`):
            True if the sampler shuffles.
        seed (`int`):
            Seed of the sampler.
    """

    def __init__(self, data: Any, *, shuffle: bool, seed: int) -> None:
        self.data, self.shuffle, self.seed = data, shuffle, seed
        self.begin()

    def begin(self, taken: int = 0) -> None:
        """Start after the first `taken` places of the run."""
        self.taken = taken
        self._sampler = RepeatSampler(self.data, mini_repeat_count=1, shuffle=self.shuffle, seed=self.seed)
        passes, gone = divmod(taken, len(self.data))
        for _ in range(passes):
            list(self._sampler)  # advances the sampler's generator, so that each pass has its own order
        self._ahead = deque(list(self._sampler)[gone:])  # places of this pass that were not taken yet

    def fingerprint(self) -> str | None:
        """Return a short name of the data, made of the first and last stored rows. None if nothing is stored."""
        if not isinstance(self.data, Dataset):
            return None
        size = len(self.data)
        places = sorted({*range(min(size, SAMPLED_ROWS)), *range(max(0, size - SAMPLED_ROWS), size)})
        # Read the stored rows, because a transform may return other rows every time.
        rows = self.data.with_format("arrow")[places].to_pylist()
        return digest(repr(row).encode() for row in [size, *rows])

    @property
    def passes(self) -> float:
        """Number of passes over the data so far."""
        return self.taken / len(self.data)

    def take(self, counts: Sequence[int], passed_over: Callable[[int], bool] | None = None) -> list[list[int]]:
        """
        Take the next places for all processes.

        Args:
            counts (`Sequence[int]`):
                Number of places that each process needs. The first process gets the first places.
            passed_over (`Callable[[int], bool]`, *optional*):
                Returns True for a place to skip. If it would skip all places of a pass, places are taken without it.

        Returns:
            `list[list[int]]`: Places of each process, `[processes][count]`.
        """
        refused = 0  # places skipped in a row; after a whole pass of them, no place is skipped any more
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
                if refused < len(self.data):
                    refused = 0
        return dealt
