"""FrozenLake by gymnasium's rules, and what it shares with Sokoban: states, worlds, environments, single-turn tasks.

A board is text, rows joined by `/`: `S..X/.X../...G`. `S` is the player, `G` a goal, `.` free, `X` a hole; `+` is the
player on a goal, `x` the player in a hole. A plan is a string of moves out of `ldru`.

A *world* is rules without state. An *environment* plays a world through TRL's `environment_factory`, one tool call per
move. A *task* asks for the whole plan in one answer. Its demonstrators have *blind spots*: cells in which they mostly
overlook an obstacle. A model trained on their plans is wrong in known places, and still right now and then.
"""

import functools
import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from datasets import Dataset

ACTIONS = {"l": "left", "d": "down", "r": "right", "u": "up"}  # in the order of gymnasium's 0, 1, 2, 3
OFFSETS = {"l": (0, -1), "d": (1, 0), "r": (0, 1), "u": (-1, 0)}
OVERLAYS = {".": "S", "G": "+", "X": "x"}  # how a tile looks with the player on it
UNDERLAYS = {look: tile for tile, look in OVERLAYS.items()}
# One board in 16 is held out, by a hash of its text: disjoint from every training set whatever the seeds and sizes.
HELD_OUT_ONE_IN = 16
FEW_IDEAS = 4  # sketches that a demonstrator has at least, if need be for longer plans
MAX_DRAWS = 10_000  # for one board; more means that the knobs leave none


class State(NamedTuple):
    """A position in a world: rows of tiles without the player, and the player's row and column."""

    rows: tuple[str, ...]
    player: tuple[int, int]

    def tile(self, row: int, column: int) -> str:
        """What lies in a cell; beyond the edge there is wall, `#`."""
        inside = 0 <= row < len(self.rows) and 0 <= column < len(self.rows[0])
        return self.rows[row][column] if inside else "#"

    def with_tile(self, row: int, column: int, tile: str) -> "State":
        """The same position with another tile in one cell."""
        changed = self.rows[row][:column] + tile + self.rows[row][column + 1 :]
        return self._replace(rows=(*self.rows[:row], changed, *self.rows[row + 1 :]))


class World(ABC):
    """The rules of a grid world: pure functions of a [`State`]."""

    tiles: str  # what may lie in a cell
    obstacle: str  # the tile that demonstrators overlook

    def parse(self, board: str) -> State:
        """Reads a board; the inverse of `render`."""
        rows = board.split("/")
        players = [(r, c) for r, row in enumerate(rows) for c, look in enumerate(row) if look in UNDERLAYS]
        plain = tuple("".join(UNDERLAYS.get(look, look) for look in row) for row in rows)
        if len(players) != 1 or len({len(row) for row in rows}) > 1 or not set("".join(plain)) <= set(self.tiles):
            raise ValueError(
                f"`board` is {board!r}; give rows of equal length out of {self.tiles!r} and one player S."
            )
        return State(plain, players[0])

    def render(self, state: State) -> str:
        """The board as text."""
        return "/".join(state.with_tile(*state.player, OVERLAYS[state.tile(*state.player)]).rows)

    def step(self, state: State, action: str, rng: random.Random | None = None) -> tuple[State, float, bool]:
        """
        Takes one move. A finished game stays as it is; whoever moves against a wall stays where they are.

        Args:
            state ([`State`]):
                Position.
            action (`str`):
                One of `ACTIONS`.
            rng (`random.Random`, *optional*):
                Source of chance, where the world has any. Without it every move does what it says.

        Returns:
            `tuple[State, float, bool]`: New position, reward (1 for reaching the goal) and whether the game is over.
        """
        if self.outcome(state):
            return state, 0.0, True
        state = self._move(state, action, rng)
        outcome = self.outcome(state)
        return state, float(outcome == "goal"), outcome != ""

    def legal_actions(self, state: State) -> list[str]:
        """The moves that change something; none once the game is over."""
        return [action for action in ACTIONS if self.step(state, action)[0] != state]

    def solve(self, state: State, rng: random.Random | None = None) -> str | None:
        """
        A shortest plan.

        Args:
            state ([`State`]):
                Position to start from.
            rng (`random.Random`, *optional*):
                Chooses among the moves that are equally good. Without it the first in the order of `ACTIONS` is taken.

        Returns:
            `str` or `None`: Moves, or `None` if there is no way.
        """
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


