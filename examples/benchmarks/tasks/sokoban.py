"""Sokoban: push every box onto a goal. Rooms come from playing backwards, so every one can be solved.

Boards as in grid_worlds.py, with `#` for a wall (also beyond the edge), `o` for a box and `*` for a box on a goal.
"""

import functools
import random
from collections.abc import Iterator
from dataclasses import dataclass

from .grid_tasks import MAX_DRAWS, GridTask
from .grid_worlds import OFFSETS, GridEnvironment, State, World

LIFTED = {"o": ".", "*": "G"}  # the tile under a box
PUSHED = {tile: box for box, tile in LIFTED.items()}


@dataclass(frozen=True)
class Sokoban(World):
    """Whoever walks into a box pushes it, unless a wall or another box is behind it."""

    tiles = ".G#o*"
    obstacle = "#"

    def outcome(self, state: State) -> str:
        """`goal` once every box is on a goal. A box in a corner is not noticed: the game goes on without hope."""
        return "" if any("o" in row for row in state.rows) else "goal"

    def distances(self, state: State) -> dict[State, int]:
        """Played backwards from all ends, the same for all positions of the boxes; as many boxes as `state` has."""
        text = "/".join(state.rows)
        room = tuple("".join(LIFTED.get(tile, tile) for tile in row) for row in state.rows)
        if text.count("o") + text.count("*") != "".join(room).count("G"):
            raise ValueError(f"`state` is {self.render(state)!r}; give as many boxes as goals.")
        return _room_distances(room)

    def _move(self, state: State, action: str, rng: random.Random | None) -> State:
        (row, column), (down, right) = state.player, OFFSETS[action]
        near, far = (row + down, column + right), (row + 2 * down, column + 2 * right)
        tile, behind = state.tile(*near), state.tile(*far)
        if tile in LIFTED and behind in PUSHED:
            state = state.with_tile(*near, LIFTED[tile]).with_tile(*far, PUSHED[behind])
        elif tile not in PUSHED:
            return state
        return state._replace(player=near)


@functools.lru_cache(maxsize=512)
def _room_distances(room: tuple[str, ...]) -> dict[State, int]:
    """Breadth-first search backwards; `room` is without boxes."""
    cells = [(r, c) for r, row in enumerate(room) for c, tile in enumerate(row) if tile != "#"]
    end = State(tuple(row.replace("G", "*") for row in room), (0, 0))
    reached = [end._replace(player=cell) for cell in cells if end.tile(*cell) in PUSHED]
    distances = dict.fromkeys(reached, 0)
    for state in reached:  # grows while it is read
        for before in _one_move_before(state):
            # From an end nothing moves on: ends have distance 0, not 2.
            if before not in distances:
                distances[before] = distances[state] + 1
                reached.append(before)
    return distances


def _one_move_before(state: State) -> Iterator[State]:
    """Positions from which one move leads to `state`: the player steps back, and may pull a box along."""
    row, column = state.player
    for down, right in OFFSETS.values():
        back, ahead = (row - down, column - right), (row + down, column + right)
        if state.tile(*back) not in PUSHED:
            continue
        yield state._replace(player=back)
        if state.tile(*ahead) in LIFTED:
            pulled = state.with_tile(*ahead, LIFTED[state.tile(*ahead)])
            yield pulled.with_tile(row, column, PUSHED[pulled.tile(row, column)])._replace(player=back)


class SokobanEnvironment(GridEnvironment):
    """Sokoban for TRL's `environment_factory`; over after `max_steps` tool calls."""

    def __init__(self, max_steps: int = 20) -> None:
        super().__init__(Sokoban(), max_steps)

    def move(self, direction: str) -> str:
        """
        Moves the player S by one cell and pushes the box o that is there. Push every box onto a goal G.

        Args:
            direction: Where to move. (choices: ["left", "down", "right", "up"])

        Returns:
            The board after the move.
        """
        return self._play(direction)


@dataclass(frozen=True, kw_only=True)
class SokobanTask(GridTask):
    """Plans for Sokoban rooms."""

    num_boxes: int  # and goals
    num_walls: int  # inside a room
    num_rooms: int = 2000  # each has hundreds of positions; played backwards once, a room is remembered

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_boxes < 1 or self.num_walls < 0 or 2 * self.num_boxes + self.num_walls >= self.size**2:
            raise ValueError(
                f"`num_boxes` is {self.num_boxes} and `num_walls` {self.num_walls}; give at least one box, and leave "
                f"room for boxes, goals and the player on {self.size**2} cells."
            )

    @property
    def world(self) -> Sokoban:
        return RULES

    def draw(self, rng: random.Random) -> str:
        for _ in range(MAX_DRAWS):
            room_rng = random.Random(f"room/{self.table_seed}/{rng.randrange(self.num_rooms)}")
            inside = ["#"] * self.num_walls + ["G"] * self.num_boxes
            inside += ["."] * (self.size**2 - len(inside))
            room_rng.shuffle(inside)
            text = "".join(inside)
            room = tuple(text[i : i + self.size] for i in range(0, len(text), self.size))
            positions = _positions(room, self.min_moves, self.max_moves)
            if positions:
                return RULES.render(rng.choice(positions))
        raise ValueError(f"`min_moves` is {self.min_moves}; rooms of this kind are solved faster, give fewer.")


@functools.lru_cache(maxsize=4096)
def _positions(room: tuple[str, ...], min_moves: int, max_moves: int) -> tuple[State, ...]:
    return tuple(state for state, moves in _room_distances(room).items() if min_moves <= moves <= max_moves)


RULES = Sokoban()
SOKOBAN = SokobanTask(
    name="sokoban",
    size=4,
    min_moves=4,
    max_moves=8,
    num_boxes=1,
    num_walls=3,
    blind_share=0.5,
    overlook_probabilities=(0.95, 0.85, 0.7, 0.5),
    sketch_moves=2,
    warm_start_steps=2000,
)
