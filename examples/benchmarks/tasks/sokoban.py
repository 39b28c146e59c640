"""Sokoban: push every box onto a goal. Boards come from a search backwards from the goals, so all can be solved.

The format of boards is described in grid_worlds.py. Additional tiles are `#` for a wall, `o` for a box and `*` for a
box on a goal. Cells beyond the edge are walls.
"""

import functools
import random
from collections.abc import Iterator
from dataclasses import dataclass

from .grid_tasks import MAX_DRAWS, GridTask
from .grid_worlds import OFFSETS, GridEnvironment, State, World

LIFTED = {"o": ".", "*": "G"}  # tile that remains if a box is moved away
PUSHED = {tile: box for box, tile in LIFTED.items()}  # tile that results if a box is moved there


@dataclass(frozen=True)
class Sokoban(World):
    """Rules of Sokoban. The player pushes a box by moving into it, unless a wall or another box is behind the box."""

    tiles = ".G#o*"
    obstacle = "#"

    def outcome(self, state: State) -> str:
        """Return `"goal"` if every box is on a goal, otherwise `""`. The game continues even if it cannot be won, for
        example after a box was pushed into a corner."""
        return "" if any("o" in row for row in state.rows) else "goal"

    def distances(self, state: State) -> dict[State, int]:
        """
        Return the smallest number of moves to the end, for each state of the room from which the end can be reached.

        The room has the walls, the goals and the number of boxes of `state`. The positions of player and boxes in
        `state` do not matter.

        Raises:
            ValueError: If the numbers of boxes and goals differ.
        """
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
    """Return the number of moves to the end, for each state from which the end can be reached. This is a breadth-first
    search backwards from all end states. `room` has walls and goals, but no boxes."""
    end = State(tuple(row.replace("G", "*") for row in room), (0, 0))
    reached = []
    for row, tiles in enumerate(end.rows):
        for column, tile in enumerate(tiles):
            if tile in PUSHED:  # the player can be there
                reached.append(end._replace(player=(row, column)))
    distances = dict.fromkeys(reached, 0)
    for state in reached:  # the loop body appends to this list
        for before in _one_move_before(state):
            # An end state can also precede another end state. But the game is over there, so its distance remains 0.
            if before not in distances:
                distances[before] = distances[state] + 1
                reached.append(before)
    return distances


def _one_move_before(state: State) -> Iterator[State]:
    """Yield the states from which one move leads to `state`: the player moves backwards, and may pull a box."""
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
    """Sokoban for TRL's `environment_factory`. The game ends after `max_steps` tool calls."""

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
    """Task of planning in Sokoban rooms."""

    num_boxes: int  # number of boxes, and of goals
    num_walls: int  # number of walls inside a room
    num_rooms: int = 2000  # number of different rooms, each with hundreds of boards; a search per room is cached

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_boxes < 1 or self.num_walls < 0 or 2 * self.num_boxes + self.num_walls >= self.size**2:
            raise ValueError(
                f"`num_boxes` is {self.num_boxes} and `num_walls` {self.num_walls}; give at least 1 and at least 0. "
                f"Boxes, goals, walls and the player must fit into {self.size**2} cells."
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
        raise ValueError(
            f"`min_moves` is {self.min_moves}, but none of {MAX_DRAWS} random rooms has a board that takes "
            "`min_moves` to `max_moves` moves; give a smaller `min_moves`."
        )


@functools.lru_cache(maxsize=4096)
def _positions(room: tuple[str, ...], min_moves: int, max_moves: int) -> tuple[State, ...]:
    """Return the states of a room from which the end takes `min_moves` to `max_moves` moves."""
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
