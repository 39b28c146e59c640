"""FrozenLake for agents. A turn is one tool call with one move, `!go:to=r`, and the tool returns the board.

The last turn of a game is `.`, without a tool call.
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset

from trl_explore.tasks.sketched import SEPARATOR, SKETCH_MARK
from trl_explore.tasks.tiny_model import ASSISTANT, EOS, USER

from .frozen_lake import FrozenLakeTask
from .grid_worlds import ACTIONS, GridEnvironment, State

LAST_WORD = "."


class LakeGame(GridEnvironment):
    """FrozenLake with a tool whose name is short, because a character is a token of the tiny model."""

    def __init__(self, task: "LakeAgentTask") -> None:
        super().__init__(task.boards.world, task.max_turns)

    def go(self, to: str) -> str:
        """
        Moves the player S over the ice by one cell. Reach the goal G and keep away from the holes X.

        Args:
            to: Where to move. (choices: ["left", "down", "right", "up"])

        Returns:
            The board after the move.
        """
        return self._play(to)


@dataclass(frozen=True, kw_only=True)
class LakeAgentTask:
    """
    Task of playing FrozenLake move by move.

    A demonstration overlooks the same holes during a whole game, and so may fall into one.

    SESA's agent mode asks for a move that differs from proposed moves: the last message then ends with
    `?goto=l;goto=r`. Demonstrations with such proposals end with a move that was not proposed.

    Args:
        name (`str`):
            Name of the task.
        boards ([`FrozenLakeTask`]):
            Boards, rules and blind spots.
        max_turns (`int`):
            Maximum number of moves of a game.
        warm_start_steps (`int`):
            Supervised steps until a tiny model has converged.
        proposal_share (`float`, *optional*, defaults to `0.5`):
            Probability that a demonstration has proposals at a random later step. The first prompt of a training
            problem has proposals with half this probability.
    """

    name: str
    boards: FrozenLakeTask
    max_turns: int
    warm_start_steps: int
    proposal_share: float = 0.5
    tools: bool = field(default=True, init=False)

    reward = None  # the environment has `get_reward`

    def __post_init__(self) -> None:
        if not 0 <= self.proposal_share <= 1:
            raise ValueError(f"`proposal_share` is {self.proposal_share}; give a probability between 0 and 1.")
        if self.max_turns < self.boards.min_moves:
            raise ValueError(f"`max_turns` is {self.max_turns}; a game takes at least {self.boards.min_moves} moves.")

    @property
    def environment_factory(self) -> Callable[[], LakeGame]:
        return lambda: LakeGame(self)

    @property
    def max_completion_length(self) -> int:
        board = self.boards.size * (self.boards.size + 1) - 1
        marks = 3  # the end-of-sequence token, and the marks of user and assistant
        turn = len(_call("l")) + board + marks
        max_blocked = self.max_turns - self.boards.min_moves  # moves to spare, all of which may be blocked
        return self.max_turns * turn + max_blocked * len(" blocked") + len(" goal") + len(LAST_WORD) + 1

    @property
    def options(self) -> dict[str, Any]:
        return {"max_tool_calling_iterations": self.max_turns}

    @property
    def sesa_options(self) -> dict[str, Any]:
        return {
            "mode": "agent",
            "num_actions": 3,
            "branch_depth": 2,
            "action_template": f"{{problem}}{SKETCH_MARK}{{actions}}",
            "action_separator": SEPARATOR,
        }

    def build_dataset(self, num_examples: int, *, seed: int) -> Dataset:
        return self.boards.build_dataset(num_examples, seed=seed).rename_column("problem", "board")

    def evaluation_set(self, num_examples: int = 256, *, seed: int = 0) -> Dataset:
        return self.boards.evaluation_set(num_examples, seed=seed).rename_column("problem", "board")

    def sample_problem(self, rng: random.Random) -> str:
        """Sample a training board, sometimes with proposed moves."""
        board = self.boards.draw(rng)
        while self.boards.is_held_out(board):
            board = self.boards.draw(rng)
        if rng.random() < self.proposal_share / 2:
            return board + _proposals(rng)
        return board

    def demonstration(self, prompt: str, rng: random.Random) -> str:
        """Sample a game, written with the marks of the chat template between its turns. If moves are proposed, it ends
        with another move."""
        board, mark, proposals = prompt.partition(SKETCH_MARK)
        must_differ = bool(mark)
        game, text = LakeGame(self), ""
        game.reset(board, board)
        seen = self.boards.overlook(game.episode.state, rng)
        proposal_step = None
        if rng.random() < self.proposal_share:
            proposal_step = rng.randrange(1, self.boards.min_moves)
        while not game.done:
            if game.episode.steps == proposal_step:
                must_differ, proposals = True, _proposals(rng)
                text = text.removesuffix(ASSISTANT) + proposals + ASSISTANT
            moves = self._moves(State(seen.rows, game.episode.state.player))
            if must_differ:
                new_moves = _others(moves, proposals) or _others(ACTIONS, proposals)
                return text + _call(rng.choice(new_moves))
            move = rng.choice(moves)
            text += f"{_call(move)}{EOS}{USER}{game.go(move)}{ASSISTANT}"
        return text + LAST_WORD

    def _moves(self, state: State) -> list[str]:
        """Return the first moves of the shortest plans, or all moves if the goal cannot be reached."""
        world = self.boards.world
        distances = world.distances(state)
        after = {move: distances.get(world.step(state, move)[0]) for move in ACTIONS}
        nearest = min((d for d in after.values() if d is not None), default=None)
        return [move for move in ACTIONS if after[move] == nearest] or list(ACTIONS)


def _call(move: str) -> str:
    return f"!go:to={move}"


def _proposals(rng: random.Random) -> str:
    """Sample one to three proposed moves, in the format of SESA's prompts. SESA shows a move as `go(to=l)`, but the
    tiny model has no tokens for brackets, so it is `goto=l`."""
    moves = rng.sample(list(ACTIONS), rng.randint(1, len(ACTIONS) - 1))
    return SKETCH_MARK + SEPARATOR.join(f"goto={move}" for move in moves)


def _others(moves: Iterable[str], proposals: str) -> list[str]:
    """Return the moves that are not among the proposals."""
    return [move for move in moves if f"={move}" not in proposals]


LAKE_AGENT = LakeAgentTask(
    name="lake_agent",
    boards=FrozenLakeTask(
        name="lake_agent",
        size=4,
        min_moves=6,
        max_moves=6,
        hole_share=0.3,
        blind_share=0.5,
        overlook_probabilities=(0.9, 0.7, 0.5, 0.3),
        warm_start_steps=1,
    ),
    max_turns=7,
    warm_start_steps=500,
)
