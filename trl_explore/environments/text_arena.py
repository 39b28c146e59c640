"""Games of TextArena as a task: rows with seeds, environments that play, and the reward of the games."""

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
    why_not,
    without_downloads,
)
from trl_explore.names import unknown_name

DEFAULT_TURNS = 50  # of games without a limit of their own
# Arguments by which games limit their turns, with the number of extra turns: Bandit asks for one more choice.
LIMITS = {"max_turns": 0, "num_turns": 1, "num_guesses": 0, "N": 0}
SEED_OFFSET = 1_000_000  # added to the seed of the training rows gives the seed of the evaluation rows
NUM_SEEDS = 2**31  # of games
VARIANTS = ("-train", "-raw")  # ids of the same games with other wrappers, which are not used here
TURN_TOKENS = 50  # of a tool call, a short answer, and the marks of two turns
CHARACTERS_PER_TOKEN = 2  # of boards; prose has four
CAREFUL_SHARE = 0.5  # of demonstrations that follow the hints of the game
LAST_WORD = "Done."


def textarena_reward(environments: list[TextArenaGame], **columns: Any) -> list[float | None]:
    """
    Reward of each game, see [`TextArenaGame.reward`].

    Args:
        environments (`list[TextArenaGame]`):
            The games that were played, `[B]`.
        columns (*optional*):
            Other arguments of TRL, which are not read.

    Returns:
        `list[float]`: Rewards `[B]`, 0 to 1 for most games.
    """
    return [game.reward for game in environments]


class TextArenaSpec:
    """
    A game of [TextArena](https://github.com/LeonGuertler/TextArena) for one player, as a task for `GRPOTrainer`.

    The model plays by calls of one tool, `act(action)`. The rules and the first position are the prompt.

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
            Number of training rows, at least 1. Each is a game of another seed.
        seed (`int`, *optional*, defaults to `0`):
            Seed from which the seeds of the training rows are drawn.
        eval_size (`int`, *optional*, defaults to `128`):
            Number of evaluation rows, at least 1.
        eval_seed (`int`, *optional*):
            Seed from which the seeds of the evaluation rows are drawn; `None`: `seed` plus a million.
        max_turns (`int`, *optional*):
            Limit of tool calls, at least 1; invalid moves count. If the game has a limit of its own, it gets this one.
            `None` keeps the game's limit, and sets 50 if it has none.
        system_prompt (`str`, *optional*):
            System message of each prompt.
        rules (`str`, *optional*):
            Text to show instead of the game's rules. Short rules make cheap prompts.
        wins_only (`bool`, *optional*, defaults to `False`):
            Give 1 for a win (a reward of the game of at least 1) and 0 otherwise. By default the reward is the game's,
            and many games also reward the part of the task that is done.
        config (*optional*):
            Arguments of the game's constructor, such as `max_number=50`.

    Raises:
        ImportError: If TextArena is not installed.
        ValueError: If there is no such game, the game cannot be used, or an argument is wrong.
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
        eval_seed = seed + SEED_OFFSET if eval_seed is None and isinstance(seed, int) else eval_seed
        for name, value, lowest in (("size", size, 1), ("eval_size", eval_size, 1), ("seed", seed, 0)):
            _check_number(name, value, lowest)
        _check_number("eval_seed", eval_seed, 0)
        if max_turns is not None:
            _check_number("max_turns", max_turns, 1)
        reason = why_not(env_id)
        if reason is not None:
            raise ValueError(f"`env_id` is {env_id!r}, which cannot be used: {reason}")
        check_arguments(env_id, config)
        self.env_id = env_id
        self.size, self.seed, self.eval_size = size, seed, eval_size
        self.eval_seed = eval_seed
        self.system_prompt = system_prompt
        self.config, self.max_turns = _with_limit(env_id, config, max_turns)
        reason = why_not(env_id, self.config)
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
        """Makes the environment of one rollout. It can be pickled."""
        return partial(TextArenaGame, self._maker, self._rules)

    @property
    def options(self) -> dict[str, Any]:
        """Fields of `GRPOConfig`: as many tool calls as a game has turns, and an estimate of the tokens of a game."""
        turn = TURN_TOKENS + self._maker.board_length() // CHARACTERS_PER_TOKEN
        return {"max_tool_calling_iterations": self.max_turns, "max_completion_length": self.max_turns * turn}

    def demonstration(self, row: Mapping[str, Any], rng: random.Random) -> dict[str, Any]:
        """
        Show a game of GuessTheNumber. Half of the games guess the middle of the numbers that are still possible, and
        win if `max_turns` allows it. The others ignore the hints, and guess any number that was not guessed before.

        Args:
            row (`Mapping`):
                A row of the data.
            rng (`random.Random`):
                Chooses the player and its guesses.

        Returns:
            `dict`: A row of `SFTTrainer`. `prompt`: the row's prompt with the rules. `completion`: tool calls and
            answers up to the end of the game, and a last word. `tools`: the schema of `act` as JSON text.

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
        system = [] if self.system_prompt is None else [{"role": "system", "content": self.system_prompt}]
        prompt = [*system, {"role": "user", "content": ""}]
        return Dataset.from_dict({"prompt": [prompt] * len(seeds), "seed": seeds})


def list_names() -> list[str]:
    """
    Return the ids of the games that [`TextArenaSpec`] takes on this machine, in the order of TextArena's registry. Ids
    with `-train` and `-raw` are left out, as they stand for the same games. Nothing is downloaded.

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
                usable[family] = why_not(name) is None
    return [name for name in names if usable[family_of(name)]]


def _check_number(field: str, value: object, lowest: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
        raise ValueError(f"`{field}` is {value!r}; give a whole number of at least {lowest}.")


def _with_limit(env_id: str, config: Mapping[str, Any], max_turns: int | None) -> tuple[dict[str, Any], int]:
    """Arguments of a game with its limit of turns, and that limit."""
    given = {**arguments_of(env_id), **config}
    if max_turns is None:
        own = [given[name] + more for name, more in LIMITS.items() if given.get(name)]
        max_turns = min(own, default=DEFAULT_TURNS)
    return ({**config, "max_turns": max_turns} if "max_turns" in given else dict(config)), max_turns


def _seeds(stream: str, number: int, without: Iterable[int] = ()) -> list[int]:
    """Different seeds of games, drawn from a stream of that name."""
    left_out = set(without)
    drawn = random.Random(stream).sample(range(NUM_SEEDS), number + len(left_out))
    return [seed for seed in drawn if seed not in left_out][:number]


def _guessing_game(game: TextArenaGame, low: int, high: int, rng: random.Random) -> list[dict[str, Any]]:
    """Play a game of GuessTheNumber for a number from `low` to `high`."""
    follows_hints = rng.random() < CAREFUL_SHARE
    messages: list[dict[str, Any]] = []
    left = list(range(low, high + 1))
    while not game.done:
        guess = left[(len(left) - 1) // 2] if follows_hints else rng.choice(left)
        answer = game.act(f"[{guess}]")
        messages += [_call(f"[{guess}]"), {"role": "tool", "name": "act", "content": answer}]
        if not follows_hints:
            left.remove(guess)
        elif "higher" in answer:
            left = [number for number in left if number > guess]
        else:
            left = [number for number in left if number < guess]
    return [*messages, {"role": "assistant", "content": LAST_WORD}]


def _call(action: str) -> dict[str, Any]:
    function = {"name": "act", "arguments": {"action": action}}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
