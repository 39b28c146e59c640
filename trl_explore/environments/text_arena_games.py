"""Games of TextArena for one player, as environments for TRL's `environment_factory`.

TextArena's games use the global random generators of Python and NumPy, also in the middle of a game. Each game here
stores its own states of both generators. A call to the game installs these states, and restores the previous ones
afterwards. So games do not influence each other or the training, and a copy of a game continues exactly as the
original would.
"""

import contextlib
import copy
import io
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from trl_explore.agents.snapshots import not_a_tool

# Methods of games that return how much of the task is done. TextArena has no common name for them.
PROGRESS_METHODS = ("_get_percentage_completion", "_calculate_progress", "_progress")
WORD_LIST_SIZE = 1000  # a collection with at least this many entries is a word list or a table, which no game changes
RESET_TRIES = 10  # some games fail to generate a puzzle for a few seeds, so `reset` tries the next seeds

GAME_OVER = "The game is over."
NO_TURNS_LEFT = "No turns are left. The game is over."


@dataclass(frozen=True)
class GameRules:
    """
    Settings that all games of a task share.

    Args:
        max_turns (`int`):
            Maximum number of tool calls in a game.
        rules (`str`, *optional*):
            Text to show instead of the game's rules. `None` keeps the game's rules.
        wins_only (`bool`, *optional*, defaults to `False`):
            If `True`, the reward is 1 for a win and 0 otherwise, instead of the game's own reward.
    """

    max_turns: int
    rules: str | None = None
    wins_only: bool = False


class GameMaker:
    """
    Creates games of one id.

    Args:
        env_id (`str`):
            Id in TextArena's registry, such as `GuessTheNumber-v0`.
        config (`Mapping`):
            Arguments of the game's constructor. They override the arguments in the registry.
    """

    def __init__(self, env_id: str, config: Mapping[str, Any]) -> None:
        self.env_id, self.config = env_id, dict(config)
        self._template: Any = None
        self._adds_brackets = False
        self._is_random = False  # True if the constructor of the game uses random numbers
        self._constants: list[Any] = []

    def __getstate__(self) -> dict[str, Any]:
        # Pickle only the arguments, because another process can create the template from them.
        return {"env_id": self.env_id, "config": self.config}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    @property
    def adds_brackets(self) -> bool:
        """True if the game reads the move `5` as `[5]`. Games with ids that end in `-raw` do not."""
        self._prepare()
        return self._adds_brackets

    def make(self) -> Any:
        """Return a new game. This may use the global random generators."""
        self._prepare()
        if self._is_random:  # a copy of the template would repeat the random choices of its constructor
            return _unwrapped(self._constructed())
        return copy.deepcopy(self._template, self.memo())

    def board_length(self) -> int:
        """Return the number of characters in the longest message that a game starts with. The rules do not count."""
        from textarena import ObservationType

        with use_random_states(RandomStates.seeded(0)):
            game = self.make()
            game.reset(num_players=1, seed=0)
        messages = game.get_observation()[1]
        return max((len(text) for _, text, kind in messages if kind is not ObservationType.PROMPT), default=0)

    def memo(self) -> dict[int, Any]:
        """Return a `memo` for [`copy.deepcopy`], with which copies share this object and the word lists of its games.
        No game changes them."""
        return {id(shared): shared for shared in (self, *self._constants)}

    def _prepare(self) -> None:
        if self._template is not None:
            return
        from textarena.wrappers import ActionFormattingWrapper

        with use_random_states(RandomStates.seeded(0)) as states:
            wrapped = self._constructed()
        self._is_random = not states.equals(RandomStates.seeded(0))
        self._adds_brackets = _is_wrapped_with(wrapped, ActionFormattingWrapper)
        self._template = _unwrapped(wrapped)
        self._constants = _word_lists(self._template)

    def _constructed(self) -> Any:
        import textarena

        return textarena.make(self.env_id, **copy.deepcopy(self.config))


