"""Tasks made of TextArena's games for one player: rows with seeds, environments, and a reward function."""

import json
import random
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, partial
from typing import Any

from datasets import Dataset
from transformers.utils import get_json_schema

from trl_explore.environments.text_arena_games import GameMaker, GameRules, TextArenaGame
from trl_explore.environments.text_arena_registry import (
    arguments_of,
    check_arguments,
    family_of,
    known_ids,
    refusal_reason,
    without_downloads,
)
from trl_explore.names import unknown_name

DEFAULT_TURNS = 50  # limit for games whose constructor has no argument of `LIMITS`
# Arguments with which games limit their turns, each with the number of turns that a game takes beyond this limit.
# Bandit asks for one more choice after its `num_turns` turns.
LIMITS = {"max_turns": 0, "num_turns": 1, "num_guesses": 0, "N": 0}
NUMBER_OF_VALUES = "N"  # in Secretary: another number would be another game, so `max_turns` does not change it
SEED_OFFSET = 1_000_000  # difference between the default seed of the evaluation rows and the seed of the training rows
NUM_SEEDS = 2**31  # seeds of games are below this number
VARIANTS = ("-train", "-raw")  # an id with one of these ends names the same game with other wrappers
TURN_TOKENS = 50  # tokens of a tool call, a short answer, and the special tokens of both messages
CHARACTERS_PER_TOKEN = 2  # in the text of a board; prose has about four
HINT_SHARE = 0.5  # share of demonstrations that use the hints of the game
FINAL_MESSAGE = "Done."  # message of the assistant after the game's last answer


def textarena_reward(environments: list[TextArenaGame], **columns: Any) -> list[float | None]:
    """
    Return the reward of each game, see [`TextArenaGame.reward`].

    Args:
        environments (`list[TextArenaGame]`):
            The games that were played, `[B]`.
        columns (*optional*):
            Other arguments that TRL passes. They are ignored.

    Returns:
        `list[float]`: Rewards `[B]`. In most games they are between 0 and 1.
    """
    return [game.reward for game in environments]


