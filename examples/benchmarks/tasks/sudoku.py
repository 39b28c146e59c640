"""Sudoku on boards of 4x4 cells with many blank cells, so that many problems have several solutions.

A problem is a board in one line, with letters for blank cells: `1b34e4g2ij4l4321`. An answer fills the blank cells in
any order: `b2e3g1i2j1l3`. Every row, column and 2x2 box must contain the digits 1 to 4.
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
CELLS = "abcdefghijklmnop"  # names of the cells, row by row
ROWS = [tuple(range(start, start + 4)) for start in (0, 4, 8, 12)]
COLUMNS = [tuple(range(start, 16, 4)) for start in (0, 1, 2, 3)]
BOXES = [(corner, corner + 1, corner + 4, corner + 5) for corner in (0, 2, 8, 10)]
UNITS = tuple(ROWS + COLUMNS + BOXES)  # as positions of the cells in the line


@dataclass(frozen=True)
class SudokuTask(SketchedTask):
    """Task of filling 4x4 Sudoku boards. A sketch is the cell that is filled first, for example `f`."""

    name: str
    min_blanks: int
    max_blanks: int  # at most 16
    num_candidates: int  # number of answers in a list, and maximum number of sketches per problem
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
        """Sample a right answer. It fills the cell `sketch` first, or a random cell without a sketch. The other cells
        follow in reading order."""
        board = rng.choice(boards_that_fit(problem))
        first = sketch or self.sketch(problem, rng)
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
        """Return the share of the `solutions` that are among the completions."""
        found = [fill(problem, completion_text(text)) for text in completions]
        return coverage_at_k(found, self.solutions(problem), max(1, len(found)))


@lru_cache(maxsize=256)
def boards_that_fit(problem: str) -> tuple[str, ...]:
    """Return all solutions of a problem, in ascending order."""
    given = {cell: digit for cell, digit in enumerate(problem) if digit in DIGITS}
    solutions = []
    for board in all_boards():
        if all(board[cell] == digit for cell, digit in given.items()):
            solutions.append(board)
    return tuple(solutions)


def fill(problem: str, answer: str) -> str | None:
    """Return the filled board of an answer, or None if the answer is wrong."""
    num_blanks = sum(cell in problem for cell in CELLS)
    if len(answer) != 2 * num_blanks:  # checked first, because this limits the work on hostile answers
        return None
    cells, digits = answer[::2], answer[1::2]
    if not all(cell in problem for cell in cells):
        return None
    filled = dict(zip(cells, digits, strict=True))
    board = "".join(filled.get(cell, given) for cell, given in zip(CELLS, problem, strict=True))
    return board if follows_rules(board) else None


def follows_rules(board: str) -> bool:
    """Return whether every row, column and box of a board contains the four digits."""
    return all({board[cell] for cell in unit} == set(DIGITS) for unit in UNITS)


@cache
def all_boards() -> tuple[str, ...]:
    """Return the 288 filled boards, in ascending order."""
    boards = [""]
    for cell in range(len(CELLS)):
        earlier_cells = set()  # cells of the same row, column or box that are already filled
        for unit in UNITS:
            if cell in unit:
                earlier_cells.update(other for other in unit if other < cell)
        longer = []
        for board in boards:
            for digit in DIGITS:
                if all(board[other] != digit for other in earlier_cells):
                    longer.append(board + digit)
        boards = longer
    return tuple(boards)


SUDOKU = SudokuTask("sudoku", min_blanks=6, max_blanks=8, num_candidates=8, warm_start_steps=2300)
