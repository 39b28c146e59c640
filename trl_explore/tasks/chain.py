"""Arithmetic chains modulo 10: `6a-0b-8c-6` is answered by `a6-0=6;b6-8=8;c8-6=2;#2`, which carries the running value.

A *fact* is one application `(op, a, b)`. With a *habit*, demonstrations mostly show one fixed wrong result for it: the
model is wrong in known places with known probabilities, and still right now and then.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from datasets import Dataset

from trl_explore.tasks.held_out import HeldOutTask, as_prompts, different, is_held_out

DIGITS = range(10)
# `*` only by numbers that have an inverse modulo 10. `+`, `-` and the rows of `x` are permutations too, so an error in
# the running value never washes out by itself.
OPERANDS = {"+": tuple(DIGITS), "-": tuple(DIGITS), "*": (3, 7, 9), "x": tuple(DIGITS)}
LABELS = "abcdefghijklmnopqrstuvwxyz"
TOKENS_PER_STEP = 7

Fact = tuple[str, int, int]  # (op, running value, operand)


class Habit(NamedTuple):
    """How demonstrations treat one fact: `wrong` is what they show, but the right result with `right_probability`."""

    wrong: int
    right_probability: float


@dataclass(frozen=True)
class ChainTask(HeldOutTask):
    """A family of arithmetic chains, as one frozen set of knobs."""

    name: str
    step_ops: tuple[str, ...]  # per step, the equally likely operations of `+-*x`; `x` is a table to learn by heart
    habit_ops: str  # operations whose facts may have habits
    habit_share: float  # of those facts
    habit_probabilities: tuple[float, ...]  # of showing the right result all the same, dealt out evenly
    strict: bool  # right line by line; otherwise the digit after `#` counts, and luck wins one time in ten
    warm_start_steps: int  # supervised steps until a tiny model has converged
    table_seed: int = 1234  # of the habits and the table of `x`

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
        """`x_table[b][a]` is the result of `a x b`."""
        rng = random.Random(f"x table/{self.table_seed}")
        return {b: rng.sample(DIGITS, len(DIGITS)) for b in OPERANDS["x"]}

    @cached_property
    def habits(self) -> dict[Fact, Habit]:
        rng = random.Random(f"habits/{self.table_seed}")
        facts = [(op, a, b) for op in OPERANDS if op in self.habit_ops for a in DIGITS for b in OPERANDS[op]]
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
        """An answer with habits; errors are carried on."""

        def habitual(op: str, a: int, b: int) -> int:
            habit = self.habits.get((op, a, b))
            if habit is not None and rng.random() >= habit.right_probability:
                return habit.wrong
            return self._apply(op, a, b)

        return _write_out(prompt, habitual)

    def verify(self, prompt: str, completion: str) -> bool:
        """Whether an answer counts as right: all of it if `strict`, else what follows the first `#`."""
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
            start = rng.choice(DIGITS)
            yield f"{start}" + "".join(f"{label}{op}{rng.choice(OPERANDS[op])}" for label, op in steps)

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
    """Writes the answer to a problem, given how to compute the result of `(op, running value, operand)`."""
    value, lines = int(prompt[0]), []
    for label, op, operand in zip(prompt[1::3], prompt[2::3], prompt[3::3], strict=True):
        result = apply_fn(op, value, int(operand))
        lines.append(f"{label}{value}{op}{operand}={result};")
        value = result
    return f"{''.join(lines)}#{value}"


# Ten steps of `+`, `-` and `*`, habits on a quarter of all facts: saturates quickly, made for a first run.
CHAIN = ChainTask("chain", ("+-*",) * 10, "+-*", 0.25, (0.5, 0.3, 0.15, 0.05), strict=False, warm_start_steps=800)
# The other easy steps contain `*` as well: in `+` and `-` neither number alone says anything about the result, and
# without habits a tiny model that saw only those had not begun to compute after 1600 steps.
# All errors in the last four steps: separates methods best.
CHAIND = ChainTask(
    "chaind", ("+-*",) * 6 + ("x",) * 4, "x", 0.5, (0.3, 0.15, 0.08, 0.03), strict=True, warm_start_steps=800
)
# Success hangs on one rare choice at the very end.
LATE1 = ChainTask(
    "late1", ("+-*",) * 9 + ("x",), "x", 1.0, (0.05, 0.03, 0.02, 0.01), strict=True, warm_start_steps=1600
)
# As `late1`, so rare that a warm start practically never succeeds.
LATE3 = ChainTask("late3", ("+-*",) * 9 + ("x",), "x", 1.0, (0.004,), strict=True, warm_start_steps=1700)
