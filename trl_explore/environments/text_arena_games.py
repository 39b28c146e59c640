"""Games of TextArena for one player, as environments that TRL's `environment_factory` makes.

TextArena's games draw from the global random generators of Python and NumPy, also in the middle of a game. Every game
here has a state of its own for both, which is only swapped in while the game is asked something. So games do not
disturb each other or the training, and a copy of a game plays on exactly as the original would.
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

# Names of the methods by which games say how much of a task is done. TextArena has no common name for them.
PROGRESS_METHODS = ("_get_percentage_completion", "_calculate_progress", "_progress")
WORD_LIST_SIZE = 1000  # a collection of so many entries is a word list or a table, which no game changes
RESET_TRIES = 10  # some generators fail for a few seeds: the next seed is tried then

GAME_OVER = "The game is over."
NO_TURNS_LEFT = "No turns are left. The game is over."


@dataclass(frozen=True)
class GameRules:
    """Settings that all games of a task share."""

    max_turns: int  # tool calls of a game
    rules: str | None = None  # in the place of the rules that the game shows; None keeps them
    wins_only: bool = False  # reward 1 for a win and 0 otherwise, instead of the game's own


class GameMaker:
    """
    Makes games of one id.

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
        self._draws = False  # whether constructing a game draws random numbers
        self._constants: list[Any] = []

    def __getstate__(self) -> dict[str, Any]:
        return {"env_id": self.env_id, "config": self.config}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    @property
    def adds_brackets(self) -> bool:
        """True if the game of this id takes `5` for `[5]`. Ids that end in `-raw` do not."""
        self._prepare()
        return self._adds_brackets

    def make(self) -> Any:
        """Return a new game. Making it may draw from the global generators."""
        # Without TextArena's wrappers: they repeat the whole history in every answer.
        self._prepare()
        if self._draws:
            return _unwrapped(self._constructed())
        return copy.deepcopy(self._template, self.memo())

    def board_length(self) -> int:
        """Return the characters of the longest message of a first position, without the rules."""
        from textarena import ObservationType

        with own_chance(Chance.seeded(0)):
            game = self.make()
            game.reset(num_players=1, seed=0)
        messages = game.get_observation()[1]
        return max((len(text) for _, text, kind in messages if kind is not ObservationType.PROMPT), default=0)

    def memo(self) -> dict[int, Any]:
        """Return a `memo` for [`copy.deepcopy`]: copies of a game share the word lists, which no game changes."""
        return {id(shared): shared for shared in (self, *self._constants)}

    def _prepare(self) -> None:
        if self._template is not None:
            return
        from textarena.wrappers import ActionFormattingWrapper

        with own_chance(Chance.seeded(0)) as chance:
            wrapped = self._constructed()
        self._draws = not chance.equals(Chance.seeded(0))
        self._adds_brackets = _is_wrapped_with(wrapped, ActionFormattingWrapper)
        self._template = _unwrapped(wrapped)
        self._constants = _word_lists(self._template)

    def _constructed(self) -> Any:
        import textarena

        return textarena.make(self.env_id, **copy.deepcopy(self.config))


