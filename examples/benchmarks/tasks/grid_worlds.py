"""Grid worlds. A *world* has the rules and no state. In an *environment*, an agent moves with tool calls.

A board is a text with the rows joined by `/`: `S..X/.X../...G`. `S` is the player, `G` a goal, `.` a free cell and `X`
a hole. `+` is the player on a goal, and `x` the player in a hole. A plan is a string of the moves `l`, `d`, `r`, `u`.
"""

import random
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from trl_explore.agents.snapshots import not_a_tool

ACTIONS = {"l": "left", "d": "down", "r": "right", "u": "up"}  # in the order of gymnasium's 0, 1, 2, 3
OFFSETS = {"l": (0, -1), "d": (1, 0), "r": (0, 1), "u": (-1, 0)}
OVERLAYS = {".": "S", "G": "+", "X": "x"}  # character for each tile with the player on it
UNDERLAYS = {overlay: tile for tile, overlay in OVERLAYS.items()}


class State(NamedTuple):
    """State of a game."""

    rows: tuple[str, ...]  # tiles, without the player
    player: tuple[int, int]  # row and column

    def tile(self, row: int, column: int) -> str:
        """Return the tile of a cell. Cells beyond the edge are walls, `#`."""
        inside = 0 <= row < len(self.rows) and 0 <= column < len(self.rows[0])
        return self.rows[row][column] if inside else "#"

    def with_tile(self, row: int, column: int, tile: str) -> "State":
        """Return a copy of the state in which a cell has another tile."""
        changed = self.rows[row][:column] + tile + self.rows[row][column + 1 :]
        return self._replace(rows=(*self.rows[:row], changed, *self.rows[row + 1 :]))


class World(ABC):
    """The rules of a grid world: pure functions of a [`State`]."""

    tiles: str  # characters of the possible tiles
    obstacle: str  # tile that demonstrations overlook in their blind spots

    def parse(self, board: str) -> State:
        """Return the state that a board shows."""
        players = []
        plain_rows = []  # without the player
        for row, characters in enumerate(board.split("/")):
            plain_row = ""
            for column, character in enumerate(characters):
                if character in UNDERLAYS:
                    players.append((row, column))
                plain_row += UNDERLAYS.get(character, character)
            plain_rows.append(plain_row)
        lengths = {len(row) for row in plain_rows}
        if len(players) != 1 or len(lengths) > 1 or not set("".join(plain_rows)) <= set(self.tiles):
            raise ValueError(
                f"`board` is {board!r}; give rows of equal length with tiles out of {self.tiles!r} and one player S."
            )
        return State(tuple(plain_rows), players[0])

    def render(self, state: State) -> str:
        """Return the board that shows a state."""
        player_tile = OVERLAYS[state.tile(*state.player)]
        return "/".join(state.with_tile(*state.player, player_tile).rows)

    def step(self, state: State, action: str, rng: random.Random | None = None) -> tuple[State, float, bool]:
        """
        Make a move.

        Args:
            state ([`State`]):
                The state before the move.
            action (`str`):
                The move, a key of `ACTIONS`.
            rng (`random.Random`, *optional*):
                Source of random events of the world. None: there are no random events.

        Returns:
            `tuple`: The state after the move; the reward, which is 1 if the move reaches the goal and otherwise 0; and
            whether the game is over. After the end of a game, moves change nothing and have a reward of 0.
        """
        if self.outcome(state):
            return state, 0.0, True
        state = self._move(state, action, rng)
        outcome = self.outcome(state)
        return state, float(outcome == "goal"), outcome != ""

    def legal_actions(self, state: State) -> list[str]:
        """Return the moves that change the state. After the end of a game, there are none."""
        return [action for action in ACTIONS if self.step(state, action)[0] != state]

    def solve(self, state: State, rng: random.Random | None = None) -> str | None:
        """Return the moves of a shortest plan, or None if there is no way to the goal. `rng` chooses between several
        shortest plans. If it is None, the first move in the order of `ACTIONS` is chosen."""
        distances, plan = self.distances(state), ""
        while distances.get(state):
            nearer = {}  # state after each move that leads nearer to the goal
            for action in ACTIONS:
                after = self.step(state, action)[0]
                if distances.get(after) == distances[state] - 1:
                    nearer[action] = after
            actions = list(nearer)
            action = rng.choice(actions) if rng else actions[0]
            plan += action
            state = nearer[action]
        return plan if state in distances else None

    @abstractmethod
    def outcome(self, state: State) -> str:
        """Return the end of the game: `"goal"`, or the name of another end. Return `""` if the game is not over."""

    @abstractmethod
    def distances(self, state: State) -> dict[State, int]:
        """Return the smallest number of moves to the goal, for each state of this board from which the goal can be
        reached."""

    @abstractmethod
    def _move(self, state: State, action: str, rng: random.Random | None) -> State:
        """Return the state after a move. The game is not over before the move."""


class Episode(NamedTuple):
    """State of an environment."""

    state: State
    steps: int  # number of tool calls so far
    seed: int  # of random events


class GridEnvironment:
    """
    Environment of a world for TRL's `environment_factory`. A subclass adds the tool.

    Args:
        world ([`World`]):
            The rules.
        max_steps (`int`):
            Number of tool calls after which the game is over. Calls that move nothing count, too.
    """

    episode: Episode

    def __init__(self, world: World, max_steps: int) -> None:
        if max_steps < 1:
            raise ValueError(f"`max_steps` is {max_steps}; give at least 1.")
        self.world = world
        self.max_steps = max_steps

    def reset(self, board: str, prompt: Any = "", seed: int = 0, **columns: Any) -> str | None:
        """Start a game. Return the board, which TRL appends to the prompt, or None if the prompt already shows it."""
        self.episode = Episode(self.world.parse(board), 0, seed)
        shown = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        return None if board in shown else board

    def get_reward(self) -> float:
        """Return 1 if the player has reached the goal, otherwise 0. TRL calls this at the end of the game."""
        return float(self.world.outcome(self.episode.state) == "goal")

    @not_a_tool
    def snapshot(self) -> Episode:
        """Return the state of the game. It is immutable, so several environments can continue from it."""
        return self.episode

    @not_a_tool
    def restore(self, episode: Episode) -> None:
        """Continue from a snapshot of this environment, or of another environment with the same rules."""
        self.episode = episode

    @property
    def done(self) -> bool:
        """True if the game is won or lost, or if `max_steps` tool calls were made."""
        return self.world.outcome(self.episode.state) != "" or self.episode.steps >= self.max_steps

    def _play(self, direction: str) -> str:
        """Move the player if the game is not over. Return the board and a note, for the model."""
        state, steps, seed = self.episode
        if self.done:
            return f"{self.world.render(state)} the game is over"
        # A model may write anything as direction. An unknown direction moves nothing, but counts as a step.
        word = str(direction).strip().lower()
        action = next((short for short, long in ACTIONS.items() if word in (short, long)), "")
        moved = state
        if action:
            moved = self.world.step(state, action, random.Random(f"{seed}/{steps}"))[0]
        self.episode = Episode(moved, steps + 1, seed)
        note = self.world.outcome(moved)
        if not action:
            note = "no such move, there are " + " ".join(ACTIONS.values())
        elif moved == state:
            note = "blocked"
        return f"{self.world.render(moved)} {note}".rstrip()
