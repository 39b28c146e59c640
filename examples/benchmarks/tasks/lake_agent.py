"""FrozenLake move by move, for agents: a turn is one tool call, `!go:to=r`, which the board answers; `.` ends it."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset

from trl_explore.tasks.sketched import SEPARATOR, SKETCH_MARK
from trl_explore.tasks.tiny_model import ASSISTANT, EOS, USER

from .frozen_lake import FrozenLakeTask
from .grid_worlds import ACTIONS, GridEnvironment, State

LAST_WORD = "."


class LakeGame(GridEnvironment):
    """FrozenLake with a short name for its tool: a tiny model pays for every character."""

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
    """Games on a [`FrozenLakeTask`]'s boards; demonstrators overlook the same holes for a whole game, and fall in."""

    name: str
    boards: FrozenLakeTask  # boards, rules and blind spots
    max_turns: int  # moves of a game
    warm_start_steps: int  # supervised steps until a tiny model has converged
    proposal_share: float = 0.5  # of demonstrations that end unlike the moves in the last message
    tools: bool = field(default=True, init=False)

    reward = None  # a game has `get_reward`

    def __post_init__(self) -> None:
        if not 0 <= self.proposal_share <= 1:
            raise ValueError(f"`proposal_share` is {self.proposal_share}; give a share.")
        if self.max_turns < self.boards.min_moves:
            raise ValueError(f"`max_turns` is {self.max_turns}; a game takes at least {self.boards.min_moves} moves.")

    @property
    def environment_factory(self) -> Callable[[], LakeGame]:
        return lambda: LakeGame(self)

    @property
    def max_completion_length(self) -> int:
        # A call and the board that answers it, the marks of the two turns and the end of sequence.
        turn = len(_call("l")) + self.boards.size * (self.boards.size + 1) - 1 + 3
        blocked = self.max_turns - self.boards.min_moves
        return self.max_turns * turn + blocked * len(" blocked") + len(" goal") + len(LAST_WORD) + 1

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
        """A training board, now and then with moves that shall not be repeated."""
        board = self.boards.draw(rng)
        while self.boards.is_held_out(board):
            board = self.boards.draw(rng)
        return board + _proposals(rng) if rng.random() < self.proposal_share / 2 else board

    def demonstration(self, prompt: str, rng: random.Random) -> str:
        """A game, written with the marks of the chat template between its turns."""
        board, mark, told = prompt.partition(SKETCH_MARK)
        game, said = LakeGame(self), ""
        game.reset(board, board)
        seen = self.boards.overlook(game.episode.state, rng)
        asked_again = rng.randrange(1, self.boards.min_moves) if rng.random() < self.proposal_share else None
        while not game.done:
            if game.episode.steps == asked_again:
                shown = _proposals(rng)
                said, mark, told = said.removesuffix(ASSISTANT) + shown + ASSISTANT, SKETCH_MARK, shown
            moves = self._moves(State(seen.rows, game.episode.state.player))
            if mark:
                return said + _call(rng.choice([m for m in moves if f"={m}" not in told] or _others(told)))
            move = rng.choice(moves)
            said += f"{_call(move)}{EOS}{USER}{game.go(move)}{ASSISTANT}"
        return said + LAST_WORD

    def _moves(self, state: State) -> list[str]:
        """The moves of the shortest plans."""
        world = self.boards.world
        distances = world.distances(state)
        after = {move: distances.get(world.step(state, move)[0]) for move in ACTIONS}
        nearest = min((d for d in after.values() if d is not None), default=None)
        return [move for move in ACTIONS if after[move] == nearest] or list(ACTIONS)


def _call(move: str) -> str:
    return f"!go:to={move}"


def _proposals(rng: random.Random) -> str:
    """One to three moves as a trainer shows them: `go(to=l)`, without the brackets that the tiny alphabet lacks."""
    moves = rng.sample(list(ACTIONS), rng.randint(1, len(ACTIONS) - 1))
    return SKETCH_MARK + SEPARATOR.join(f"goto={move}" for move in moves)


def _others(told: str) -> list[str]:
    return [move for move in ACTIONS if f"={move}" not in told]


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
