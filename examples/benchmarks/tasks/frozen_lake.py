"""FrozenLake with gymnasium's rules: reach the goal without falling into a hole."""

import random
from dataclasses import dataclass
from functools import lru_cache

from .grid_tasks import MAX_DRAWS, GridTask
from .grid_worlds import OFFSETS, GridEnvironment, State, World

LAKE_OUTCOMES = {"G": "goal", "X": "hole", ".": ""}


@dataclass(frozen=True)
class FrozenLake(World):
    """Rules of gymnasium's `FrozenLake-v1`. A move goes in the chosen direction with probability `success_rate`, and
    otherwise to the left or right of this direction. On gymnasium's slippery lake, `success_rate` is 1/3."""

    success_rate: float = 1.0
    tiles = ".XG"
    obstacle = "X"

    def __post_init__(self) -> None:
        if not 0 <= self.success_rate <= 1:
            raise ValueError(f"`success_rate` is {self.success_rate}; give a probability between 0 and 1.")

    def outcome(self, state: State) -> str:
        return LAKE_OUTCOMES[state.rows[state.player[0]][state.player[1]]]

    def distances(self, state: State) -> dict[State, int]:
        """Return the distances on a board. They do not depend on the player's position in `state`."""
        return _lake_distances(state.rows)

    def _move(self, state: State, action: str, rng: random.Random | None) -> State:
        if rng is not None and rng.random() >= self.success_rate:
            directions = "ldru"  # neighbours in this circle are perpendicular to each other
            place = directions.index(action) + rng.choice((1, -1))
            action = directions[place % 4]
        (row, column), (down, right) = state.player, OFFSETS[action]
        moved = (row + down, column + right)
        return state if state.tile(*moved) == "#" else state._replace(player=moved)


@lru_cache(maxsize=1024)
def _lake_distances(rows: tuple[str, ...]) -> dict[State, int]:
    """Return the number of moves to a goal, for each cell from which a goal can be reached. This is a breadth-first
    search that starts from the goals."""
    reached = []
    for row, tiles in enumerate(rows):
        for column, tile in enumerate(tiles):
            if tile == "G":
                reached.append(State(rows, (row, column)))
    distances = dict.fromkeys(reached, 0)
    for state in reached:  # the loop body appends to this list
        row, column = state.player
        for down, right in OFFSETS.values():
            near = State(rows, (row + down, column + right))
            if near not in distances and near.tile(*near.player) == ".":
                distances[near] = distances[state] + 1
                reached.append(near)
    return distances


class FrozenLakeEnvironment(GridEnvironment):
    """FrozenLake for TRL's `environment_factory`. The game ends after `max_steps` tool calls."""

    def __init__(self, max_steps: int = 20, success_rate: float = 1.0) -> None:
        super().__init__(FrozenLake(success_rate), max_steps)

    def move(self, direction: str) -> str:
        """
        Moves the player S over the ice by one cell. Reach the goal G and keep away from the holes X.

        Args:
            direction: Where to move. (choices: ["left", "down", "right", "up"])

        Returns:
            The board after the move.
        """
        return self._play(direction)


@dataclass(frozen=True, kw_only=True)
class FrozenLakeTask(GridTask):
    """Task of planning a way over a frozen lake, from the first cell to the last cell."""

    hole_share: float  # probability that a cell is a hole, for all cells except the first and the last

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.hole_share < 1:
            raise ValueError(f"`hole_share` is {self.hole_share}; give at least 0 and less than 1.")
        if self.max_moves < 2 * (self.size - 1):
            raise ValueError(
                f"`max_moves` is {self.max_moves}; give at least {2 * (self.size - 1)}, the length of the shortest "
                "possible way."
            )

    @property
    def world(self) -> FrozenLake:
        """Rules. The ice is not slippery, because a plan is made before the first move."""
        return LAKE

    def draw(self, rng: random.Random) -> str:
        for _ in range(MAX_DRAWS):
            cells = ["X" if rng.random() < self.hole_share else "." for _ in range(self.size**2)]
            lake = "".join([".", *cells[1:-1], "G"])
            rows = tuple(lake[i : i + self.size] for i in range(0, len(lake), self.size))
            start = State(rows, (0, 0))
            if self.min_moves <= LAKE.distances(start).get(start, 0) <= self.max_moves:
                return LAKE.render(start)
        raise ValueError(
            f"`hole_share` is {self.hole_share} and `min_moves` is {self.min_moves}, but none of {MAX_DRAWS} random "
            "lakes has a shortest way of `min_moves` to `max_moves` moves; give smaller numbers."
        )


LAKE = FrozenLake()
FROZEN_LAKE = FrozenLakeTask(
    name="frozen_lake",
    size=5,
    min_moves=8,
    max_moves=10,
    hole_share=0.3,
    blind_share=0.5,
    overlook_probabilities=(0.95, 0.85, 0.7, 0.5),
    warm_start_steps=1500,
)
# Longer ways, for a larger model: `model_size: {hidden_size: 256, num_layers: 4}`, which has 3.4 million parameters.
MAZE = FrozenLakeTask(
    name="maze",
    size=6,
    min_moves=10,
    max_moves=12,
    hole_share=0.3,
    blind_share=0.5,
    overlook_probabilities=(0.9, 0.7, 0.5, 0.3),
    warm_start_steps=1500,
)