class TextArenaSpec:
    """
    A game of [TextArena](https://github.com/LeonGuertler/TextArena) for one player, as a task for `GRPOTrainer`.

    The model plays by calling one tool, `act(action)`. The prompt holds the rules and the first position.

    ```python
    spec = TextArenaSpec("GuessTheNumber-v0", max_turns=6)
    trainer = GRPOTrainer(
        model="Qwen/Qwen3-0.6B",
        args=GRPOConfig(**spec.options),
        train_dataset=spec.train_dataset,
        reward_funcs=spec.reward_funcs,
        environment_factory=spec.environment_factory,
    )
    ```

    Args:
        env_id (`str`):
            Id of the game in TextArena's registry, such as `Minesweeper-v0-small`.
        size (`int`, *optional*, defaults to `1000`):
            Number of training rows, at least 1. Each row is a game with its own seed.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the random generator that chooses the seeds of the training rows.
        eval_size (`int`, *optional*, defaults to `128`):
            Number of evaluation rows, at least 1.
        eval_seed (`int`, *optional*):
            Seed of the random generator that chooses the seeds of the evaluation rows. `None` uses `seed` plus
            a million.
        max_turns (`int`, *optional*):
            Maximum number of tool calls in a game, at least 1. Invalid moves count. The game's constructor may have an
            argument for its own limit, such as `max_turns` or Wordle's `num_guesses`. If `config` does not contain
            this argument, it is set to the same number of turns. `None` uses the game's own limit, or 50 if its
            constructor has no argument for a limit.
        system_prompt (`str`, *optional*):
            System message of each prompt.
        rules (`str`, *optional*):
            Text to show instead of the game's rules. A shorter text gives shorter prompts.
        wins_only (`bool`, *optional*, defaults to `False`):
            If `True`, the reward is 1 for a win and 0 otherwise. A game is won if its own reward is at least 1. If
            `False`, the reward is the game's own, and many games also reward a part of the task.
        config (*optional*):
            Arguments of the game's constructor, such as `max_number=50`.

    Raises:
        ImportError: If TextArena is not installed.
        ValueError: If there is no such game, the game cannot be used, an argument is wrong, or `max_turns` is lower
            than a limit in `config` or than Secretary's number of values.
    """

    def __init__(
        self,
        env_id: str,
        *,
        size: int = 1000,
        seed: int = 0,
        eval_size: int = 128,
        eval_seed: int | None = None,
        max_turns: int | None = None,
        system_prompt: str | None = None,
        rules: str | None = None,
        wins_only: bool = False,
        **config: Any,
    ) -> None:
        known = known_ids()
        if env_id not in known:
            raise ValueError(f"`env_id` is {env_id!r}: {unknown_name('game of TextArena', env_id, known)}")
        _check_number("size", size, 1)
        _check_number("eval_size", eval_size, 1)
        _check_number("seed", seed, 0)
        if eval_seed is None:
            eval_seed = seed + SEED_OFFSET
        _check_number("eval_seed", eval_seed, 0)
        if max_turns is not None:
            _check_number("max_turns", max_turns, 1)
        reason = refusal_reason(env_id)
        if reason is not None:
            raise ValueError(f"`env_id` is {env_id!r}, which cannot be used: {reason}")
        check_arguments(env_id, config)
        self.env_id = env_id
        self.size, self.seed, self.eval_size = size, seed, eval_size
        self.eval_seed = eval_seed
        self.system_prompt = system_prompt
        self.config, self.max_turns = _with_limit(env_id, config, max_turns)
        reason = refusal_reason(env_id, self.config)
        if reason is not None:
            raise ValueError(f"`env_id` is {env_id!r}, which cannot be used with these arguments: {reason}")
        self._maker = GameMaker(env_id, self.config)
        self._rules = GameRules(self.max_turns, rules=rules, wins_only=wins_only)

    @property
    def name(self) -> str:
        """Name as given to [`load_spec`]."""
        return f"textarena:{self.env_id}"

    @cached_property
    def train_dataset(self) -> Dataset:
        """Training rows: `prompt`, to which TRL appends the rules and the first position, and `seed`."""
        return self._rows(_seeds(f"training {self.seed}", self.size, without=self._eval_seeds))

    @cached_property
    def eval_dataset(self) -> Dataset:
        """Held-out rows with the same columns. No seed is a seed of a training row."""
        return self._rows(self._eval_seeds)

    @property
    def reward_funcs(self) -> Callable[..., list[float | None]]:
        """Reward function `textarena_reward`."""
        return textarena_reward

    @property
    def environment_factory(self) -> Callable[[], TextArenaGame]:
        """Function that creates the environment of one rollout. It can be pickled."""
        return partial(TextArenaGame, self._maker, self._rules)

    @property
    def options(self) -> dict[str, Any]:
        """Values of fields of `GRPOConfig`. `max_tool_calling_iterations` is the maximum number of turns, and
        `max_completion_length` an estimate of the tokens of a game with that many turns."""
        turn = TURN_TOKENS + self._maker.board_length() // CHARACTERS_PER_TOKEN
        return {"max_tool_calling_iterations": self.max_turns, "max_completion_length": self.max_turns * turn}

    def demonstration(self, row: Mapping[str, Any], rng: random.Random) -> dict[str, Any]:
        """
        Play a game of GuessTheNumber as a demonstration.

        About half of the demonstrations use the game's hints: they guess the middle of the numbers that are still
        possible, and win if `max_turns` allows it. The others ignore the hints, and guess at random among the numbers
        that they have not guessed before.

        Args:
            row (`Mapping`):
                A row of this task.
            rng (`random.Random`):
                Source of randomness.

        Returns:
            `dict`: A row of `SFTTrainer`. `prompt`: the row's prompt with the rules. `completion`: tool calls and
            answers up to the end of the game, and a final message. `tools`: the schema of `act` as JSON text.

        Raises:
            ValueError: If the game is not GuessTheNumber.
        """
        if family_of(self.env_id) != "GuessTheNumber":
            raise ValueError(
                f"`env_id` is {self.env_id!r}, a game that writes no demonstrations: leave `warm_start_steps` out, or "
                "use GuessTheNumber-v0."
            )
        given = {**arguments_of(self.env_id), **self.config}
        game = self.environment_factory()
        rules = game.reset(seed=row["seed"])
        *others, last = row["prompt"]
        return {
            "prompt": [*others, {**last, "content": last["content"] + rules}],
            "completion": _guessing_game(game, given["min_number"], given["max_number"], rng),
            "tools": json.dumps([get_json_schema(game.act)]),
        }

    @cached_property
    def _eval_seeds(self) -> list[int]:
        return _seeds(f"evaluation {self.eval_seed}", self.eval_size)

    def _rows(self, seeds: list[int]) -> Dataset:
        prompt = [{"role": "user", "content": ""}]
        if self.system_prompt is not None:
            prompt.insert(0, {"role": "system", "content": self.system_prompt})
        return Dataset.from_dict({"prompt": [prompt] * len(seeds), "seed": seeds})


