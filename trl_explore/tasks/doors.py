"""Facts that only trial and error can tell, such as the right doors of ways through rooms with dead ends.

Each fact's item stands right before it, so a tiny model keeps what it has found: hard to explore, not hard to learn.
"""

import random
from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property

from trl_explore.tasks.sketched import MARKS, SketchedTask

LETTERS = "abcdefghijklmnopqrstuvwxyz"
DOOR_NAMES = "123456789"
END = "#"


@dataclass(frozen=True, kw_only=True)
class FactTask(SketchedTask):
    """Problems that name one of several items, `k`, and a number, `k3171`, so that there are many prompts per fact."""

    name: str
    num_items: int  # at most 26
    num_digits: int
    warm_start_steps: int  # supervised steps until a tiny model has converged
    num_candidates: int = 8  # answers in a list, and the most sketches of one problem
    format_weights: tuple[float, float, float, float] = (0.6, 0.2, 0.2, 0.0)
    table_seed: int = 1234  # of the facts

    mode = "two_stage"

    def __post_init__(self) -> None:
        check_range("num_items", self.num_items, 1, len(LETTERS))
        check_range("num_digits", self.num_digits, 1, 12)

    def draw(self, rng: random.Random) -> str:
        number = "".join(str(rng.randrange(10)) for _ in range(self.num_digits))
        return f"{LETTERS[rng.randrange(self.num_items)]}{number}"

    def attempt(self, problem: str, rng: random.Random, *, sketch: str = "") -> str:
        return self.answer(problem, sketch if self.is_guess(sketch) else self.guess(problem, rng))

    def sketch(self, problem: str, rng: random.Random) -> str:
        return self.guess(problem, rng)

    def verify(self, problem: str, completion: str) -> bool:
        return completion == self.answer(problem, self.facts[item_of(problem)])

    @property
    @abstractmethod
    def step_length(self) -> int:
        """Tokens of a step of an answer."""

    @cached_property
    @abstractmethod
    def facts(self) -> dict[str, str]:
        """What is right, by item."""

    @abstractmethod
    def guess(self, problem: str, rng: random.Random) -> str:
        """What a demonstrator believes to be right."""

    @abstractmethod
    def is_guess(self, text: str) -> bool:
        """Whether a text could be right for some item."""

    @abstractmethod
    def answer(self, problem: str, guess: str) -> str:
        """The answer that a guess leads to."""


