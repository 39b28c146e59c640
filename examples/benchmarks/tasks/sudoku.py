"""Sudoku on 4x4 boards with many blanks: any board that fits counts, so many problems have several solutions.

A problem is a board in one line with letters for blank cells, `1b34e4g2ij4l4321`; its answer fills them in any order,
`b2e3g1i2j1l3`. Every row, column and 2x2 box must hold the digits 1 to 4.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from trl_explore.evaluation.metrics import coverage_at_k
from trl_explore.rewards.answers import completion_text
from trl_explore.tasks.sketched import SketchedTask

DIGITS = "1234"
CELLS = "abcdefghijklmnop"  # their names, row by row
# Rows, columns and boxes, as positions in the line.
UNITS = tuple(
    [tuple(range(4 * i, 4 * i + 4)) for i in range(4)]
    + [tuple(range(i, 16, 4)) for i in range(4)]
    + [tuple(8 * i + 2 * j + k for k in (0, 1, 4, 5)) for i in range(2) for j in range(2)]
)


@dataclass(frozen=True)
class SudokuTask(SketchedTask):
    """A family of 4x4 Sudoku puzzles. A sketch is the cell to fill first, `f`."""

    name: str
    min_blanks: int
    max_blanks: int  # at most 16
    num_candidates: int  # answers in a list, and the most sketches of one problem
    warm_start_steps: int  # supervised steps until a tiny model has converged
    format_weights: tuple[float, float, float, float] = (0.45, 0.25, 0.3, 0.0)

    mode = "two_stage"

    def __post_init__(self) -> None:
        if not 1 <= self.min_blanks <= self.max_blanks <= len(CELLS):
            raise ValueError(
                f"`min_blanks` is {self.min_blanks} and `max_blanks` {self.max_blanks}; give numbers between 1 and "
                f"{len(CELLS)}, the smaller one first."
            )

    @property
    def max_completion_length(self) -> int:
        return 2 * self.max_blanks + 1

    @property
    def max_sketch_length(self) -> int:
        return 2

    def draw(self, rng: random.Random) -> str:
        board = rng.choice(all_boards())
        blanks = rng.sample(CELLS, rng.randint(self.min_blanks, self.max_blanks))
        return "".join(cell if cell in blanks else digit for cell, digit in zip(CELLS, board, strict=True))

    def sketch(self, problem: str, rng: random.Random) -> str:
        return rng.choice(self._blanks(problem))

    def attempt(self, problem: str, rng: random.Random, *, sketch: str = "") -> str:
        """A solution: the cell `sketch`, or any, then in reading order."""
        board, first = rng.choice(boards_that_fit(problem)), sketch or self.sketch(problem, rng)
        blanks = sorted(self._blanks(problem), key=lambda cell: cell != first)
        return "".join(cell + board[CELLS.index(cell)] for cell in blanks)

    def _blanks(self, problem: str) -> list[str]:
        return [cell for cell in CELLS if cell in problem]

    def verify(self, problem: str, completion: str) -> bool:
        return fill(problem, completion) is not None

    def solutions(self, problem: str) -> list[str]:
        return list(boards_that_fit(problem))

    def num_solutions(self, problem: str) -> int:
        return len(self.solutions(problem))

    def coverage(self, problem: str, completions: Sequence[Any]) -> float:
        """Share of the `solutions` that are found."""
        found = [fill(problem, completion_text(text)) for text in completions]
        return coverage_at_k(found, self.solutions(problem), max(1, len(found)))


@lru_cache(maxsize=256)
def boards_that_fit(problem: str) -> tuple[str, ...]:
    """All solutions of a puzzle, in ascending order."""
    given = [(cell, digit) for cell, digit in enumerate(problem) if digit in DIGITS]
    return tuple(board for board in all_boards() if all(board[cell] == digit for cell, digit in given))


def fill(problem: str, answer: str) -> str | None:
    """The board that an answer fills; `None` if the answer is wrong."""
    cells, digits = answer[::2], answer[1::2]
    # The length comes first: it bounds the work on hostile answers.
    if len(answer) != 2 * sum(cell in problem for cell in CELLS) or not all(cell in problem for cell in cells):
        return None
    filled = dict(zip(cells, digits, strict=True))
    board = "".join(filled.get(cell, given) for cell, given in zip(CELLS, problem, strict=True))
    return board if follows_rules(board) else None


def follows_rules(board: str) -> bool:
    """Whether every row, column and box of a line of 16 characters holds the four digits."""
    return all({board[cell] for cell in unit} == set(DIGITS) for unit in UNITS)


@cache
def all_boards() -> tuple[str, ...]:
    """The 288 filled boards, as lines in ascending order."""
    boards = [""]
    for cell in range(len(CELLS)):
        units = [unit for unit in UNITS if cell in unit]
        boards = [
            board + digit
            for board in boards
            for digit in DIGITS
            if all(board[other] != digit for unit in units for other in unit if other < cell)
        ]
    return tuple(boards)


SUDOKU = SudokuTask("sudoku", min_blanks=6, max_blanks=8, num_candidates=8, warm_start_steps=2300)