class not_a_tool:
    """A method that is no plain function of its class: TRL offers those to the model, all but a few names."""

    def __init__(self, function: Callable) -> None:
        self.function = function

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else self.function.__get__(instance)


class Episode(NamedTuple):
    """All that changes while an environment is played."""

    state: State
    steps: int
    seed: int


class GridEnvironment:
    """
    A world as TRL's `environment_factory` wants it; a subclass adds the tool. The reward is 1 at the goal, else 0.

    Args:
        world ([`World`]):
            Rules.
        max_steps (`int`):
            Tool calls after which the game is over; calls that move nothing count.
    """

    episode: Episode

    def __init__(self, world: World, max_steps: int) -> None:
        if max_steps < 1:
            raise ValueError(f"`max_steps` is {max_steps}; give at least 1.")
        self.world = world
        self.max_steps = max_steps

    def reset(self, board: str, prompt: Any = "", seed: int = 0, **columns: Any) -> str | None:
        """
        Starts a game. TRL passes the row of the data set and appends what is returned to the prompt.

        Args:
            board (`str`):
                Board to start from.
            prompt (`str` or `list[dict]`, *optional*):
                The row's prompt.
            seed (`int`, *optional*, defaults to `0`):
                Seed of chance: the n-th move of a game meets the same chance however the game came there.
            columns (`Any`):
                The other columns; unused.

        Returns:
            `str` or `None`: The board, unless the prompt shows it already.
        """
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