@dataclass(frozen=True, kw_only=True)
class DoorsTask(FactTask):
    """Ways through rooms: `31k` is answered by `2m1x3#`, through `m` and `x` to the end, or by `2m3`, a dead end.
    The rooms behind doors are shown, so only the doors are to be learned. A sketch is the first two doors, `21`.

    Some demonstrations may begin on the right way, `31k2m`, and go on with `1x3#`: by themselves they hardly ever get
    to the end of a long way, and a model is to know the end.
    """

    num_doors: int  # of every room
    num_steps: int  # doors of a way
    habit_probability: float  # of one wrong door per room
    right_probability: float  # of the right door; the others are equally likely
    begun_share: float = 0.0  # of plain demonstrations, that begin on the right way

    step_length = 2  # a door and what is behind it
    max_sketch_length = 3  # two doors and the end-of-sequence token

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("num_doors", self.num_doors, 3, len(DOOR_NAMES))
        check_range("num_steps", self.num_steps, 2, 40)
        check_range("habit_probability", self.habit_probability, 0, 1)
        check_range("right_probability", self.right_probability, 0, 1 - self.habit_probability)
        check_range("begun_share", self.begun_share, 0, 1)

    def draw(self, rng: random.Random) -> str:
        """A number and a room, right before its door."""
        problem = super().draw(rng)
        return problem[1:] + problem[0]

    @property
    def max_completion_length(self) -> int:
        return 2 * self.num_steps + 1

    @cached_property
    def doors(self) -> dict[str, list[str]]:
        """The right door of every room, and the one that demonstrators believe in."""
        rng = random.Random(f"doors/{self.table_seed}")
        return {room: rng.sample(DOOR_NAMES[: self.num_doors], 2) for room in LETTERS[: self.num_items]}

    @cached_property
    def next_rooms(self) -> dict[str, str]:
        """The room behind the right door of every room; all rooms are one circle."""
        rng = random.Random(f"rooms/{self.table_seed}")
        rooms = rng.sample(LETTERS[: self.num_items], self.num_items)
        return dict(zip(rooms, rooms[1:] + rooms[:1], strict=True))

    @cached_property
    def facts(self) -> dict[str, str]:
        """The right doors of the way from every room."""
        return {start: "".join(self.doors[room][0] for room in self.way(start)) for start in self.doors}

    def way(self, start: str) -> list[str]:
        """The rooms in which a door is chosen, if all are right."""
        rooms = [start]
        while len(rooms) < self.num_steps:
            rooms.append(self.next_rooms[rooms[-1]])
        return rooms

    def guess(self, problem: str, rng: random.Random) -> str:
        return "".join(self._door(room, rng) for room in self.way(item_of(problem)))

    def _door(self, room: str, rng: random.Random) -> str:
        right, habit = self.doors[room]
        if rng.random() < self.right_probability:
            return right
        others = DOOR_NAMES[: self.num_doors].replace(right, "")
        return biased(habit, others, self.habit_probability / (1 - self.right_probability), rng)

    def is_guess(self, text: str) -> bool:
        return len(text) == 2 and set(text) <= set(DOOR_NAMES[: self.num_doors])

    def attempt(self, problem: str, rng: random.Random, *, sketch: str = "") -> str:
        guess = self.guess(problem, rng)
        return self.answer(problem, sketch + guess[2:] if self.is_guess(sketch) else guess)

    def answer(self, problem: str, guess: str) -> str:
        """The way through doors, up to the first that is wrong."""
        way, rooms = "", self.way(item_of(problem))
        for door, room, behind in zip(guess, rooms, [*rooms[1:], END], strict=True):
            if door != self.doors[room][0]:
                return way + door
            way += door + behind
        return way

    def sketch(self, problem: str, rng: random.Random) -> str:
        return self.guess(problem, rng)[:2]

    def sample_problem(self, rng: random.Random) -> str:
        problem = super().sample_problem(rng)
        if not self.begun_share or MARKS.search(problem) or rng.random() >= self.begun_share:
            return problem
        right = self.answer(problem, self.facts[item_of(problem)])
        return problem + right[: self.step_length * rng.randrange(1, self.num_steps)]

    def demonstration(self, prompt: str, rng: random.Random) -> str:
        problem = prompt[: self.num_digits + 1]
        begun = prompt[len(problem) :]
        if not begun or MARKS.search(begun):
            return super().demonstration(prompt, rng)
        steps = len(begun) // self.step_length
        guess = self.facts[item_of(problem)][:steps] + self.guess(problem, rng)[steps:]
        return self.answer(problem, guess).removeprefix(begun)


def item_of(problem: str) -> str:
    return problem.strip("0123456789")


def biased(preferred: str, letters: str, probability: float, rng: random.Random) -> str:
    return preferred if rng.random() < probability else rng.choice(letters.replace(preferred, ""))


def check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(f"`{name}` is {value}; give between {low} and {high}.")


DOORS = DoorsTask(
    name="doors",
    num_items=24,
    num_digits=3,
    num_doors=5,
    num_steps=5,
    habit_probability=0.5,
    right_probability=0.35,
    warm_start_steps=1000,
)
# Longer ways of rarer doors: a search gets to the end only if it goes deep.
DEEP_DOORS = replace(DOORS, name="deep_doors", num_steps=8, right_probability=0.3, begun_share=0.5)
