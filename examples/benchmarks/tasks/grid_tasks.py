"""Tasks of planning in grid worlds: an answer is the whole way to the goal.

The demonstrations have *blind spots*: cells in which an obstacle is often overlooked. So a model that is trained on
demonstrations fails at known cells.
"""

import itertools
import random
from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property, lru_cache

from trl_explore.tasks.sketched import SketchedTask

from .grid_worlds import ACTIONS, State, World

FEW_IDEAS = 4  # number of beginnings among which a demonstration chooses a sketch, if the board has enough
MAX_DRAWS = 10_000  # random boards after which a task reports that no board fits its settings


@dataclass(frozen=True, kw_only=True)
class GridTask(SketchedTask):
    """Task of planning on boards of a world. A problem is a board. A sketch is the beginning of a plan, for example
    `ldr`."""

    name: str
    size: int  # number of rows, and of columns
    min_moves: int  # smallest number of moves of a shortest plan
    max_moves: int  # largest number of moves of a shortest plan, and of an answer
    blind_share: float  # share of the cells that are blind spots
    overlook_probabilities: tuple[float, ...]  # the blind spots take these probabilities one after the other
    warm_start_steps: int  # supervised steps until a tiny model has converged
    sketch_moves: int = 4  # number of moves of a sketch
    num_candidates: int = 8  # number of answers in a list, and maximum number of sketches per problem
    format_weights: tuple[float, float, float, float] = (0.5, 0.2, 0.3, 0.0)
    table_seed: int = 1234  # seed of the blind spots

    mode = "two_stage"

    def __post_init__(self) -> None:
        if not 3 <= self.size <= 9:
            raise ValueError(f"`size` is {self.size}; give 3 to 9 rows and columns.")
        if not 1 <= self.sketch_moves <= self.min_moves <= self.max_moves:
            raise ValueError(
                f"`sketch_moves` is {self.sketch_moves}, `min_moves` {self.min_moves} and `max_moves` "
                f"{self.max_moves}; give numbers of at least 1 in ascending order."
            )
        if not self.overlook_probabilities:
            raise ValueError(
                "`overlook_probabilities` is empty; give at least one probability. With `blind_share=0`, there are no "
                "blind spots."
            )
        if not all(0 <= share <= 1 for share in (self.blind_share, *self.overlook_probabilities)):
            raise ValueError(
                f"`blind_share` is {self.blind_share} and `overlook_probabilities` is {self.overlook_probabilities}; "
                "give numbers between 0 and 1."
            )

    @property
    @abstractmethod
    def world(self) -> World:
        """Rules of the boards."""

    @property
    def max_completion_length(self) -> int:
        return self.max_moves + 1

    @property
    def max_sketch_length(self) -> int:
        return self.sketch_moves + 1

    def sketch(self, problem: str, rng: random.Random) -> str:
        state = self.overlook(self.world.parse(problem), rng)
        return rng.choice(_beginnings(self.world, state, self.sketch_moves, self.max_moves))

    def attempt(self, problem: str, rng: random.Random, *, sketch: str = "") -> str:
        """Sample a shortest plan for the board without the overlooked obstacles. It begins with `sketch` if a plan
        with this beginning has at most `max_moves` moves."""
        state = self.overlook(self.world.parse(problem), rng)
        if not set(sketch) <= set(ACTIONS):
            sketch = ""
        after_sketch = state
        for action in sketch:
            after_sketch = self.world.step(after_sketch, action)[0]
        rest = self.world.solve(after_sketch, rng)
        if rest is None or len(sketch + rest) > self.max_moves:
            return self.world.solve(state, rng) or ""
        return sketch + rest

    def verify(self, problem: str, completion: str) -> bool:
        """Return whether a plan has only moves, and reaches the goal with its last move."""
        state, reward, done = self.world.parse(problem), 0.0, False
        if len(completion) > self.max_moves:
            return False
        for action in completion:
            if done or action not in ACTIONS:
                return False
            state, reward, done = self.world.step(state, action)
        return reward == 1.0

    @cached_property
    def blind_spots(self) -> dict[tuple[int, int], float]:
        """Cells in which demonstrations overlook an obstacle, and the probability of overlooking it."""
        rng = random.Random(f"blind spots/{self.table_seed}")
        cells = [(row, column) for row in range(self.size) for column in range(self.size)]
        chosen = rng.sample(cells, round(self.blind_share * len(cells)))
        return dict(zip(chosen, itertools.cycle(self.overlook_probabilities), strict=False))

    def overlook(self, state: State, rng: random.Random) -> State:
        """Remove the obstacles that a demonstration overlooks from a board."""
        for cell, probability in self.blind_spots.items():
            if state.tile(*cell) == self.world.obstacle and rng.random() < probability:
                state = state.with_tile(*cell, ".")
        return state


# The cache saves time, because several sketches of the same board are sampled.
@lru_cache(maxsize=4096)
def _beginnings(world: World, state: State, length: int, max_moves: int) -> tuple[str, ...]:
    """
    Return beginnings of plans, among which a demonstration chooses a sketch.

    They are the beginnings of the shortest plans. If there are fewer than `FEW_IDEAS`, they are also the beginnings of
    the next longer plans.

    Args:
        world ([`~grid_worlds.World`]):
            The rules.
        state ([`~grid_worlds.State`]):
            The board.
        length (`int`):
            Number of moves of a beginning.
        max_moves (`int`):
            Largest number of moves of a plan.
    """
    distances = world.distances(state)
    beginnings = {"": state}  # state after each beginning
    for _ in range(length):
        longer = {}
        for plan, before in beginnings.items():
            for action in ACTIONS:
                after = world.step(before, action)[0]
                if after not in (before, state) and after in distances:
                    longer[plan + action] = after
        beginnings = longer
    plan_lengths = {plan: length + distances[after] for plan, after in beginnings.items()}
    in_time = sorted(number for number in plan_lengths.values() if number <= max_moves)
    longest = max(in_time[:FEW_IDEAS], default=0)
    chosen = tuple(plan for plan, number in plan_lengths.items() if number <= longest)
    if chosen:
        return chosen
    # Without the overlooked obstacles, the shortest plan can have fewer moves than a sketch. Then it is the sketch.
    shortest = world.solve(state) or ""
    return (shortest[:length],)