@dataclass(frozen=True, kw_only=True)
class GridTask(ABC):
    """
    Plans for boards of a world. A problem is a board, or a board that asks for a sketch (`board?`, or `board?ldr,dru`
    after two sketches that shall not come again), or a board with a sketch to carry out (`board|ldr`).

    Args:
        name (`str`):
            Name of the task.
        size (`int`):
            Rows and columns of a board.
        min_moves (`int`):
            Moves that a board needs at least.
        max_moves (`int`):
            Moves that a board needs at most, and that an answer may have.
        blind_share (`float`):
            Share of cells in which demonstrators may overlook an obstacle.
        overlook_probabilities (`tuple[float, ...]`):
            Probabilities with which they do, dealt out evenly to those cells.
        warm_start_steps (`int`):
            Optimizer steps of supervised training after which a tiny model has converged.
        sketch_moves (`int`, *optional*, defaults to `4`):
            Length of a sketch, which is how a plan begins.
        sketch_share (`float`, *optional*, defaults to `0.5`):
            Share of training problems that are about sketches.
        table_seed (`int`, *optional*, defaults to `1234`):
            Seed of the blind spots.
    """

    name: str
    size: int
    min_moves: int
    max_moves: int
    blind_share: float
    overlook_probabilities: tuple[float, ...]
    warm_start_steps: int
    sketch_moves: int = 4
    sketch_share: float = 0.5
    table_seed: int = 1234

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
        if not all(0 <= share <= 1 for share in (self.blind_share, self.sketch_share, *self.overlook_probabilities)):
            raise ValueError("`blind_share`, `sketch_share` and `overlook_probabilities` must be between 0 and 1.")

    @property
    @abstractmethod
    def world(self) -> World:
        """The rules."""

    @abstractmethod
    def draw(self, rng: random.Random) -> State:
        """A board that needs between `min_moves` and `max_moves`."""

    @property
    def max_completion_length(self) -> int:
        """Tokens of the longest plan, end-of-sequence token included."""
        return self.max_moves + 1

    @property
    def sesa_options(self) -> dict[str, Any]:
        """Options of `SESAConfig` whose prompts the demonstrations cover."""
        return {
            "mode": "two_stage",
            "max_sketch_length": self.sketch_moves + 1,
            "sketch_template": "{problem}?",
            "next_sketch_template": "{problem}?{sketches}",
            "sketch_separator": ",",
            "solve_template": "{problem}|{sketch}",
        }

    @property
    def reward(self) -> Callable[..., list[float]]:
        """The reward function to hand to a trainer; its metrics appear under `rewards/goal_reward`."""
        return self.goal_reward

    def goal_reward(self, completions: list, board: list[str], **columns: Any) -> list[float]:
        """TRL reward function: 1 for a plan that [`verify`] accepts. `board` is the data set's column."""
        texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
        return [float(self.verify(*pair)) for pair in zip(board, texts, strict=True)]

    def verify(self, prompt: str, completion: str) -> bool:
        """
        Whether a plan consists of moves only and its last one, none earlier, reaches the goal.

        Args:
            prompt (`str`):
                Problem.
            completion (`str`):
                Plan to judge.

        Returns:
            `bool`: Verdict.
        """
        state, reward, done = self.world.parse(_take_apart(prompt)[0]), 0.0, False
        if len(completion) > self.max_moves:
            return False
        for action in completion:
            if done or action not in ACTIONS:
                return False
            state, reward, done = self.world.step(state, action)
        return reward == 1.0

    def demonstration(self, prompt: str, rng: random.Random) -> str:
        """A plan or a sketch by somebody with blind spots. Arguments as in [`TeachableTask`]."""
        board, kind, told = _take_apart(prompt)
        state = self._believe(self.world.parse(board), rng)
        if kind == "?":
            ideas = self._ideas(state, rng)
            return next((idea for idea in ideas if idea not in told.split(",")), rng.choice(ideas))
        told = told if set(told) <= set(ACTIONS) else ""
        begun = state
        for action in told:
            begun = self.world.step(begun, action)[0]
        rest = self.world.solve(begun, rng)
        if rest is None or len(told + rest) > self.max_moves:  # a sketch that leads nowhere is not carried out
            return self.world.solve(state, rng) or ""
        return told + rest

    def _ideas(self, state: State, rng: random.Random) -> list[str]:
        """Sketches from which the goal can be reached in time, those of the shortest plans first."""
        distances = self.world.distances(state)
        begun = {"": state}
        for _ in range(self.sketch_moves):
            steps = (
                (plan + a, before, self.world.step(before, a)[0]) for plan, before in begun.items() for a in ACTIONS
            )
            begun = {
                plan: after for plan, before, after in steps if after not in (before, state) and after in distances
            }
        moves = {plan: len(plan) + distances[after] + rng.random() for plan, after in begun.items()}
        in_time = [plan for plan in sorted(moves, key=moves.__getitem__) if moves[plan] < self.max_moves + 1]
        shortest = sum(moves[plan] < distances[state] + 1 for plan in in_time)
        return in_time[: max(shortest, FEW_IDEAS)] or [(self.world.solve(state, rng) or "")[: self.sketch_moves]]

    def sample_problem(self, rng: random.Random) -> str:
        """A problem on a training board, never on a held-out one. Arguments as in [`TeachableTask`]."""
        board = self.world.render(self.draw(rng))
        while _is_held_out(board):
            board = self.world.render(self.draw(rng))
        if rng.random() >= self.sketch_share:
            return board
        ideas = self._ideas(self._believe(self.world.parse(board), rng), rng)[:8]
        if rng.random() < 0.6:
            return f"{board}|{rng.choice(ideas)}"
        return f"{board}?{','.join(ideas[: rng.randrange(8)])}"

    def build_dataset(self, num_examples: int, *, seed: int) -> Dataset:
        """Distinct training boards, in `prompt` and in `board`. Arguments as in [`Task`]."""
        return self._dataset(num_examples, random.Random(f"train/{seed}"), held_out=False)

    def evaluation_set(self, num_examples: int = 256, *, seed: int = 0) -> Dataset:
        """Distinct held-out boards, in the same columns. Arguments as in [`Task`]."""
        return self._dataset(num_examples, random.Random(f"evaluation/{seed}"), held_out=True)

    @cached_property
    def blind_spots(self) -> dict[tuple[int, int], float]:
        """Cells in which demonstrators overlook an obstacle, and how often they do."""
        rng = random.Random(f"blind spots/{self.table_seed}")
        cells = [(row, column) for row in range(self.size) for column in range(self.size)]
        chosen = rng.sample(cells, round(self.blind_share * len(cells)))
        return {c: self.overlook_probabilities[i % len(self.overlook_probabilities)] for i, c in enumerate(chosen)}

    def _believe(self, state: State, rng: random.Random) -> State:
        """The board as a demonstrator sees it."""
        for cell, probability in self.blind_spots.items():
            if state.tile(*cell) == self.world.obstacle and rng.random() < probability:
                state = state.with_tile(*cell, ".")
        return state

    def _dataset(self, num_examples: int, rng: random.Random, *, held_out: bool) -> Dataset:
        boards: dict[str, None] = {}  # a set that keeps its order
        for _ in range(100 * HELD_OUT_ONE_IN * (num_examples + 1)):
            if len(boards) == num_examples:
                break
            board = self.world.render(self.draw(rng))
            if _is_held_out(board) == held_out:
                boards[board] = None
        if len(boards) < num_examples:
            raise ValueError(
                f"`num_examples` is {num_examples}, but {self.name} has only about {len(boards)} such boards; "
                f"ask for fewer or raise `size` or `max_moves`."
            )
        prompts = [[{"role": "user", "content": board}] for board in boards]
        return Dataset.from_dict({"prompt": prompts, "board": list(boards)})


