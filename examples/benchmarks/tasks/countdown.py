"""Countdown: compute a target from a few numbers with `+`, `-`, `*` and `/`. Most problems have many solutions.

Right answers to `2,3,5,7=24` are `5*3=15,7+2=9,15+9=24` and `(5*3)+7+2`. The result of the last equation may be left
out. Every number and every intermediate result must be used exactly once. Arithmetic is exact, with fractions.
"""

import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

from trl_explore.evaluation.metrics import coverage_at_k
from trl_explore.rewards.answers import completion_text
from trl_explore.tasks.sketched import SketchedTask

PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2}
COMMUTATIVE = "+*"
LINE_SEPARATOR = ","
# A number, or any other character except a space. `_reduce` refuses characters that are not part of an expression.
TOKENS = re.compile(r"[0-9]+|[^ ]")
MAX_CHARACTERS = 300  # no right answer is longer; this limits the work on hostile completions

Solution = tuple[str, ...]  # equations in canonical form, sorted, because their order does not matter


class Move(NamedTuple):
    """Operation on two numbers of a pool."""

    equation: str
    result: int
    left: tuple[int, ...]  # numbers in the pool after the operation, sorted


@dataclass(frozen=True)
class CountdownTask(SketchedTask):
    """
    Task with Countdown problems of one size.

    A sketch is the first operation, for example `5-3`. Every equation in a demonstration is right, but the last result
    often misses the target. So a model that is trained on demonstrations can calculate, but cannot plan.
    """

    name: str
    num_numbers: int  # at least 2
    max_number: int
    operators: str  # characters of `+-*/` that problems and demonstrations use; answers may use all four
    min_target: int
    max_value: int  # largest target and intermediate result; both are positive integers
    carelessness: float  # probability that a demonstration chooses an operation at random
    num_candidates: int  # number of answers in a list, and maximum number of sketches per problem
    warm_start_steps: int  # supervised steps until a tiny model has converged
    format_weights: tuple[float, float, float, float] = (0.55, 0.2, 0.25, 0.0)

    mode = "two_stage"

    def __post_init__(self) -> None:
        if self.num_numbers < 2:
            raise ValueError(f"`num_numbers` is {self.num_numbers}; give at least 2.")
        if not self.operators or not set(self.operators) <= set(PRECEDENCE):
            raise ValueError(f"`operators` is {self.operators!r}; use characters of {''.join(PRECEDENCE)!r}.")
        if not 1 <= self.max_number <= self.max_value:
            raise ValueError(f"`max_number` is {self.max_number}; give between 1 and `max_value={self.max_value}`.")
        if not 1 <= self.min_target <= self.max_value:
            raise ValueError(f"`min_target` is {self.min_target}; give between 1 and `max_value={self.max_value}`.")
        if not 0 <= self.carelessness <= 1:
            raise ValueError(f"`carelessness` is {self.carelessness}; give a probability between 0 and 1.")

    @property
    def max_completion_length(self) -> int:
        return (self.num_numbers - 1) * (3 * len(str(self.max_value)) + 3)

    @property
    def max_sketch_length(self) -> int:
        return 2 * len(str(self.max_number)) + 2

    def draw(self, rng: random.Random) -> str:
        """Sample sorted numbers, and a target that random operations on them reach."""
        while True:
            numbers = sorted(rng.choices(range(1, self.max_number + 1), k=self.num_numbers))
            pool = tuple(numbers)
            while len(pool) > 1 and (choices := moves(pool, self.operators, self.max_value)):
                pool = rng.choice(choices).left
            if len(pool) == 1 and pool[0] >= self.min_target:
                return f"{LINE_SEPARATOR.join(map(str, numbers))}={pool[0]}"

    def sketch(self, problem: str, rng: random.Random) -> str:
        return self.attempt(problem, rng).partition("=")[0]

    def attempt(self, problem: str, rng: random.Random, *, sketch: str = "") -> str:
        """Sample right equations that may miss the target. If `sketch` is a possible operation, it comes first."""
        pool, target = read_problem(problem)
        equations: list[str] = []
        while len(pool) > 1:
            choices = moves(pool, self.operators, self.max_value)
            sketched = tuple(move for move in choices if move.equation.startswith(f"{sketch}="))
            if not equations and sketched:
                choices = sketched
            elif rng.random() >= self.carelessness:
                good = tuple(move for move in choices if self._reaches(target, move.left))
                choices = good or choices
            if not choices:
                break  # all results are above `max_value`, or are not positive integers
            move = rng.choice(choices)
            equations.append(move.equation)
            pool = move.left
        return LINE_SEPARATOR.join(equations)

    def _reaches(self, target: int, pool: tuple[int, ...]) -> bool:
        """Return whether operations on all numbers of a pool can result in the target."""
        return bool(reachable(pool, self.operators, self.max_value) >> target & 1)

    def verify(self, problem: str, completion: str) -> bool:
        return read_answer(problem, completion) is not None

    def solutions(self, problem: str) -> set[Solution]:
        """Return the solutions whose intermediate results are positive integers up to `max_value`. A right answer may
        have other intermediate results."""
        pool, target = read_problem(problem)
        found: set[Solution] = set()

        def search(pool: tuple[int, ...], equations: Solution) -> None:
            if pool == (target,):
                found.add(tuple(sorted(equations)))
            for move in moves(pool, self.operators, self.max_value):
                if self._reaches(target, move.left):
                    search(move.left, (*equations, move.equation))

        search(pool, ())
        return found

    def num_solutions(self, problem: str) -> int:
        return len(self.solutions(problem))

    def coverage(self, problem: str, completions: Sequence[Any]) -> float:
        """Return the share of the `solutions` that are among the completions."""
        found = [read_answer(problem, completion_text(text)) for text in completions]
        return coverage_at_k(found, self.solutions(problem), max(1, len(found)))


