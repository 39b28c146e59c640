"""SESA's prompt formats, and demonstrations of each format for a tiny model.

`P?` asks for a first sketch of the problem `P`, and `P?a;b` for a sketch that differs from `a` and `b`. `P|a` asks for
an answer that follows the sketch `a`, and `P!` for a list of different answers, `x;y;z`. Evaluation and plain GRPO use
only the plain problem `P`.
"""

import itertools
import random
import re
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from datasets import Dataset

from trl_explore.rewards.answers import completion_text
from trl_explore.tasks.held_out import HeldOutTask, as_prompts, different, is_held_out

SKETCH_MARK, SOLVE_MARK, LIST_MARK = "?", "|", "!"
MARKS = re.compile(f"[{re.escape(SKETCH_MARK + SOLVE_MARK + LIST_MARK)}]")
SEPARATOR = ";"
# Repeated samples after which a list of different texts ends early, because a problem may have too few.
MAX_REPEATS = 200


class SketchedTask(HeldOutTask):
    """Task whose problems also have SESA's formats. Subclasses are frozen dataclasses with these attributes."""

    name: str
    num_candidates: int  # number of answers in a list, and maximum number of sketches per problem
    warm_start_steps: int  # supervised steps until a tiny model has converged
    # Shares of plain answers, sketches, answers to a sketch, and lists in the demonstrations. A long list makes all
    # rows of its batch long, so a task whose `mode` needs no lists sets their share to 0.
    format_weights: tuple[float, float, float, float]
    mode: ClassVar[str]  # the mode of `SESAConfig` that suits the task

    @property
    @abstractmethod
    def max_completion_length(self) -> int:
        """Number of tokens of the longest plain answer, including the end-of-sequence token."""

    @property
    @abstractmethod
    def max_sketch_length(self) -> int:
        """Number of tokens of the longest sketch, including the end-of-sequence token."""

    @abstractmethod
    def draw(self, rng: random.Random) -> str:
        """Sample a plain problem, held out or not."""

    @abstractmethod
    def sketch(self, problem: str, rng: random.Random) -> str:
        """Sample a sketch for the demonstrations."""

    @abstractmethod
    def attempt(self, problem: str, rng: random.Random, *, sketch: str = "") -> str:
        """Sample an answer for the demonstrations, right or wrong. It follows `sketch` if one is given."""

    @abstractmethod
    def verify(self, problem: str, completion: str) -> bool:
        """Return whether an answer is right."""

    @property
    def sesa_options(self) -> dict[str, Any]:
        return {
            "mode": self.mode,
            "sketch_template": f"{{problem}}{SKETCH_MARK}",
            "next_sketch_template": f"{{problem}}{SKETCH_MARK}{{sketches}}",
            "sketch_separator": SEPARATOR,
            "solve_template": f"{{problem}}{SOLVE_MARK}{{sketch}}",
            "candidate_template": f"{{problem}}{LIST_MARK}",
            "candidate_separator": SEPARATOR,
            "max_list_length": self.num_candidates * self.max_completion_length,
            "max_sketch_length": self.max_sketch_length,
        }

    def accuracy_reward(self, completions: list, problem: list[str], **columns: Any) -> list[float]:
        texts = map(completion_text, completions)
        return [float(self.verify(plain, text)) for plain, text in zip(problem, texts, strict=True)]

    def is_held_out(self, problem: str) -> bool:
        return is_held_out(problem)

    def _dataset(self, num_examples: int, rng: random.Random, *, held_out: bool) -> Dataset:
        problems = different(
            (self.draw(rng) for _ in itertools.count()),
            num_examples,
            lambda problem: self.is_held_out(problem) == held_out,
            name=self.name,
            remedy="make the problems larger",
        )
        return Dataset.from_dict({"prompt": as_prompts(problems), "problem": problems})

    def sample_problem(self, rng: random.Random) -> str:
        problem = self.draw(rng)
        while self.is_held_out(problem):
            problem = self.draw(rng)
        (mark,) = rng.choices(("", SKETCH_MARK, SOLVE_MARK, LIST_MARK), self.format_weights)
        if mark == SKETCH_MARK:
            # The demonstrations contain prompts with 0, 1, ... earlier sketches, like the prompts of a rollout.
            earlier = distinct(lambda: self.sketch(problem, rng), rng.randrange(self.num_candidates))
            return f"{problem}{mark}{SEPARATOR.join(earlier)}"
        if mark == SOLVE_MARK:
            return f"{problem}{mark}{self.sketch(problem, rng)}"
        return f"{problem}{mark}"

    def demonstration(self, prompt: str, rng: random.Random) -> str:
        # Split at the first mark only, because a model's sketch may follow it and contain marks too.
        problem, mark, sketches = prompt, "", ""  # after `SOLVE_MARK`, `sketches` is a single sketch
        if match := MARKS.search(prompt):
            problem, mark, sketches = prompt[: match.start()], match[0], prompt[match.end() :]
        if mark == SKETCH_MARK:
            new_sketches = distinct(lambda: self.sketch(problem, rng), 1, sketches.split(SEPARATOR))
            if new_sketches:
                return new_sketches[0]
            return self.sketch(problem, rng)
        if mark == LIST_MARK:
            return SEPARATOR.join(distinct(lambda: self.attempt(problem, rng), self.num_candidates))
        return self.attempt(problem, rng, sketch=sketches)


def distinct(draw: Callable[[], str], number: int, earlier: list[str] | None = None) -> list[str]:
    """Return `number` different texts of `draw` that are not in `earlier`, or fewer if texts repeat too often."""
    seen = dict.fromkeys(earlier or [])
    found: list[str] = []
    for _ in range(number + MAX_REPEATS):
        if len(found) == number:
            break
        text = draw()
        if text not in seen:
            seen[text] = None
            found.append(text)
    return found