def _take_apart(prompt: str) -> tuple[str, str, str]:
    """Board, kind of problem (`?`, `|` or nothing) and what comes with it."""
    mark = min((prompt.find(mark) for mark in "?|" if mark in prompt), default=len(prompt))
    return prompt[:mark], prompt[mark : mark + 1], prompt[mark + 1 :]


def _is_held_out(board: str) -> bool:
    """Whether a board belongs to the held-out share: a fixed property of its text alone."""
    return hashlib.sha256(board.encode()).digest()[0] % HELD_OUT_ONE_IN == 0


LAKE_OUTCOMES = {"G": "goal", "X": "hole", ".": ""}


@dataclass(frozen=True)
class FrozenLake(World):
    """
    gymnasium's `FrozenLake-v1`: reach the goal without falling into a hole.

    Args:
        success_rate (`float`, *optional*, defaults to `1.0`):
            Probability that a move goes where it should; otherwise it goes to either side. On gymnasium's slippery
            lake it is 1/3.
    """

    success_rate: float = 1.0
    tiles = ".XG"
    obstacle = "X"

    def __post_init__(self) -> None:
        if not 0 <= self.success_rate <= 1:
            raise ValueError(f"`success_rate` is {self.success_rate}; give a probability.")

    def outcome(self, state: State) -> str:
        """`goal`, `hole`, or nothing."""
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


@functools.lru_cache(maxsize=1024)
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
    """
    FrozenLake for TRL's `environment_factory`.

    Args:
        max_steps (`int`, *optional*, defaults to `20`):
            Tool calls after which the game is over.
        success_rate (`float`, *optional*, defaults to `1.0`):
            As in [`FrozenLake`].
    """

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
    """
    Plans for frozen lakes with the start in the first cell and the goal in the last, as one set of knobs.

    Args:
        hole_share (`float`):
            Probability that a cell in between is a hole.
    """

    hole_share: float

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

    def draw(self, rng: random.Random) -> State:
        """A lake that needs between `min_moves` and `max_moves`."""
        for _ in range(MAX_DRAWS):
            cells = ["X" if rng.random() < self.hole_share else "." for _ in range(self.size**2)]
            lake = "".join([".", *cells[1:-1], "G"])
            start = State(tuple(lake[i : i + self.size] for i in range(0, len(lake), self.size)), (0, 0))
            if self.min_moves <= LAKE.distances(start).get(start, 0) <= self.max_moves:
                return start
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