def list_names() -> list[str]:
    """
    Return the ids of the games that [`TextArenaSpec`] accepts on this machine, in the order of TextArena's registry.
    Ids that end in `-train` or `-raw` are left out, because they name the same games. Nothing is downloaded.

    Returns:
        `list[str]`: The ids.

    Raises:
        ImportError: If TextArena is not installed.
    """
    usable: dict[str, bool] = {}
    names = [name for name in known_ids() if not name.endswith(VARIANTS)]
    with without_downloads():
        for name in names:
            family = family_of(name)
            if family not in usable:
                usable[family] = refusal_reason(name) is None
    return [name for name in names if usable[family_of(name)]]


def _check_number(field: str, value: object, lowest: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
        raise ValueError(f"`{field}` is {value!r}; give a whole number of at least {lowest}.")


def _with_limit(env_id: str, config: Mapping[str, Any], max_turns: int | None) -> tuple[dict[str, Any], int]:
    """Return the arguments of a game, and its maximum number of turns. If the game has an argument for its limit, the
    arguments set it to fit `max_turns`. Raise a ValueError if `max_turns` is lower than a limit that must stay as it
    is."""
    given = {**arguments_of(env_id), **config}
    arguments = dict(config)
    if max_turns is None:
        limits = []
        for name, extra_turns in LIMITS.items():
            if given.get(name):
                limits.append(given[name] + extra_turns)
        max_turns = min(limits, default=DEFAULT_TURNS)
        if "max_turns" in given:
            arguments["max_turns"] = max_turns
        return arguments, max_turns
    for name, extra_turns in LIMITS.items():
        if name not in given:
            continue
        highest = max_turns - extra_turns
        if name not in config and name != NUMBER_OF_VALUES:
            arguments[name] = highest
        elif given[name] > highest:
            raise ValueError(
                f"`max_turns` is {max_turns}, but the rules of {env_id} announce `{name}={given[name]}`: set `{name}` "
                f"to at most {highest}, or `max_turns` to at least {given[name] + extra_turns}."
            )
    return arguments, max_turns


def _seeds(stream: str, number: int, without: Iterable[int] = ()) -> list[int]:
    """Return `number` different seeds of games that are not in `without`. `stream` is the seed of the random generator
    that chooses them."""
    # Sample enough seeds that `number` of them remain, even if all of `without` are among them.
    excluded = set(without)
    candidates = random.Random(stream).sample(range(NUM_SEEDS), number + len(excluded))
    return [seed for seed in candidates if seed not in excluded][:number]


def _guessing_game(game: TextArenaGame, low: int, high: int, rng: random.Random) -> list[dict[str, Any]]:
    """Play a game of GuessTheNumber for a number from `low` to `high`, and return the messages."""
    follows_hints = rng.random() < HINT_SHARE
    messages: list[dict[str, Any]] = []
    left = list(range(low, high + 1))
    while not game.done:
        if follows_hints:
            guess = left[(len(left) - 1) // 2]
        else:
            guess = rng.choice(left)
        answer = game.act(f"[{guess}]")
        messages += [_call(f"[{guess}]"), {"role": "tool", "name": "act", "content": answer}]
        if not follows_hints:
            left.remove(guess)
        elif "higher" in answer:
            left = [number for number in left if number > guess]
        else:
            left = [number for number in left if number < guess]
    return [*messages, {"role": "assistant", "content": FINAL_MESSAGE}]


def _call(action: str) -> dict[str, Any]:
    """Return a message of the assistant that calls `act`."""
    function = {"name": "act", "arguments": {"action": action}}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
