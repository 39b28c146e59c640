"""Grid worlds: *worlds* are rules without state, *environments* play them by tool calls, tasks ask for whole plans.

A board is text, rows joined by `/`: `S..X/.X../...G`. `S` is the player, `G` a goal, `.` free, `X` a hole; `+` is the
player on a goal, `x` the player in a hole. A plan is a string of moves out of `ldru`.
"""

import random
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from trl_explore.agents.snapshots import not_a_tool

ACTIONS = {"l": "left", "d": "down", "r": "right", "u": "up"}  # in the order of gymnasium's 0, 1, 2, 3
OFFSETS = {"l": (0, -1), "d": (1, 0), "r": (0, 1), "u": (-1, 0)}
OVERLAYS = {".": "S", "G": "+", "X": "x"}  # how a tile looks with the player on it
UNDERLAYS = {look: tile for tile, look in OVERLAYS.items()}


class State(NamedTuple):
    """Rows of tiles without the player, and the player's row and column."""

    rows: tuple[str, ...]
    player: tuple[int, int]

    def tile(self, row: int, column: int) -> str:
        """What lies in a cell; beyond the edge there is wall, `#`."""
        inside = 0 <= row < len(self.rows) and 0 <= column < len(self.rows[0])
        return self.rows[row][column] if inside else "#"

    def with_tile(self, row: int, column: int, tile: str) -> "State":
        changed = self.rows[row][:column] + tile + self.rows[row][column + 1 :]
        return self._replace(rows=(*self.rows[:row], changed, *self.rows[row + 1 :]))


class World(ABC):
    """The rules of a grid world: pure functions of a [`State`]."""

    tiles: str  # what may lie in a cell
    obstacle: str  # the tile that demonstrators overlook

    def parse(self, board: str) -> State:
        rows = board.split("/")
        players = [(r, c) for r, row in enumerate(rows) for c, look in enumerate(row) if look in UNDERLAYS]
        plain = tuple("".join(UNDERLAYS.get(look, look) for look in row) for row in rows)
        if len(players) != 1 or len({len(row) for row in rows}) > 1 or not set("".join(plain)) <= set(self.tiles):
            raise ValueError(
                f"`board` is {board!r}; give rows of equal length out of {self.tiles!r} and one player S."
            )
        return State(plain, players[0])

    def render(self, state: State) -> str:
        return "/".join(state.with_tile(*state.player, OVERLAYS[state.tile(*state.player)]).rows)

    def step(self, state: State, action: str, rng: random.Random | None = None) -> tuple[State, float, bool]:
        """Position, reward (1 at the goal) and whether all is over after a move; `rng` is the world's chance."""
        if self.outcome(state):
            return state, 0.0, True
        state = self._move(state, action, rng)
        outcome = self.outcome(state)
        return state, float(outcome == "goal"), outcome != ""

    def legal_actions(self, state: State) -> list[str]:
        """The moves that change something; none once the game is over."""
        return [action for action in ACTIONS if self.step(state, action)[0] != state]

    def solve(self, state: State, rng: random.Random | None = None) -> str | None:
        """Moves of a shortest plan, `None` if there is no way."""
        distances, plan = self.distances(state), ""
        while distances.get(state):
            after = {action: self.step(state, action)[0] for action in ACTIONS}
            good = [action for action in ACTIONS if distances.get(after[action]) == distances[state] - 1]
            plan += rng.choice(good) if rng else good[0]
            state = after[plan[-1]]
        return plan if state in distances else None

    @abstractmethod
    def outcome(self, state: State) -> str:
        """How the game has ended, `goal` or otherwise; empty while it goes on."""

    @abstractmethod
    def distances(self, state: State) -> dict[State, int]:
        """Moves to the goal from every position from which it can be reached, on the board of `state`."""

    @abstractmethod
    def _move(self, state: State, action: str, rng: random.Random | None) -> State:
        """The position after one move of a game that goes on."""


class Episode(NamedTuple):
    """All that changes while an environment is played."""

    state: State
    steps: int
    seed: int


class GridEnvironment:
    """A world for `environment_factory`; a subclass adds the tool. It ends after `max_steps` calls, moved or not."""

    episode: Episode

    def __init__(self, world: World, max_steps: int) -> None:
        if max_steps < 1:
            raise ValueError(f"`max_steps` is {max_steps}; give at least 1.")
        self.world = world
        self.max_steps = max_steps

    def reset(self, board: str, prompt: Any = "", seed: int = 0, **columns: Any) -> str | None:
        """Starts a game; what is returned, the board unless the prompt shows it, is appended to the prompt."""
        self.episode = Episode(self.world.parse(board), 0, seed)
        shown = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        return None if board in shown else board

    def get_reward(self) -> float:
        """What the game is worth so far; TRL asks at its end."""
        return float(self.world.outcome(self.episode.state) == "goal")

    @not_a_tool
    def snapshot(self) -> Episode:
        """All there is to know about the game; immutable, so any number of environments may go on from it."""
        return self.episode

    @not_a_tool
    def restore(self, episode: Episode) -> None:
        """Goes on from a snapshot, also from that of another environment with the same rules."""
        self.episode = episode

    @property
    def done(self) -> bool:
        """Whether the game is over: won, lost, or out of moves."""
        return self.world.outcome(self.episode.state) != "" or self.episode.steps >= self.max_steps

    def _play(self, direction: str) -> str:
        state, steps, seed = self.episode
        if self.done:
            return f"{self.world.render(state)} the game is over"
        # Models write what they like; whatever it is, it is answered and costs a step.
        word = str(direction).strip().lower()
        action = next((short for short, long in ACTIONS.items() if word in (short, long)), "")
        moved = self.world.step(state, action, random.Random(f"{seed}/{steps}"))[0] if action else state
        self.episode = Episode(moved, steps + 1, seed)
        note = self.world.outcome(moved)
        if not action:
            note = "no such move, there are " + " ".join(ACTIONS.values())
        elif moved == state:
            note = "blocked"
        return f"{self.world.render(moved)} {note}".rstrip()
