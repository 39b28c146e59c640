"""FrozenLake by gymnasium's rules: reach the goal without falling into a hole."""

import random
from dataclasses import dataclass
from functools import lru_cache

from .grid_tasks import MAX_DRAWS, GridTask
from .grid_worlds import OFFSETS, GridEnvironment, State, World

LAKE_OUTCOMES = {"G": "goal", "X": "hole", ".": ""}


@dataclass(frozen=True)
class FrozenLake(World):
    """gymnasium's `FrozenLake-v1`: reach the goal without falling into a hole."""

    success_rate: float = 1.0  # otherwise a move goes to either side; 1/3 on gymnasium's slippery lake
    tiles = ".XG"
    obstacle = "X"

    def __post_init__(self) -> None:
        if not 0 <= self.success_rate <= 1:
            raise ValueError(f"`success_rate` is {self.success_rate}; give a probability.")

    def outcome(self, state: State) -> str:
        return LAKE_OUTCOMES[state.rows[state.player[0]][state.player[1]]]

    def distances(self, state: State) -> dict[State, int]:
        """A flood from the goals, the same wherever the player is."""
        return _lake_distances(state.rows)

    def _move(self, state: State, action: str, rng: random.Random | None) -> State:
        if rng is not None and rng.random() >= self.success_rate:
            action = "ldru"[("ldru".index(action) + rng.choice((1, -1))) % 4]
        (row, column), (down, right) = state.player, OFFSETS[action]
        moved = (row + down, column + right)
        return state if state.tile(*moved) == "#" else state._replace(player=moved)


@lru_cache(maxsize=1024)
def _lake_distances(rows: tuple[str, ...]) -> dict[State, int]:
    reached = [State(rows, (r, c)) for r, row in enumerate(rows) for c in range(len(row)) if row[c] == "G"]
    distances = dict.fromkeys(reached, 0)
    for state in reached:  # grows while it is read
        for down, right in OFFSETS.values():
            near = State(rows, (state.player[0] + down, state.player[1] + right))
            if near not in distances and near.tile(*near.player) == ".":
                distances[near] = distances[state] + 1
                reached.append(near)
    return distances


class FrozenLakeEnvironment(GridEnvironment):
    """FrozenLake for TRL's `environment_factory`; over after `max_steps` tool calls."""

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
    """Plans for frozen lakes with the start in the first cell and the goal in the last."""

    hole_share: float  # probability that a cell in between is a hole

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.hole_share < 1:
            raise ValueError(f"`hole_share` is {self.hole_share}; give a share below 1.")
        if self.max_moves < 2 * (self.size - 1):
            raise ValueError(f"`max_moves` is {self.max_moves}; a way takes at least {2 * (self.size - 1)} moves.")

    @property
    def world(self) -> FrozenLake:
        """The rules; plans that are made in advance need ice that is not slippery."""
        return LAKE

    def draw(self, rng: random.Random) -> str:
        for _ in range(MAX_DRAWS):
            cells = ["X" if rng.random() < self.hole_share else "." for _ in range(self.size**2)]
            lake = "".join([".", *cells[1:-1], "G"])
            start = State(tuple(lake[i : i + self.size] for i in range(0, len(lake), self.size)), (0, 0))
            if self.min_moves <= LAKE.distances(start).get(start, 0) <= self.max_moves:
                return LAKE.render(start)
        raise ValueError(
            f"`hole_share` is {self.hole_share} and `min_moves` {self.min_moves}; hardly any lake has such a way, "
            "give smaller ones."
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
# Longer ways for a larger model, `model_size: {hidden_size: 256, num_layers: 4}` with 3.4 million parameters.
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
