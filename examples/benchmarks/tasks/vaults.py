"""Task of finding a code at the end of an easy answer by trial and error."""

import random
from dataclasses import dataclass
from functools import cached_property

from trl_explore.tasks.doors import END, LETTERS, FactTask, biased, check_range, item_of

STEP_END = ";"


@dataclass(frozen=True, kw_only=True)
class VaultTask(FactTask):
    """
    Task of easy calculations, followed by the code of the item.

    The right answer to `k3171` is `34;12;78;12;#kq` if `q` is the code of item `k`. It has each digit with its
    successor, then the item and its code. A sketch is the code.
    """

    code_letters: str  # possible codes
    # Probability that a demonstration has the item's habit, which is one fixed wrong code. All other codes, including
    # the right one, have equal probabilities.
    habit_probability: float

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
        """Right code of every item, and its habit: the wrong code that demonstrations prefer."""
        rng = random.Random(f"codes/{self.table_seed}")
        return {item: rng.sample(self.code_letters, 2) for item in LETTERS[: self.num_items]}

    def guess(self, problem: str, rng: random.Random) -> str:
        _, habit = self.codes[item_of(problem)]
        return biased(habit, self.code_letters, self.habit_probability, rng)

    def is_guess(self, text: str) -> bool:
        return len(text) == 1 and text in self.code_letters

    def answer(self, problem: str, guess: str) -> str:
        item, number = problem[0], problem[1:]
        steps = ""
        for digit in number:
            successor = (int(digit) + 1) % 10
            steps += f"{digit}{successor}{STEP_END}"
        return f"{steps}{END}{item}{guess}"


VAULT = VaultTask(
    name="vault", num_items=26, num_digits=6, code_letters=LETTERS, habit_probability=0.5, warm_start_steps=600
)
