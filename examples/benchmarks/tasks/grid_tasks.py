"""Plans for grid worlds: the whole way to the goal in one answer.

Demonstrators have *blind spots*, cells in which they mostly overlook an obstacle: models are wrong in known places.
"""

import random
from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property, lru_cache

from trl_explore.tasks.sketched import SketchedTask

from .grid_worlds import ACTIONS, State, World

FEW_IDEAS = 4  # sketches that a demonstrator has at least, if need be for longer plans
MAX_DRAWS = 10_000  # for one board; more means that the knobs leave none


@dataclass(frozen=True, kw_only=True)
class GridTask(SketchedTask):
    """Plans for boards of a world. A problem is a board; a sketch is how a plan begins, `ldr`."""

    name: str
    size: int  # rows and columns
    min_moves: int  # that a board needs
    max_moves: int  # that a board needs, and that an answer may have
    blind_share: float  # of cells
    overlook_probabilities: tuple[float, ...]  # dealt out evenly to those cells
    warm_start_steps: int  # supervised steps until a tiny model has converged
    sketch_moves: int = 4  # length of a sketch
    num_candidates: int = 8  # answers in a list, and the most sketches of one problem
    format_weights: tuple[float, float, float, float] = (0.5, 0.2, 0.3, 0.0)
    table_seed: int = 1234  # of the blind spots

    mode = "two_stage"

    def __post_init__(self) -> None:
        if not 3 <= self.size <= 9:
            raise ValueError(f"`size` is {self.size}; give 3 to 9 rows and columns.")
        if not 1 <= self.sketch_moves <= self.min_moves <= self.max_moves:
            raise ValueError(
                f"`sketch_moves` is {self.sketch_moves}, `min_moves` {self.min_moves} and `max_moves` "
                f"{self.max_moves}; give at least 1, in ascending order."
            )
        if not self.overlook_probabilities:
            raise ValueError("`overlook_probabilities` is empty; give at least one, and `blind_share=0` for none.")
        if not all(0 <= share <= 1 for share in (self.blind_share, *self.overlook_probabilities)):
            raise ValueError("`blind_share` and `overlook_probabilities` must be between 0 and 1.")

    @property
    @abstractmethod
    def world(self) -> World:
        """The rules."""

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
        """A shortest plan, to somebody with blind spots, from `sketch` on."""
        state = self.overlook(self.world.parse(problem), rng)
        begun, sketch = state, sketch if set(sketch) <= set(ACTIONS) else ""
        for action in sketch:
            begun = self.world.step(begun, action)[0]
        rest = self.world.solve(begun, rng)
        if rest is None or len(sketch + rest) > self.max_moves:  # a sketch that leads nowhere is not carried out
            return self.world.solve(state, rng) or ""
        return sketch + rest

    def verify(self, problem: str, completion: str) -> bool:
        """Whether a plan consists of moves only and its last one, none earlier, reaches the goal."""
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
        """Cells in which demonstrators overlook an obstacle, and how often they do."""
        rng = random.Random(f"blind spots/{self.table_seed}")
        cells = [(row, column) for row in range(self.size) for column in range(self.size)]
        chosen = rng.sample(cells, round(self.blind_share * len(cells)))
        return {c: self.overlook_probabilities[i % len(self.overlook_probabilities)] for i, c in enumerate(chosen)}

    def overlook(self, state: State, rng: random.Random) -> State:
        """The board as a demonstrator sees it: the same position with fewer obstacles."""
        for cell, probability in self.blind_spots.items():
            if state.tile(*cell) == self.world.obstacle and rng.random() < probability:
                state = state.with_tile(*cell, ".")
        return state


# Remembered because sketches of one board are drawn again and again until they differ.
@lru_cache(maxsize=4096)
def _beginnings(world: World, state: State, length: int, max_moves: int) -> tuple[str, ...]:
    """First moves of the shortest plans; where these are few, also of the next longer plans, if they end in time."""
    distances = world.distances(state)
    begun = {"": state}
    for _ in range(length):
        steps = ((plan + a, before, world.step(before, a)[0]) for plan, before in begun.items() for a in ACTIONS)
        begun = {plan: after for plan, before, after in steps if after not in (before, state) and after in distances}
    moves = {plan: length + distances[after] for plan, after in begun.items()}
    in_time = sorted(number for number in moves.values() if number <= max_moves)
    longest = max(in_time[:FEW_IDEAS], default=0)
    # With obstacles overlooked the goal may be nearer than a sketch is long: then the plan is its own sketch.
    return tuple(plan for plan in moves if moves[plan] <= longest) or ((world.solve(state) or "")[:length],)
