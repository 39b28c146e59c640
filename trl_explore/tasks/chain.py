"""Arithmetic chains modulo 10. The answer to `6a-0b-8c-6` is `a6-0=6;b6-8=8;c8-6=2;#2`, one part per step.

A *fact* is one computation `(op, a, b)`. If a fact has a *habit*, most demonstrations show one fixed wrong result for
it. So the model makes known errors with known probabilities, and sometimes computes the right result.
"""

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from datasets import Dataset

from trl_explore.tasks.held_out import HeldOutTask, as_prompts, different, is_held_out

DIGITS = range(10)
# `*` has only operands with an inverse modulo 10. Then every operation with its operand permutes the digits, so an
# error in the running value cannot vanish in a later step.
OPERANDS = {"+": tuple(DIGITS), "-": tuple(DIGITS), "*": (3, 7, 9), "x": tuple(DIGITS)}
LABELS = "abcdefghijklmnopqrstuvwxyz"
TOKENS_PER_STEP = 7

Fact = tuple[str, int, int]  # (op, running value, operand)


class Habit(NamedTuple):
    """Habit of a fact: demonstrations show the right result with `right_probability`, otherwise `wrong`."""

    wrong: int
    right_probability: float


@dataclass(frozen=True)
class ChainTask(HeldOutTask):
    """
    Task of arithmetic chains.

    Args:
        name (`str`):
            Name of the task.
        step_ops (`tuple[str, ...]`):
            Operations of each step, from `+-*x`, which are equally likely. `x` is a table of random results.
        habit_ops (`str`):
            Operations whose facts may have habits.
        habit_share (`float`):
            Share of these facts that have a habit.
        habit_probabilities (`tuple[float, ...]`):
            Probabilities of the right result. The facts with habits take them one after the other.
        strict (`bool`):
            If `True`, the whole answer must be right. If `False`, only the digit after `#` counts, so that one random
            digit in ten is right.
        warm_start_steps (`int`):
            Supervised steps until a tiny model has converged.
        table_seed (`int`, *optional*, defaults to `1234`):
            Seed of the habits and of the table of `x`.
    """

    name: str
    step_ops: tuple[str, ...]
    habit_ops: str
    habit_share: float
    habit_probabilities: tuple[float, ...]
    strict: bool
    warm_start_steps: int
    table_seed: int = 1234

    step_delimiters = [";"]
    step_length = TOKENS_PER_STEP

    def __post_init__(self) -> None:
        if not 1 <= len(self.step_ops) <= len(LABELS):
            raise ValueError(f"`step_ops` has {len(self.step_ops)} steps; give between 1 and {len(LABELS)}.")
        for ops in (*self.step_ops, self.habit_ops):
            if not ops or not set(ops) <= set(OPERANDS):
                raise ValueError(
                    f"`step_ops` and `habit_ops` contain {ops!r}; use characters of {''.join(OPERANDS)!r}."
                )
        if not 0 <= self.habit_share <= 1:
            raise ValueError(f"`habit_share` is {self.habit_share}; give a share between 0 and 1.")
        if not self.habit_probabilities or not all(0 <= p <= 1 for p in self.habit_probabilities):
            raise ValueError(f"`habit_probabilities` is {self.habit_probabilities}; give probabilities in [0, 1].")

    @property
    def max_completion_length(self) -> int:
        return TOKENS_PER_STEP * len(self.step_ops) + 3

    @cached_property
    def x_table(self) -> dict[int, list[int]]:
        """Results of the operation `x`: `x_table[b][a]` is the result of `a x b`."""
        rng = random.Random(f"x table/{self.table_seed}")
        return {b: rng.sample(DIGITS, len(DIGITS)) for b in OPERANDS["x"]}

    @cached_property
    def habits(self) -> dict[Fact, Habit]:
        rng = random.Random(f"habits/{self.table_seed}")
        facts: list[Fact] = []
        for op in OPERANDS:
            if op in self.habit_ops:
                facts += itertools.product([op], DIGITS, OPERANDS[op])
        chosen = rng.sample(facts, int(self.habit_share * len(facts)))
        habits = {}
        for index, fact in enumerate(chosen):
            wrong = rng.choice([digit for digit in DIGITS if digit != self._apply(*fact)])
            habits[fact] = Habit(wrong, self.habit_probabilities[index % len(self.habit_probabilities)])
        return habits

    def _apply(self, op: str, a: int, b: int) -> int:
        if op == "x":
            return self.x_table[b][a]
        return {"+": a + b, "-": a - b, "*": a * b}[op] % len(DIGITS)

    def solve(self, prompt: str) -> str:
        return _write_out(prompt, self._apply)

    def demonstration(self, prompt: str, rng: random.Random) -> str:
        """Sample an answer with habits. Later steps continue from a wrong result."""

        def habitual(op: str, a: int, b: int) -> int:
            habit = self.habits.get((op, a, b))
            if habit is not None and rng.random() >= habit.right_probability:
                return habit.wrong
            return self._apply(op, a, b)

        return _write_out(prompt, habitual)

    def verify(self, prompt: str, completion: str) -> bool:
        """Return whether an answer is right: the whole answer if `strict`, otherwise the text after the first `#`."""
        return self._matches(completion, self.solve(prompt))

    def accuracy_reward(self, completions: list, answer: list[str], **columns: Any) -> list[float]:
        texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
        return [float(self._matches(text, right)) for text, right in zip(texts, answer, strict=True)]

    def sample_problem(self, rng: random.Random) -> str:
        return next(prompt for prompt in self._draws(rng) if not is_held_out(prompt))

    def _matches(self, completion: str, answer: str) -> bool:
        if self.strict:
            return completion == answer
        return completion.partition("#")[2] == answer.partition("#")[2]

    def _draws(self, rng: random.Random) -> Iterator[str]:
        while True:
            steps = [(label, rng.choice(ops)) for label, ops in zip(LABELS, self.step_ops, strict=False)]
            problem = str(rng.choice(DIGITS))
            for label, op in steps:
                problem += f"{label}{op}{rng.choice(OPERANDS[op])}"
            yield problem

    def _dataset(self, num_examples: int, rng: random.Random, *, held_out: bool) -> Dataset:
        problems = different(
            self._draws(rng),
            num_examples,
            lambda problem: is_held_out(problem) == held_out,
            name=self.name,
            remedy="give `step_ops` more steps",
        )
        answers = [self.solve(problem) for problem in problems]
        return Dataset.from_dict({"prompt": as_prompts(problems), "answer": answers})


