"""Tasks of facts that a model can find only by trial and error, such as the right doors on ways through rooms.

In an answer, each fact directly follows its item, so a tiny model easily remembers a fact that it has found. These
tasks are hard to explore, but not hard to learn.
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
    """
    Task whose problems name an item and a random number: `k3171` is item `k`. The number gives many prompts per fact.

    Args:
        name (`str`):
            Name of the task.
        num_items (`int`):
            Number of items, at most 26.
        num_digits (`int`):
            Digits of the number.
        warm_start_steps (`int`):
            Supervised steps until a tiny model has converged.
        num_candidates (`int`, *optional*, defaults to `8`):
            Number of answers in a list, and maximum number of sketches per problem.
        format_weights (`tuple[float, float, float, float]`, *optional*):
            Shares of plain answers, sketches, answers to a sketch, and lists in the demonstrations.
        table_seed (`int`, *optional*, defaults to `1234`):
            Seed of the facts.
    """

    name: str
    num_items: int
    num_digits: int
    warm_start_steps: int
    num_candidates: int = 8
    format_weights: tuple[float, float, float, float] = (0.6, 0.2, 0.2, 0.0)
    table_seed: int = 1234

    mode = "two_stage"

    def __post_init__(self) -> None:
        check_range("num_items", self.num_items, 1, len(LETTERS))
        check_range("num_digits", self.num_digits, 1, 12)

    def draw(self, rng: random.Random) -> str:
        number = "".join(str(rng.randrange(10)) for _ in range(self.num_digits))
        return f"{LETTERS[rng.randrange(self.num_items)]}{number}"

    def attempt(self, problem: str, rng: random.Random, *, sketch: str = "") -> str:
        guess = sketch
        if not self.is_guess(guess):
            guess = self.guess(problem, rng)
        return self.answer(problem, guess)

    def sketch(self, problem: str, rng: random.Random) -> str:
        return self.guess(problem, rng)

    def verify(self, problem: str, completion: str) -> bool:
        return completion == self.answer(problem, self.facts[item_of(problem)])

    @property
    @abstractmethod
    def step_length(self) -> int:
        """Number of tokens of a step of an answer."""

    @cached_property
    @abstractmethod
    def facts(self) -> dict[str, str]:
        """Facts by item."""

    @abstractmethod
    def guess(self, problem: str, rng: random.Random) -> str:
        """Sample a guess of the fact of a problem's item, as demonstrations show it."""

    @abstractmethod
    def is_guess(self, text: str) -> bool:
        """Return whether a text has the form of a guess."""

    @abstractmethod
    def answer(self, problem: str, guess: str) -> str:
        """Return the answer that contains a guess."""