class RandomStates:
    """States of the random generators of Python and NumPy, stored for one game."""

    def __init__(self, python: Any, numpy: Any) -> None:
        self.python, self.numpy = python, numpy

    @classmethod
    def seeded(cls, seed: int) -> "RandomStates":
        """Return the states of generators with the seed `seed`."""
        return cls(random.Random(seed).getstate(), np.random.RandomState(seed % 2**32).get_state())

    @classmethod
    def current(cls) -> "RandomStates":
        """Return the current states of the global generators."""
        return cls(random.getstate(), np.random.get_state())

    def equals(self, other: "RandomStates") -> bool:
        """Return whether generators with these states and with `other` give the same numbers."""
        # NumPy's state is the generator's name, an array and three numbers. `==` would compare the array by entry.
        arrays_equal = np.array_equal(self.numpy[1], other.numpy[1])
        return self.python == other.python and arrays_equal and self.numpy[2:] == other.numpy[2:]

    def install(self) -> None:
        """Set the global generators to these states."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)


@contextlib.contextmanager
def use_random_states(states: RandomStates) -> Iterator[RandomStates]:
    """
    Run code with the generator states of a game, and hide the text that a game prints.

    Args:
        states ([`RandomStates`]):
            States of the global generators at the start of the block. When the block ends, `states` stores the new
            states of the generators. Then the generators get the states that they had before the block.
    """
    before = RandomStates.current()
    states.install()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield states
    finally:
        after = RandomStates.current()
        states.python, states.numpy = after.python, after.numpy
        before.install()


@dataclass
class StartedGame:
    """Everything that changes while a game is played."""

    game: Any
    random_states: RandomStates
    turns: int = 0  # number of tool calls so far

    def __deepcopy__(self, memo: dict[int, Any]) -> "StartedGame":
        """Return a copy that continues exactly as this game would."""
        # No code changes a generator's state in place, so the copy can refer to the same objects.
        states = RandomStates(self.random_states.python, self.random_states.numpy)
        return StartedGame(copy.deepcopy(self.game, memo), states, self.turns)


class TextArenaGame:
    """
    A game of TextArena for one player, with the tool `act`. The game ends according to its rules, or after `max_turns`
    calls of the tool.

    Args:
        maker ([`GameMaker`]):
            Creates the game.
        rules ([`GameRules`]):
            Maximum number of turns, the text of the rules and the kind of reward.
    """

    def __init__(self, maker: GameMaker, rules: GameRules) -> None:
        self._maker, self._rules = maker, rules
        self._started: StartedGame | None = None

    def reset(self, seed: int, **columns: Any) -> str:
        """
        Start a game.

        Args:
            seed (`int`):
                Seed of the game, at least 0. The same seed and the same moves always give the same game.
            columns (*optional*):
                Other columns of the row. They are ignored.

        Returns:
            `str`: The rules and the first position. TRL appends them to the prompt.
        """
        first_error: Exception | None = None
        self._started = None
        for offset in range(RESET_TRIES):
            try:
                self._started = self._start(int(seed) + offset)
                return self._new_messages()
            except Exception as error:  # a game that finds no puzzle may raise any type
                first_error = first_error or error
        assert first_error is not None
        raise first_error

    def act(self, action: str) -> str:
        """
        Make one move in the game.

        Args:
            action: The move, written as the rules of the game say, such as [5] or [up].

        Returns:
            The answer of the game.
        """
        if self.done:
            return GAME_OVER
        started = self._require_started()
        text = str(action).strip()  # a model may also pass a number
        if self._maker.adds_brackets and "[" not in text and "]" not in text:
            text = f"[{text}]"
        started.turns += 1
        with use_random_states(started.random_states):
            started.game.step(text)
        return self._new_messages()

    @property
    def done(self) -> bool:
        """True if the game is over."""
        started = self._require_started()
        return bool(started.game.state.done) or started.turns >= self._rules.max_turns

    @property
    def reward(self) -> float:
        """Reward of the game. If the game has ended by its own rules, it is the game's own reward. Otherwise it is the
        part of the task that is done, or 0 if the game does not measure that. Before `reset` it is 0."""
        if self._started is None:
            return 0.0
        with use_random_states(self._started.random_states):
            value = _value(self._started.game)
        if self._rules.wins_only:
            return float(value >= 1)
        return value

    @property
    def num_turns(self) -> int:
        """Number of tool calls so far."""
        return self._require_started().turns

    @not_a_tool
    def snapshot(self) -> StartedGame:
        """Return the state of the game. Any number of games can continue from it."""
        return copy.deepcopy(self._require_started(), self._maker.memo())

    @not_a_tool
    def restore(self, state: StartedGame) -> None:
        """Continue from a snapshot. It may come from another instance of the same task."""
        self._started = copy.deepcopy(state, self._maker.memo())

    def __deepcopy__(self, memo: dict[int, Any]) -> "TextArenaGame":
        twin = copy.copy(self)
        memo |= {id(self): twin, **self._maker.memo()}
        for name, value in self.__dict__.items():
            setattr(twin, name, copy.deepcopy(value, memo))
        return twin

    def _require_started(self) -> StartedGame:
        if self._started is None:
            raise RuntimeError("the game was not started: call `reset(seed=...)` first.")
        return self._started

    def _start(self, seed: int) -> StartedGame:
        states = RandomStates.seeded(seed)
        with use_random_states(states):
            game = self._maker.make()
            game.reset(num_players=1, seed=seed)
        return StartedGame(game, states)

    def _new_messages(self) -> str:
        """Return the game's messages since the last call, without the player's moves. If the game is over, the last
        message says so."""
        from textarena import ObservationType

        started = self._require_started()
        texts = []
        for _, text, kind in started.game.get_observation()[1]:
            if kind is ObservationType.PROMPT and self._rules.rules is not None:
                text = self._rules.rules
            # A few games swap arguments when they record the player's move. Then `text` is a number.
            if kind is not ObservationType.PLAYER_ACTION and isinstance(text, str):
                texts.append(text)
        if started.game.state.done:
            texts.append(str(started.game.state.game_info[0].get("reason") or GAME_OVER))
        elif self.done:
            texts.append(NO_TURNS_LEFT)
        stripped = [text.strip("\n").rstrip() for text in texts]
        return "\n".join(filter(None, stripped))


def _value(game: Any) -> float:
    """Return the reward of a game that is over, or the progress of a game that is not, or 0 if there is no number."""
    value: Any = None
    if game.state.done:
        value = (game.state.rewards or {}).get(0)
    else:
        for name in PROGRESS_METHODS:
            if hasattr(game, name):
                value = getattr(game, name)()
                break
    # After a second invalid move in a row, a few games set the reward to a text. Such a game has the reward 0.
    if isinstance(value, Real) and math.isfinite(value):
        return float(value)
    return 0.0


def _unwrapped(env: Any) -> Any:
    """Return a game without TextArena's wrappers, which repeat the whole history in every answer."""
    import textarena

    while isinstance(env, textarena.Wrapper):
        env = env.env
    return env


def _is_wrapped_with(env: Any, kind: type) -> bool:
    import textarena

    return isinstance(env, textarena.Wrapper) and env.is_wrapped_with(kind)


def _word_lists(game: Any) -> list[Any]:
    """Return the large collections of a game and of the objects in its attributes, such as a dictionary's words."""
    found = []
    for owner in (game, *game.__dict__.values()):
        for value in getattr(owner, "__dict__", {}).values():
            if isinstance(value, (list, set, frozenset, dict)) and len(value) >= WORD_LIST_SIZE:
                found.append(value)
    return found