def _write_out(prompt: str, apply_fn: Callable[[str, int, int], int]) -> str:
    """Return the answer to a problem. `apply_fn` computes the result of an operation, running value and operand."""
    value, parts = int(prompt[0]), []
    for label, op, operand in zip(prompt[1::3], prompt[2::3], prompt[3::3], strict=True):
        result = apply_fn(op, value, int(operand))
        parts.append(f"{label}{value}{op}{operand}={result};")
        value = result
    return f"{''.join(parts)}#{value}"


# Ten steps of `+`, `-` and `*`, with habits on a quarter of all facts. It saturates quickly and suits a first run.
CHAIN = ChainTask("chain", ("+-*",) * 10, "+-*", 0.25, (0.5, 0.3, 0.15, 0.05), strict=False, warm_start_steps=800)
# All errors are in the last four steps. This task shows the largest differences between methods.
# The easy steps contain `*` too: with `+` and `-` alone, a tiny model had not learned to compute after 1600 steps.
CHAIND = ChainTask(
    "chaind", ("+-*",) * 6 + ("x",) * 4, "x", 0.5, (0.3, 0.15, 0.08, 0.03), strict=True, warm_start_steps=800
)
# Success depends on one rare choice in the last step.
LATE1 = ChainTask(
    "late1", ("+-*",) * 9 + ("x",), "x", 1.0, (0.05, 0.03, 0.02, 0.01), strict=True, warm_start_steps=1600
)
# The same as `late1`, but the right choice is so rare that a model practically never succeeds after its warm start.
LATE3 = ChainTask("late3", ("+-*",) * 9 + ("x",), "x", 1.0, (0.004,), strict=True, warm_start_steps=1700)
