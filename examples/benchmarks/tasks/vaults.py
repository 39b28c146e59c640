"""Codes at the end of easy answers, which only trial and error can tell."""

import random
from dataclasses import dataclass
from functools import cached_property

from trl_explore.tasks.doors import END, LETTERS, FactTask, biased, check_range, item_of

STEP_END = ";"


@dataclass(frozen=True, kw_only=True)
class VaultTask(FactTask):
    """Right calculations, and at the end the item's code, which is the sketch: `34;12;78;12;#kq` answers `k3171`."""

    code_letters: str  # letters that may be a code
    habit_probability: float  # of one wrong code per item; all other codes are equally likely

    step_length = 3  # a digit, its successor and the end of the step
    max_sketch_length = 2  # a code and the end-of-sequence token

    def __post_init__(self) -> None:
        super().__post_init__()
        different = set(self.code_letters) & set(LETTERS)
        if not 2 <= len(different) == len(self.code_letters):
            raise ValueError(f"`code_letters` is {self.code_letters!r}; give at least two of {LETTERS!r}, each once.")
        check_range("habit_probability", self.habit_probability, 0, 1)

    @property
    def max_completion_length(self) -> int:
        return 3 * self.num_digits + 4

    @cached_property
    def facts(self) -> dict[str, str]:
        return {item: right for item, (right, _) in self.codes.items()}

    @cached_property
    def codes(self) -> dict[str, list[str]]:
        """The code of every item, and the one that demonstrators believe in."""
        rng = random.Random(f"codes/{self.table_seed}")
        return {item: rng.sample(self.code_letters, 2) for item in LETTERS[: self.num_items]}

    def guess(self, problem: str, rng: random.Random) -> str:
        return biased(self.codes[item_of(problem)][1], self.code_letters, self.habit_probability, rng)

    def is_guess(self, text: str) -> bool:
        return len(text) == 1 and text in self.code_letters

    def answer(self, problem: str, guess: str) -> str:
        steps = (f"{digit}{(int(digit) + 1) % 10}{STEP_END}" for digit in problem[1:])
        return f"{''.join(steps)}{END}{problem[0]}{guess}"


VAULT = VaultTask(
    name="vault", num_items=26, num_digits=6, code_letters=LETTERS, habit_probability=0.5, warm_start_steps=600
)