@dataclass(frozen=True, kw_only=True)
class DoorsTask(FactTask):
    """
    Task of finding the right doors on a way through rooms.

    The right answer to `31k` is, for example, `2m1x3#`: from room `k` through door 2 to room `m`, through door 1 to
    room `x`, and through door 3 to the end. A wrong third door ends the answer: `2m1x4`. An answer contains the rooms,
    so the model has to learn only the doors. A sketch is the first two doors, `21`.

    The demonstrations rarely reach the end of a long way by chance. So that the model learns the end too, some of them
    may begin after right doors: the prompt `31k2m` is continued with `1x3#`.

    Args:
        num_doors (`int`):
            Number of doors of every room.
        num_steps (`int`):
            Number of doors on a way.
        habit_probability (`float`):
            Probability that a demonstration chooses a room's habit, which is one fixed wrong door.
        right_probability (`float`):
            Probability that a demonstration chooses the right door. The other wrong doors share the rest equally.
        begun_share (`float`, *optional*, defaults to `0.0`):
            Share of the plain demonstrations that begin after right doors.
    """

    num_doors: int
    num_steps: int
    habit_probability: float
    right_probability: float
    begun_share: float = 0.0

    step_length = 2  # a door, and the room that it leads to or the end
    max_sketch_length = 3  # two doors and the end-of-sequence token

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("num_doors", self.num_doors, 3, len(DOOR_NAMES))
        check_range("num_steps", self.num_steps, 2, 40)
        check_range("habit_probability", self.habit_probability, 0, 1)
        rest = round(1 - self.habit_probability, 12)  # 1 - 0.8 is 0.19999999999999996
        check_range("right_probability", self.right_probability, 0, rest)
        check_range("begun_share", self.begun_share, 0, 1)

    def draw(self, rng: random.Random) -> str:
        """Sample a number, followed by a room, so that the room directly precedes its door."""
        problem = super().draw(rng)
        return problem[1:] + problem[0]

    @property
    def max_completion_length(self) -> int:
        return 2 * self.num_steps + 1

    @cached_property
    def doors(self) -> dict[str, list[str]]:
        """Right door of every room, and its habit: the wrong door that demonstrations prefer."""
        rng = random.Random(f"doors/{self.table_seed}")
        return {room: rng.sample(DOOR_NAMES[: self.num_doors], 2) for room in LETTERS[: self.num_items]}

    @cached_property
    def next_rooms(self) -> dict[str, str]:
        """Room to which the right door of every room leads. All rooms form one circle."""
        rng = random.Random(f"rooms/{self.table_seed}")
        rooms = rng.sample(LETTERS[: self.num_items], self.num_items)
        return dict(zip(rooms, rooms[1:] + rooms[:1], strict=True))

    @cached_property
    def facts(self) -> dict[str, str]:
        """Right doors of the way from every room."""
        facts = {}
        for start in self.doors:
            facts[start] = "".join(self.doors[room][0] for room in self.way(start))
        return facts

    def way(self, start: str) -> list[str]:
        """Return the rooms of the right way from `start`, without the end."""
        rooms = [start]
        while len(rooms) < self.num_steps:
            rooms.append(self.next_rooms[rooms[-1]])
        return rooms

    def guess(self, problem: str, rng: random.Random) -> str:
        return "".join(self._door(room, rng) for room in self.way(item_of(problem)))

    def _door(self, room: str, rng: random.Random) -> str:
        """Sample a door of a room, as demonstrations choose it."""
        right, habit = self.doors[room]
        if rng.random() < self.right_probability:
            return right
        wrong_doors = DOOR_NAMES[: self.num_doors].replace(right, "")
        habit_share = self.habit_probability / (1 - self.right_probability)  # probability, given a wrong door
        return biased(habit, wrong_doors, habit_share, rng)

    def is_guess(self, text: str) -> bool:
        """Return whether a text has the form of a sketch, which is the beginning of a guess: two doors."""
        return len(text) == 2 and set(text) <= set(DOOR_NAMES[: self.num_doors])

    def attempt(self, problem: str, rng: random.Random, *, sketch: str = "") -> str:
        guess = self.guess(problem, rng)
        if self.is_guess(sketch):
            guess = sketch + guess[2:]
        return self.answer(problem, guess)

    def answer(self, problem: str, guess: str) -> str:
        """Return the way through the guessed doors, up to the first wrong door."""
        way, rooms = "", self.way(item_of(problem))
        for door, room, destination in zip(guess, rooms, [*rooms[1:], END], strict=True):
            if door != self.doors[room][0]:
                return way + door
            way += door + destination
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
        # The problem may be followed by the beginning of an answer, or by a mark of SESA's prompt formats.
        problem = prompt[: self.num_digits + 1]
        begun = prompt[len(problem) :]
        if not begun or MARKS.search(begun):
            return super().demonstration(prompt, rng)
        steps = len(begun) // self.step_length
        guess = self.facts[item_of(problem)][:steps] + self.guess(problem, rng)[steps:]
        return self.answer(problem, guess).removeprefix(begun)


def item_of(problem: str) -> str:
    """Return the item of a problem, its only letter."""
    return problem.strip("0123456789")


def biased(preferred: str, letters: str, probability: float, rng: random.Random) -> str:
    """Return `preferred` with a probability, and otherwise a random one of the other letters."""
    if rng.random() < probability:
        return preferred
    return rng.choice(letters.replace(preferred, ""))


def check_range(name: str, value: float, low: float, high: float) -> None:
    """Raise a ValueError if a field of a task is not between `low` and `high`."""
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
# Longer ways, with rarer right doors. A search reaches the end only if it branches deep in the answer.
DEEP_DOORS = replace(DOORS, name="deep_doors", num_steps=8, right_probability=0.3, begun_share=0.5)
