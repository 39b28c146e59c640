"""Tasks with several families of equally good solutions. Demonstrations prefer some families to others."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from datasets import Dataset

from trl_explore.tasks.doors import LETTERS, FactTask, check_range

# Function of each dialect that writes a number. In different dialects, most digits of a number differ, so the families
# of solutions have few tokens in common.
DIALECTS: dict[str, Callable[[str], str]] = {
    "S": lambda number: "".join(str((int(digit) + 1) % 10) for digit in number),
    "G": lambda number: number[::-1],
    "X": lambda number: "".join(str((int(digit) + 5) % 10) for digit in number),
    "/": lambda number: number,
    "^": lambda number: "".join(str(9 - int(digit)) for digit in number),
    "*": lambda number: "".join(LETTERS[int(digit)] for digit in number),
}


def _moved(number: str, by: int, step: int = 1) -> str:
    """Add `by` to every digit, modulo 10. `step=-1` also reverses the number."""
    return "".join(str((int(digit) + by) % 10) for digit in number[::step])


DIALECTS |= {mark: partial(_moved, by=by) for mark, by in zip("klmnopq", (2, 3, 4, 6, 7, 8, 9), strict=True)}
DIALECTS |= {mark: partial(_moved, by=by, step=-1) for mark, by in zip("rst", (1, 2, 3), strict=True)}


@dataclass(frozen=True, kw_only=True)
class DialectTask(FactTask):
    """
    Task of writing a number in a dialect that the item understands.

    Right answers to `k317` are `S428` and `G713` if item `k` understands the dialects `S` and `G`. The answer begins
    with the mark of its dialect. A sketch is this mark.
    """

    weights: tuple[float, ...]  # relative frequency of each dialect in demonstrations
    num_accepted: int  # number of dialects that an item understands; answers in all of them get the same reward

    step_length = 1  # the choice of the dialect, or a digit
    max_sketch_length = 2  # a mark and the end-of-sequence token

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("len(weights)", len(self.weights), 2, len(DIALECTS))
        check_range("num_accepted", self.num_accepted, 1, len(self.weights))

    @property
    def marks(self) -> str:
        """Marks of all dialects of this task."""
        return "".join(DIALECTS)[: len(self.weights)]

    @property
    def max_completion_length(self) -> int:
        return self.num_digits + 2

    @cached_property
    def facts(self) -> dict[str, str]:
        """Marks of the dialects that each item understands, by item."""
        rng = random.Random(f"dialects/{self.table_seed}")
        understood = {}
        for item in LETTERS[: self.num_items]:
            understood[item] = "".join(rng.sample(self.marks, self.num_accepted))
        return understood

    def guess(self, problem: str, rng: random.Random) -> str:
        """Sample a dialect with probabilities proportional to `weights`. The item does not matter."""
        return rng.choices(self.marks, self.weights)[0]

    def is_guess(self, text: str) -> bool:
        return len(text) == 1 and text in self.marks

    def answer(self, problem: str, guess: str) -> str:
        return guess + DIALECTS[guess](problem[1:])

    def targets(self, problem: str) -> list[str]:
        """Return all right answers: one in each dialect that the item understands."""
        return [self.answer(problem, mark) for mark in self.facts[problem[0]]]

    @property
    def sesa_options(self) -> dict[str, Any]:
        return {**super().sesa_options, "coverage_column": "targets"}

    def verify(self, problem: str, completion: str) -> bool:
        return completion in self.targets(problem)

    def _dataset(self, *args: Any, **kwargs: Any) -> Dataset:
        data = super()._dataset(*args, **kwargs)
        return data.add_column("targets", [self.targets(problem) for problem in data["problem"]])


# An item understands six of sixteen dialects. Demonstrations rarely use ten of the sixteen.
PLANS = DialectTask(
    name="plans",
    num_items=26,
    num_digits=3,
    weights=(0.3, 0.15, 0.1, 0.08, 0.06, 0.05, *[0.026] * 10),
    num_accepted=6,
    # With fewer answers to a sketch, the model does not learn to follow sketches in sixteen dialects.
    format_weights=(0.45, 0.15, 0.4, 0.0),
    warm_start_steps=2000,
)
DIALECT = DialectTask(
    name="dialects",
    num_items=26,
    num_digits=4,
    weights=(0.8, 0.1, 0.06, 0.04),
    num_accepted=2,
    warm_start_steps=600,
)
