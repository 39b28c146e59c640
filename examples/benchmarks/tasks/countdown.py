"""Countdown: reach a target from a few numbers with `+`, `-`, `*` and `/`; most problems have many solutions.

`2,3,5,7=24` is answered by `5*3=15,7+2=9,15+9=24` (the last right side may be left out) or by `(5*3)+7+2`. Every
number and every intermediate result must be used exactly once. Arithmetic is exact, with fractions.
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
# ASCII digits, or any other character that is no space: what is no token of the grammar fails as an operand.
TOKENS = re.compile(r"[0-9]+|[^ ]")
MAX_CHARACTERS = 300  # no answer needs more; bounds the work on hostile completions

Solution = tuple[str, ...]  # equations in canonical form, sorted: the order in which they are written does not count


class Move(NamedTuple):
    """One operation on a pool of numbers: its `equation`, the `result` and the sorted numbers that are `left` then."""

    equation: str
    result: int
    left: tuple[int, ...]


@dataclass(frozen=True)
class CountdownTask(SketchedTask):
    """A family of Countdown problems. A sketch is the first operation, `5-3`. Demonstrations compute rightly but plan
    carelessly: a model trained on them writes what can be checked, and fails at what is to be learned."""

    name: str
    num_numbers: int  # at least 2
    max_number: int
    operators: str  # of problems and demonstrations, out of `+-*/`; answers may use all
    min_target: int
    max_value: int  # of targets and intermediate results, which are whole and positive
    carelessness: float  # probability that a demonstration chooses an operation at random
    num_candidates: int  # answers in a list, and the most sketches of one problem
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
        """Sorted random numbers and the end of a random walk from them."""
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
        """Equations that are right but may miss the target, from `sketch` on."""
        pool, target = read_problem(problem)
        equations: list[str] = []
        while len(pool) > 1:
            choices = moves(pool, self.operators, self.max_value)
            if not equations and any(move.equation.startswith(f"{sketch}=") for move in choices):
                choices = tuple(move for move in choices if move.equation.startswith(f"{sketch}="))
            elif rng.random() >= self.carelessness:
                good = [m for m in choices if reachable(m.left, self.operators, self.max_value) >> target & 1]
                choices = tuple(good) or choices
            if not choices:
                break  # nothing stays below `max_value`: give up
            move = rng.choice(choices)
            equations.append(move.equation)
            pool = move.left
        return LINE_SEPARATOR.join(equations)

    def verify(self, problem: str, completion: str) -> bool:
        return read_answer(problem, completion) is not None

    def solutions(self, problem: str) -> set[Solution]:
        """Canonical solutions with whole, positive numbers up to `max_value`; there may be others."""
        pool, target = read_problem(problem)
        found: set[Solution] = set()

        def search(pool: tuple[int, ...], equations: Solution) -> None:
            if pool == (target,):
                found.add(tuple(sorted(equations)))
            for move in moves(pool, self.operators, self.max_value):
                if reachable(move.left, self.operators, self.max_value) >> target & 1:
                    search(move.left, (*equations, move.equation))

        search(pool, ())
        return found

    def num_solutions(self, problem: str) -> int:
        return len(self.solutions(problem))

    def coverage(self, problem: str, completions: Sequence[Any]) -> float:
        """Share of the `solutions` that are found."""
        found = [read_answer(problem, completion_text(text)) for text in completions]
        return coverage_at_k(found, self.solutions(problem), max(1, len(found)))


@lru_cache(maxsize=1 << 15)
def moves(pool: tuple[int, ...], operators: str, max_value: int) -> tuple[Move, ...]:
    """All operations on two numbers whose result is whole, positive and not too large, each once."""
    found: dict[str, Move] = {}
    for i, b in enumerate(pool):
        for j in range(i + 1, len(pool)):
            a, rest = pool[j], (*pool[:i], *pool[i + 1 : j], *pool[j + 1 :])
            results = {"+": a + b, "-": a - b, "*": a * b, "/": a // b if a % b == 0 else 0}
            for op in operators:
                if 1 <= results[op] <= max_value:
                    equation = f"{a}{op}{b}={results[op]}"
                    found[equation] = Move(equation, results[op], tuple(sorted((*rest, results[op]))))
    return tuple(found.values())


@lru_cache(maxsize=1 << 17)
def reachable(pool: tuple[int, ...], operators: str, max_value: int) -> int:
    """What can be made of all numbers of a pool, as bits: bit v is set if v can be made."""
    if len(pool) == 1:
        return 1 << pool[0]
    bits = 0
    for move in moves(pool, operators, max_value):
        bits |= reachable(move.left, operators, max_value)
    return bits


def read_problem(problem: str) -> tuple[tuple[int, ...], int]:
    """The numbers of a problem, sorted, and the target."""
    numbers, _, target = problem.partition("=")
    return tuple(sorted(map(int, numbers.split(LINE_SEPARATOR)))), int(target)


def read_answer(problem: str, answer: str) -> Solution | None:
    """The operations of a right answer in canonical form, sorted; `None` if it is wrong."""
    if len(answer) > MAX_CHARACTERS:
        return None
    numbers, target = read_problem(problem)
    # Numbers are compared as they are written, so that no digits of a hostile answer are ever converted.
    pool, equations = Counter(map(str, numbers)), []
    lines = answer.split(LINE_SEPARATOR)
    for index, line in enumerate(lines):
        expression, equals, value = line.partition("=")
        operations = _reduce(TOKENS.findall(expression), pool)
        if not operations:
            return None
        result = operations[-1][-1]
        if value.strip(" ") != str(result) and (equals or index + 1 < len(lines)):
            return None
        pool[str(result)] += 1
        equations += [_equation(*operation) for operation in operations]
    return tuple(sorted(equations)) if list(pool.elements()) == [str(target)] else None


def _reduce(tokens: list[str], pool: Counter[str]) -> list[tuple[Fraction, str, Fraction, Fraction]]:
    """Operations `(a, op, b, result)` of an expression whose numbers leave `pool`; empty if it is not valid."""
    # Operators wait on a stack: deep nesting costs no recursion.
    operators, values = ["("], list[Fraction]()
    operations: list[tuple[Fraction, str, Fraction, Fraction]] = []
    operand_expected = True
    for token in (*tokens, ")"):
        if not operators:
            return []  # the last bracket was closed before the end
        if token == "(" and operand_expected:
            operators.append(token)
        elif (token in PRECEDENCE or token == ")") and not operand_expected:
            while operators[-1] != "(" and PRECEDENCE[operators[-1]] >= PRECEDENCE.get(token, 0):
                b, a, op = values.pop(), values.pop(), operators.pop()
                if op == "/" and b == 0:
                    return []
                result = {"+": a + b, "-": a - b, "*": a * b}[op] if op != "/" else a / b
                operations.append((a, op, b, result))
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


def _equation(a: Fraction, op: str, b: Fraction, result: Fraction) -> str:
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
