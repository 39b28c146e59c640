"""TextArena's registry, with checks for games that cannot be used here."""

import contextlib
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trl_explore.environments.text_arena_games import GameMaker, RandomStates, use_random_states
from trl_explore.names import unknown_name

# Games in which a language model of a paid service plays a role or judges.
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
    """Prevent games from downloading missing word lists inside the `with` block."""
    from textarena.envs.utils import word_lists

    nltk = word_lists.nltk
    before = nltk.download
    nltk.download = lambda *names, **options: False
    try:
        yield
    finally:
        nltk.download = before


def refusal_reason(env_id: str, config: Mapping[str, Any] | None = None) -> str | None:
    """
    Return the reason why a game cannot be used, or None if it can be used.

    Args:
        env_id (`str`):
            Id in TextArena's registry.
        config (`Mapping`, *optional*):
            Arguments of the game's constructor.

    Returns:
        `str` or `None`: The reason in one sentence.
    """
    from textarena import SinglePlayerState

    family = family_of(env_id)
    if family in ASKS_A_MODEL:
        return "it asks a language model of a paid service (OpenRouter) to play a role or to judge."
    try:
        with use_random_states(RandomStates.seeded(0)):
            game = GameMaker(env_id, config or {}).make()
            game.reset(num_players=1, seed=0)
            if not isinstance(game.state, SinglePlayerState):
                return FOR_SEVERAL
            if family not in FAULTS:
                return None
            return FAULTS[family](game)
    except Exception as error:  # a game may raise any type
        return _explain_failure(error, family, config or {})


def _fault_of_fifteen_puzzle(game: Any) -> str | None:
    if hasattr(game.state, "set_winners"):
        return None
    return "it cannot be won: this TextArena raises an AttributeError (`set_winners`) at the winning move."


def _fault_of_bandit(game: Any) -> str | None:
    means = game.state.game_state["ground_truth"]
    game.state.turn = game.num_turns  # the reward depends on the last choice only
    game.step(f"[{max(means, key=means.get)}]")
    if game.state.rewards[0] >= 1:
        return None
    return "its reward is upside down: the best button gets 0, and a worse button gets the difference to the best."


def _fault_of_set(game: Any) -> str | None:
    game.step("[1, 1, 1]")
    if not game.state.game_state["score"]:
        return None
    return "it gives the reward without a game: three times the same card, [1, 1, 1], counts as a set."


# Checks of games that reward wrong moves or fail at the winning move in TextArena 0.7.4. Each check plays the game and
# does not compare versions, so it accepts a later version without the fault.
FAULTS: dict[str, Callable[[Any], str | None]] = {
    "FifteenPuzzle": _fault_of_fifteen_puzzle,
    "Bandit": _fault_of_bandit,
    "Set": _fault_of_set,
}


def family_of(env_id: str) -> str:
    """Return the name of a game's package in TextArena, such as `Game2048` for `2048-v0`."""
    from textarena.envs.registration import ENV_REGISTRY

    return str(ENV_REGISTRY[env_id].entry_point).partition(":")[0].split(".")[-2]


def arguments_of(env_id: str) -> dict[str, Any]:
    """Return the arguments of a game's constructor with their values. A value comes from the registry, or else from
    the constructor's default. It is None if there is neither."""
    from textarena.envs.registration import ENV_REGISTRY

    module, _, name = str(ENV_REGISTRY[env_id].entry_point).partition(":")
    parameters = inspect.signature(getattr(importlib.import_module(module), name)).parameters
    arguments: dict[str, Any] = {}
    for key, parameter in parameters.items():
        arguments[key] = None
        if parameter.default is not parameter.empty:
            arguments[key] = parameter.default
    return arguments | ENV_REGISTRY[env_id].kwargs


def check_arguments(env_id: str, config: Mapping[str, Any]) -> None:
    """
    Check the names of a game's arguments.

    Raises:
        ValueError: If `config` has a name that is not an argument of the game.
    """
    known = arguments_of(env_id)
    for name in config:
        if name not in known:
            raise ValueError(f"TextArena's {env_id} does not take {name!r}: {unknown_name('argument', name, known)}")


def _explain_failure(error: Exception, family: str, config: Mapping[str, Any]) -> str:
    """Explain in one sentence why a game failed to start."""
    text = " ".join(str(error).split())
    if isinstance(error, LookupError) and "nltk" in text:
        return f"it needs word lists of nltk, which are missing: run `python -m nltk.downloader {NLTK_DATA}`."
    if isinstance(error, SyntaxError):
        version = ".".join(map(str, sys.version_info[:2]))
        return f"textarena.envs.{family} does not compile under Python {version} ({error.msg}, line {error.lineno})."
    if isinstance(error, ImportError):
        return f"a module is missing ({text.rpartition('Error: ')[2]})."
    if isinstance(error, FileNotFoundError):
        path = text.rpartition("textarena/envs/")[2].strip("'")
        return f"a file is missing from the installed TextArena ({path})."
    if re.search("player", text, re.IGNORECASE):  # the game refused `num_players=1`
        return FOR_SEVERAL
    given = ""
    if config:
        given = f" with {dict(config)}"
    return f"it cannot be started{given} ({type(error).__name__}: {text})."
