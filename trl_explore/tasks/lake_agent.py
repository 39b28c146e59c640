"""FrozenLake played move by move: the embedded task for agents, with TRL's `environment_factory`.

A prompt is a board, as in `frozen_lake.py`. A turn is one tool call, `!go:to=r`, and the tool answers with the board.
When the game is over the agent says `.`, which ends the trajectory.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset

from trl_explore.tasks.frozen_lake import FrozenLakeTask
from trl_explore.tasks.grid_worlds import ACTIONS, GridEnvironment, State
from trl_explore.tasks.sketched import SEPARATOR, SKETCH_MARK
from trl_explore.tasks.tiny_model import ASSISTANT, EOS, USER

LAST_WORD = "."


class LakeGame(GridEnvironment):
    """
    FrozenLake with a short name for its tool: a tiny model pays for every character.

    Args:
        task ([`LakeAgentTask`]):
            Where the rules and the number of moves come from.
    """

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
    Games on the boards of a [`FrozenLakeTask`], for agents. A [`TeachableTask`] whose answers have several turns.

    Demonstrators overlook holes, each board's always the same ones for the length of a game, and fall into them.

    Args:
        name (`str`):
            Name of the task.
        boards ([`FrozenLakeTask`]):
            Where boards, rules and blind spots come from.
        max_turns (`int`):
            Moves of a game at most.
        warm_start_steps (`int`):
            Optimizer steps of supervised training after which a tiny model has converged.
        proposal_share (`float`, *optional*, defaults to `0.5`):
            Share of demonstrations that end with a move unlike those which the last message names.
    """

    name: str
    boards: FrozenLakeTask
    max_turns: int
    warm_start_steps: int
    proposal_share: float = 0.5
    tools: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        if not 0 <= self.proposal_share <= 1:
            raise ValueError(f"`proposal_share` is {self.proposal_share}; give a share.")
        if self.max_turns < self.boards.min_moves:
            raise ValueError(f"`max_turns` is {self.max_turns}; a game takes at least {self.boards.min_moves} moves.")

    @property
    def environment_factory(self) -> Callable[[], LakeGame]:
        """What to hand to a trainer as `environment_factory`; the game's own reward is 1 at the goal, else 0."""
        return lambda: LakeGame(self)

    @property
    def max_completion_length(self) -> int:
        """Tokens of the longest game that can still be won, with what the tool answers."""
        # A call and the board that answers it, the marks of the two turns and the end of sequence.
        turn = len(_call("l")) + self.boards.size * (self.boards.size + 1) - 1 + 3
        blocked = self.max_turns - self.boards.min_moves
        return self.max_turns * turn + blocked * len(" blocked") + len(" goal") + len(LAST_WORD) + 1

    @property
    def sesa_options(self) -> dict[str, Any]:
        """Fields of [`~trl_explore.trainers.SESAConfig`] for a model that was warm-started on this task."""
        return {
            "mode": "agent",
            "num_actions": len(ACTIONS),
            "action_template": f"{{problem}}{SKETCH_MARK}{{actions}}",
            "action_separator": SEPARATOR,
        }

    def build_dataset(self, num_examples: int, *, seed: int) -> Dataset:
        """Distinct training boards, in `prompt` and `board`. Arguments as in [`Task`]."""
        return self.boards.build_dataset(num_examples, seed=seed).rename_column("problem", "board")

    def evaluation_set(self, num_examples: int = 256, *, seed: int = 0) -> Dataset:
        """Distinct held-out boards, in the same columns. Arguments as in [`Task`]."""
        return self.boards.evaluation_set(num_examples, seed=seed).rename_column("problem", "board")

    @property
    def reward(self) -> Callable[..., list[float]]:
        """TRL reward function: what the games are worth. A trainer with `environment_factory` needs none."""
        return self.game_reward

    def game_reward(self, environments: list[LakeGame], **columns: Any) -> list[float]:
        """1 for each game that reached the goal, else 0."""
        return [game.get_reward() for game in environments]

    def sample_problem(self, rng: random.Random) -> str:
        """A training board, now and then with moves that shall not be repeated. Arguments as in [`TeachableTask`]."""
        board = self.boards.draw(rng)
        while self.boards.is_held_out(board):
            board = self.boards.draw(rng)
        return board + _proposals(rng) if rng.random() < self.proposal_share / 2 else board

    def demonstration(self, prompt: str, rng: random.Random) -> str:
        """A game, written with the marks of the chat template between its turns. Arguments as in [`TeachableTask`]."""
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
