"""TextArena's registry: which games can be used here, and why the others cannot."""

import contextlib
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trl_explore.environments.text_arena_games import Chance, GameMaker, own_chance
from trl_explore.names import unknown_name

# Games that ask a language model of a paid service to play a part, or to judge.
ASKS_A_MODEL = ("Debate", "GuessWho", "ScenarioPlanning", "TwentyQuestions")
FOR_SEVERAL = "it is a game for two or more players, and there is no opponent here."
NLTK_DATA = "words averaged_perceptron_tagger_eng"


def known_ids() -> list[str]:
    """
    Return the ids of TextArena's registry.

    Raises:
        ImportError: If TextArena is not installed.
    """
    try:
        import textarena  # noqa: F401
        from textarena.envs.registration import ENV_REGISTRY
    except ModuleNotFoundError as error:
        raise ImportError(f'TextArenaSpec needs TextArena ({error}): pip install "trl-explore[textarena]".') from error
    return list(ENV_REGISTRY)


@contextlib.contextmanager
def without_downloads() -> Iterator[None]:
    """Keep games from downloading the word lists that they lack."""
    from textarena.envs.utils import word_lists

    nltk = word_lists.nltk
    before = nltk.download
    nltk.download = lambda *names, **options: False
    try:
        yield
    finally:
        nltk.download = before


def why_not(env_id: str, config: Mapping[str, Any] | None = None) -> str | None:
    """
    Say why a game cannot be used.

    Args:
        env_id (`str`):
            Id in TextArena's registry.
        config (`Mapping`, *optional*):
            Arguments of the game's constructor.

    Returns:
        `str` or `None`: The reason in one sentence. None if the game can be used.
    """
    from textarena import SinglePlayerState

    family = family_of(env_id)
    if family in ASKS_A_MODEL:
        return "it asks a language model of a paid service (OpenRouter) to play a part or to judge."
    try:
        with own_chance(Chance.seeded(0)):
            game = GameMaker(env_id, config or {}).make()
            game.reset(num_players=1, seed=0)
            if not isinstance(game.state, SinglePlayerState):
                return FOR_SEVERAL
            return FAULTS[family](game) if family in FAULTS else None
    except Exception as error:  # each game fails in its own way
        return _reason(error, family, config or {})


def _fault_of_fifteen_puzzle(game: Any) -> str | None:
    if hasattr(game.state, "set_winners"):
        return None
    return "it cannot be won: this TextArena raises an AttributeError (`set_winners`) at the winning move."


def _fault_of_bandit(game: Any) -> str | None:
    means = game.state.game_state["ground_truth"]
    game.state.turn = game.num_turns  # the last choice, which decides
    game.step(f"[{max(means, key=means.get)}]")
    if game.state.rewards[0] >= 1:
        return None
    return "its reward is upside down: the best button gets 0, and a worse button gets the difference to the best."


def _fault_of_set(game: Any) -> str | None:
    game.step("[1, 1, 1]")
    if not game.state.game_state["score"]:
        return None
    return "its reward can be had without playing: three times the same card, [1, 1, 1], counts as a set."


# Checks of games whose rewards teach the wrong thing in TextArena 0.7.4; a later version may be sound.
FAULTS: dict[str, Callable[[Any], str | None]] = {
    "FifteenPuzzle": _fault_of_fifteen_puzzle,
    "Bandit": _fault_of_bandit,
    "Set": _fault_of_set,
}


def family_of(env_id: str) -> str:
    """Return the name of the package that a game is in, such as `Game2048` for `2048-v0`."""
    from textarena.envs.registration import ENV_REGISTRY

    return str(ENV_REGISTRY[env_id].entry_point).partition(":")[0].split(".")[-2]


def arguments_of(env_id: str) -> dict[str, Any]:
    """Return the arguments with which the registry makes a game, and the defaults of the others. An argument without
    either is None."""
    from textarena.envs.registration import ENV_REGISTRY

    module, _, name = str(ENV_REGISTRY[env_id].entry_point).partition(":")
    parameters = inspect.signature(getattr(importlib.import_module(module), name)).parameters
    defaults = {key: None if p.default is p.empty else p.default for key, p in parameters.items()}
    return {**defaults, **ENV_REGISTRY[env_id].kwargs}


def check_arguments(env_id: str, config: Mapping[str, Any]) -> None:
    """
    Check the names of a game's arguments.

    Raises:
        ValueError: If the game has no argument of such a name.
    """
    known = arguments_of(env_id)
    for name in config:
        if name not in known:
            raise ValueError(f"TextArena's {env_id} does not take {name!r}: {unknown_name('argument', name, known)}")


def _reason(error: Exception, family: str, config: Mapping[str, Any]) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, LookupError) and "nltk" in text:
        return f"it needs word lists of nltk that are not here: run `python -m nltk.downloader {NLTK_DATA}`."
    if isinstance(error, SyntaxError):
        version = ".".join(map(str, sys.version_info[:2]))
        return f"textarena.envs.{family} does not compile under Python {version} ({error.msg}, line {error.lineno})."
    if isinstance(error, ImportError):
        return f"a module is missing ({text.rpartition('Error: ')[2]})."
    if isinstance(error, FileNotFoundError):
        path = text.rpartition("textarena/envs/")[2].strip("'")
        return f"a file is missing from the installed TextArena ({path})."
    if re.search("player", text, re.IGNORECASE):
        return FOR_SEVERAL
    given = f" with {dict(config)}" if config else ""
    return f"it cannot be started{given} ({type(error).__name__}: {text})."