@lru_cache(maxsize=1 << 15)
def moves(pool: tuple[int, ...], operators: str, max_value: int) -> tuple[Move, ...]:
    """Return the operations on two numbers of a sorted pool whose results are positive integers up to `max_value`,
    without duplicates."""
    found: dict[str, Move] = {}
    for i, b in enumerate(pool):
        for j in range(i + 1, len(pool)):
            a = pool[j]  # at least b
            rest = (*pool[:i], *pool[i + 1 : j], *pool[j + 1 :])
            results = {"+": a + b, "-": a - b, "*": a * b, "/": a // b if a % b == 0 else 0}
            for op in operators:
                if 1 <= results[op] <= max_value:
                    equation = f"{a}{op}{b}={results[op]}"
                    found[equation] = Move(equation, results[op], tuple(sorted((*rest, results[op]))))
    return tuple(found.values())


@lru_cache(maxsize=1 << 17)
def reachable(pool: tuple[int, ...], operators: str, max_value: int) -> int:
    """Return the possible results of operations on all numbers of a pool, as a bit mask: bit v is set for result v."""
    if len(pool) == 1:
        return 1 << pool[0]
    bits = 0
    for move in moves(pool, operators, max_value):
        bits |= reachable(move.left, operators, max_value)
    return bits


def read_problem(problem: str) -> tuple[tuple[int, ...], int]:
    """Return the sorted numbers of a problem, and its target."""
    numbers, _, target = problem.partition("=")
    return tuple(sorted(map(int, numbers.split(LINE_SEPARATOR)))), int(target)


def read_answer(problem: str, answer: str) -> Solution | None:
    """Return the equations of a right answer in canonical form, sorted. Return None if the answer is wrong."""
    if len(answer) > MAX_CHARACTERS:
        return None
    numbers, target = read_problem(problem)
    # Numbers are compared as text. So the many digits of a hostile answer are never converted to a number.
    pool, equations = Counter(map(str, numbers)), []
    lines = answer.split(LINE_SEPARATOR)
    for index, line in enumerate(lines):
        expression, equals, value = line.partition("=")
        operations = _reduce(TOKENS.findall(expression), pool)
        if not operations:
            return None
        result = operations[-1].result
        is_last = index + 1 == len(lines)
        if value.strip(" ") != str(result) and (equals or not is_last):
            return None
        pool[str(result)] += 1
        equations += [_equation(operation) for operation in operations]
    if list(pool.elements()) != [str(target)]:
        return None
    return tuple(sorted(equations))


class Operation(NamedTuple):
    """Operation in an answer: `a op b = result`."""

    a: Fraction
    op: str
    b: Fraction
    result: Fraction


def _reduce(tokens: list[str], pool: Counter[str]) -> list[Operation]:
    """
    Return the operations of an expression in the order of their evaluation, or an empty list if it is not valid.

    Args:
        tokens (`list[str]`):
            Tokens of the expression.
        pool (`Counter[str]`):
            Numbers that the expression may use. The used numbers are removed.
    """
    # The stacks replace recursion, so that a deeply nested expression does not exceed Python's recursion limit.
    operators, values = ["("], list[Fraction]()
    operations: list[Operation] = []
    operand_expected = True
    for token in (*tokens, ")"):
        if not operators:
            return []  # there is a `)` without a `(`
        if token == "(" and operand_expected:
            operators.append(token)
        elif (token in PRECEDENCE or token == ")") and not operand_expected:
            while operators[-1] != "(" and PRECEDENCE[operators[-1]] >= PRECEDENCE.get(token, 0):
                b, a, op = values.pop(), values.pop(), operators.pop()
                if op == "/" and b == 0:
                    return []
                if op == "/":
                    result = a / b
                else:
                    result = {"+": a + b, "-": a - b, "*": a * b}[op]
                operations.append(Operation(a, op, b, result))
                values.append(result)
            if token == ")":
                operators.pop()
            else:
                operators.append(token)
                operand_expected = True
        elif operand_expected and pool[token] > 0:
            pool[token] -= 1
            values.append(Fraction(token))
            operand_expected = False
        else:
            return []
    return [] if operators else operations


def _equation(operation: Operation) -> str:
    """Return an operation in canonical form: the larger operand comes first if the operands can be exchanged."""
    a, op, b, result = operation
    if op in COMMUTATIVE and a < b:
        a, b = b, a
    return f"{a}{op}{b}={result}"


COUNTDOWN = CountdownTask(
    "countdown",
    num_numbers=4,
    max_number=9,
    operators="+-*",
    min_target=10,
    max_value=30,
    carelessness=0.07,
    num_candidates=8,
    warm_start_steps=2600,
)