class Chance:
    """States of the global random generators of Python and NumPy, stored for one game."""

    def __init__(self, python: Any, numpy: Any) -> None:
        self.python, self.numpy = python, numpy

    @classmethod
    def seeded(cls, seed: int) -> "Chance":
        """Return the states of freshly seeded generators."""
        return cls(random.Random(seed).getstate(), np.random.RandomState(seed % 2**32).get_state())

    @classmethod
    def current(cls) -> "Chance":
        """Return the states of the global generators now."""
        return cls(random.getstate(), np.random.get_state())

    def equals(self, other: "Chance") -> bool:
        """True if both pairs of generators will draw the same numbers."""
        keys = np.array_equal(self.numpy[1], other.numpy[1])
        return self.python == other.python and keys and self.numpy[2:] == other.numpy[2:]

    def install(self) -> None:
        """Give the global generators these states."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)


@contextlib.contextmanager
def own_chance(chance: Chance) -> Iterator[Chance]:
    """Install `chance` in the global generators, and store their final states in it at the end. What a game prints is
    hidden."""
    before = Chance.current()
    chance.install()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield chance
    finally:
        after = Chance.current()
        chance.python, chance.numpy = after.python, after.numpy
        before.install()


@dataclass
class Played:
    """A game that was begun: all that changes while it is played."""

    game: Any
    chance: Chance
    turns: int = 0  # tool calls so far

    def copied(self, memo: dict[int, Any]) -> "Played":
        """Return a copy that plays on as this game would."""
        # Nobody changes the states of generators in place, so both share them.
        chance = Chance(self.chance.python, self.chance.numpy)
        return Played(copy.deepcopy(self.game, memo), chance, self.turns)


class TextArenaGame:
    """
    A game of TextArena for one player, with one tool. It ends by the game's own rules, or after `max_turns` calls.

    Args:
        maker ([`GameMaker`]):
            Makes the game.
        rules ([`GameRules`]):
            Its limit of turns and its reward.
    """

    def __init__(self, maker: GameMaker, rules: GameRules) -> None:
        self._maker, self._rules = maker, rules
        self._played: Played | None = None

    def reset(self, seed: int, **columns: Any) -> str:
        """
        Start a game.

        Args:
            seed (`int`):
                Seed of the game, at least 0. The same seed and the same moves always give the same game.
            columns (*optional*):
                Other columns of the row, which are not read.

        Returns:
            `str`: The rules and the first position, which TRL appends to the prompt.
        """
        error: Exception | None = None
        self._played = None
        for place in range(RESET_TRIES):
            try:
                self._played = self._begun(int(seed) + place)
                return self._news()
            except Exception as failed:  # a generator that finds no puzzle raises any type
                error = error or failed
        assert error is not None
        raise error

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
        played = self._begun_game()
        text = str(action).strip()  # a model may also write a number
        if self._maker.adds_brackets and not set(text) & set("[]"):
            text = f"[{text}]"
        played.turns += 1
        with own_chance(played.chance):
            played.game.step(text)
        return self._news()

    @property
    def done(self) -> bool:
        """Whether the game is over."""
        played = self._begun_game()
        return bool(played.game.state.done) or played.turns >= self._rules.max_turns

    @property
    def reward(self) -> float:
        """Reward of the game: its own, or, if it has not ended, the part of the task that is done. 0 if the game does
        not tell, or was never started."""
        if self._played is None:
            return 0.0
        with own_chance(self._played.chance):
            value = _value(self._played.game)
        return float(value >= 1) if self._rules.wins_only else value

    @property
    def num_turns(self) -> int:
        """Number of moves so far."""
        return self._begun_game().turns

    @not_a_tool
    def snapshot(self) -> Played:
        """Return the state of the game. Any number of games may go on from it."""
        return self._begun_game().copied(self._maker.memo())

    @not_a_tool
    def restore(self, state: Played) -> None:
        """Go on from a snapshot, also from a snapshot of another instance of the same task."""
        self._played = state.copied(self._maker.memo())

    def __deepcopy__(self, memo: dict[int, Any]) -> "TextArenaGame":
        twin = copy.copy(self)
        memo |= {id(self): twin, **self._maker.memo()}
        for name, value in vars(self).items():
            copied = value.copied(memo) if isinstance(value, Played) else copy.deepcopy(value, memo)
            setattr(twin, name, copied)
        return twin

    def _begun_game(self) -> Played:
        if self._played is None:
            raise RuntimeError("the game was not started: call `reset(seed=...)` first.")
        return self._played

    def _begun(self, seed: int) -> Played:
        chance = Chance.seeded(seed)
        with own_chance(chance):
            game = self._maker.make()
            game.reset(num_players=1, seed=seed)
        return Played(game, chance)

    def _news(self) -> str:
        """Return what the game has said since it was last asked, without the player's own moves."""
        from textarena import ObservationType

        played = self._begun_game()
        texts = []
        for _, text, kind in played.game.get_observation()[1]:
            if kind is ObservationType.PROMPT and self._rules.rules is not None:
                text = self._rules.rules
            # A few games mix up the arguments when they note the player's move: then a number is in place of the text.
            if kind is not ObservationType.PLAYER_ACTION and isinstance(text, str):
                texts.append(text)
        if played.game.state.done:
            texts.append(str(played.game.state.game_info[0].get("reason") or GAME_OVER))
        elif self.done:
            texts.append(NO_TURNS_LEFT)
        return "\n".join(stripped for text in texts if (stripped := text.strip("\n").rstrip()))


def _value(game: Any) -> float:
    """Return the reward of a game that is over, or else its measure of progress."""
    value: Any = None
    if game.state.done:
        value = (game.state.rewards or {}).get(0)
    else:
        for name in PROGRESS_METHODS:
            if hasattr(game, name):
                value = getattr(game, name)()
                break
    # After a second invalid move in a row, a few games pass their explanation as the reward: that counts as nothing.
    return float(value) if isinstance(value, Real) and math.isfinite(value) else 0.0


def _unwrapped(env: Any) -> Any:
    import textarena

    while isinstance(env, textarena.Wrapper):
        env = env.env
    return env


def _is_wrapped_with(env: Any, kind: type) -> bool:
    import textarena

    return isinstance(env, textarena.Wrapper) and env.is_wrapped_with(kind)


def _word_lists(game: Any) -> list[Any]:
    """Return the large collections of a game and of its parts, such as the words of a dictionary."""
    found = []
    for owner in (game, *vars(game).values()):
        for value in getattr(owner, "__dict__", {}).values():
            if isinstance(value, (list, set, frozenset, dict)) and len(value) >= WORD_LIST_SIZE:
                found.append(value)
    return found
