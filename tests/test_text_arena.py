"""Games of TextArena as tasks: plain GRPO, every method for agents, copies of started games, rewards and refusals."""

import copy
import json
import pickle
import random
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from trl import GRPOConfig, GRPOTrainer
from world import make_agent, one_batch, says

pytest.importorskip("textarena")

from textarena.envs.registration import ENV_REGISTRY

from trl_explore.environments import TextArenaSpec, load_spec
from trl_explore.environments import text_arena_registry as registry
from trl_explore.environments.text_arena import list_names, textarena_reward
from trl_explore.methods import METHODS
from trl_explore.pretrained.teaching import demonstrations

GUESS = "GuessTheNumber-v0"


@pytest.fixture(autouse=True)
def no_downloads():
    with registry.without_downloads():
        yield


def game_of(env_id, seed=0, **options):
    game = TextArenaSpec(env_id, size=1, eval_size=1, **options).environment_factory()
    game.reset(seed=seed)
    return game


# -------------------------------------------------------------------------------------------------------- in trainers


class Voice:
    """Writes a random guess, or sometimes a message without a tool call."""

    def __call__(self, trainer, prompt_ids, *others, **options):
        return [trainer._tokenizer(self.answer() + "<eos>")["input_ids"] for _ in prompt_ids], None

    def answer(self):
        if torch.rand(()) < 0.1:
            return "done"
        return f"!act:action={torch.randint(1, 10, ())}"


@pytest.fixture
def voice(monkeypatch):
    says(Voice(), monkeypatch.setattr)


def agent(folder, cls=GRPOTrainer, config=GRPOConfig, *, spec=None, **options):
    """Return a trainer with a tiny agent. The rules are one word, because the context has only 256 characters."""
    spec = spec or TextArenaSpec(GUESS, size=8, eval_size=4, max_turns=4, max_number=9, rules="guess")
    own = dict(train_dataset=spec.train_dataset, eval_dataset=spec.eval_dataset, reward_funcs=[spec.reward_funcs])
    own |= dict(environment_factory=spec.environment_factory)
    sizes = dict(per_device_train_batch_size=8, num_generations=4)
    return make_agent(cls, config, folder, **{**own, **sizes, **spec.options, "max_completion_length": 220, **options})


def test_plain_grpo_plays_and_is_rewarded_by_the_game(tmp_path, voice):
    trainer = agent(tmp_path)
    assert [tool.__name__ for tool in trainer.tools] == ["act"]  # and neither `snapshot` nor `restore`
    assert trainer.reward_func_names == ["textarena_reward"]
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "rewards/textarena_reward/mean" in entry]
    assert len(steps) == 2 and all(0 < entry["reward"] <= 1 for entry in steps)
    assert all(entry["tools/call_frequency"] > 1 and entry["tools/failure_frequency"] == 0 for entry in steps)
    played = one_batch(trainer)
    text = trainer._tokenizer.decode(played["completion_ids"][0])
    assert "number is" in text or "ongratulations" in text
    assert all(game.num_turns > 0 for game in trainer.environments[:1])


ACTIONS = dict(mode="agent", num_actions=2, action_template="{problem}?{actions}", action_separator=";")
# Options of each method for a game of four moves, and a metric that is above 0 if the method was active.
AGENTS = {
    "branpo": (dict(), "branch/sampled_tokens"),
    "deep_grpo": (dict(num_branches=2, success_threshold=0.95), "pivots/sampled_tokens"),
    "agent_tree_grpo": (dict(), "branch/sampled_tokens"),
    "gigpo": (dict(), "steps/shared_fraction"),
    "sesa": (ACTIONS, "agent/duplicate_actions"),
}


@pytest.mark.parametrize("name", AGENTS)
def test_every_method_for_agents_branches_from_the_middle_of_games(tmp_path, voice, name):
    options, metric = AGENTS[name]
    method = METHODS[name]
    trainer = agent(tmp_path, method.trainer_class, method.config_class, **options)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        trainer.train()
    steps = [entry for entry in trainer.state.log_history if metric in entry]
    assert len(steps) == 2 and (metric == "agent/duplicate_actions" or any(entry[metric] > 0 for entry in steps))
    states = getattr(getattr(trainer, "forks", None), "states", None)
    if states is not None:
        assert states._kinds == {None: "snapshot"}


# ------------------------------------------------------------------------------------------------------------- copies

DIRECTIONS = ("up", "down", "left", "right")
# Mostly legal moves for games of each kind. The first three games use random numbers after `reset`.
MOVES = {
    "2048-v0-ultra-easy": lambda rng: rng.choice(DIRECTIONS),
    "Blackjack-v0": lambda rng: rng.choice(["hit", "stand"]),
    "Minesweeper-v0-small": lambda rng: f"{rng.randrange(5)} {rng.randrange(5)}",
    GUESS: lambda rng: str(rng.randint(1, 20)),
    "Mastermind-v0": lambda rng: " ".join(map(str, rng.sample(range(1, 7), 4))),
    "FrozenLake-v0-random": lambda rng: rng.choice(DIRECTIONS),
    "TowerOfHanoi-v0": lambda rng: " ".join(rng.sample("ABC", 2)),
    "LightsOut-v0": lambda rng: f"{rng.randrange(5)} {rng.randrange(5)}",
    "Slitherlink-v0": lambda rng: f"{rng.choice('hv')} {rng.randrange(4)} {rng.randrange(4)}",
    "Secretary-v0-long": lambda rng: "continue",
    "Sokoban-v0": lambda rng: rng.choice(DIRECTIONS),
    "RushHour-v0": lambda rng: rng.choice("XABCDFGHIJ") + rng.choice("+-"),
    "PegJump-v0": lambda rng: f"{rng.randint(1, 15)} {rng.randint(1, 15)}",
    "Countdown-v0": lambda rng: f"{rng.randrange(3)} {rng.randrange(3)} {rng.choice('+*')}",
    "Cryptarithm-v0": lambda rng: f"{rng.choice('SENDMORY')} {rng.randrange(10)}",
    "Sudoku-v0-very-easy": lambda rng: f"{rng.randint(1, 9)} {rng.randint(1, 9)} {rng.randint(1, 9)}",
    "ThreeCardMonte-v0": lambda rng: str(rng.randrange(3)),
    "Crosswords-v0": lambda rng: f"{rng.randrange(8)} {rng.randrange(8)} {rng.choice('aeirst')}",
    "LogicPuzzle-v0": lambda rng: f"{rng.choice('ab')} {rng.choice('cd')} X",
}


def played_on(game, env_id, seed, number, *, disturb=None):
    """Make `number` moves, which `seed` chooses. Return the answer, the reward and `done` after each move."""
    moves, told = random.Random(f"moves {seed}"), []
    for _ in range(number):
        answer = game.act(MOVES[env_id](moves))
        told.append((answer, game.reward, game.done))
        if disturb is not None:
            disturb()
    return told


@pytest.mark.parametrize("env_id", MOVES)
def test_a_copy_in_mid_game_plays_on_as_the_original(env_id):
    spec = TextArenaSpec(env_id, size=1, eval_size=1)
    game, fresh, other = spec.environment_factory(), spec.environment_factory(), game_of("Blackjack-v0")
    fresh.reset(seed=98)

    def disturb():
        random.seed(5)
        np.random.seed(5)
        if other.done:
            other.reset(seed=97)
        other.act("hit")

    lengths = []
    for seed in (1, 2):
        game.reset(seed=seed)
        played_on(game, env_id, seed, 2)
        if game.done:  # two invalid moves in a row end a game
            game.reset(seed=seed)
        state, twin = game.snapshot(), copy.deepcopy(game)
        expected = played_on(game, env_id, seed + 100, 30)
        lengths.append(sum(not done for *_, done in expected))
        assert played_on(twin, env_id, seed + 100, 30, disturb=disturb) == expected
        for _ in range(2):  # a state can be restored several times, also in another instance
            fresh.restore(state)
            assert played_on(fresh, env_id, seed + 100, 30, disturb=disturb) == expected
    assert max(lengths) >= (0 if env_id in ("ThreeCardMonte-v0", "LogicPuzzle-v0") else 1)


def test_games_leave_the_random_state_of_a_run_alone():
    random.seed(1)
    np.random.seed(1)
    expected = random.random(), np.random.rand()
    random.seed(1)
    np.random.seed(1)
    for env_id in ("Blackjack-v0", "Sokoban-v0", "RushHour-v0"):
        game = game_of(env_id)
        copy.deepcopy(game).act("hit")
        game.restore(game.snapshot())
    assert (random.random(), np.random.rand()) == expected


@pytest.mark.parametrize("env_id", ["Blackjack-v0", "RushHour-v0"])
def test_a_seed_gives_one_game_whatever_came_before(env_id):
    spec = TextArenaSpec(env_id, size=1, eval_size=1)
    first, second = spec.environment_factory(), spec.environment_factory()
    for seed in range(3):
        second.reset(seed=seed)
    second.act("x")
    random.seed(8)
    assert first.reset(seed=1) == second.reset(seed=1)
    assert first.reset(seed=2) != second.reset(seed=1)
    # Puzzles that the constructor draws depend on the seed, too.
    drawn = TextArenaSpec("Countdown-v0", size=1, eval_size=1, numbers=None, target=None)
    first, second = drawn.environment_factory(), drawn.environment_factory()
    shown = [first.reset(seed=seed) for seed in range(4)]
    assert len(set(shown)) == 4 and [second.reset(seed=seed) for seed in range(4)] == shown


# ------------------------------------------------------------------------------------------- the rules of environments


def test_a_game_shows_its_rules_then_only_what_is_new():
    game = TextArenaSpec(GUESS, size=1, eval_size=1, max_number=50).environment_factory()
    rules = game.reset(seed=0, prompt=[{"role": "user", "content": ""}], other=3)
    assert rules.startswith("You are Player 0. You are playing Guess The Number.") and "between 1 and 50" in rules
    number = game._started.game.game_number
    assert game.act(str(1 if number > 1 else 2)) in ("The target number is higher.", "The target number is lower.")
    assert not game.done and game.num_turns == 1
    assert game.act(f"[{number}]") == "Congratulations! You guessed the correct number."
    assert game.done and game.reward == 1
    before = game.snapshot()
    assert game.act("5") == "The game is over." and game.num_turns == before.turns == 2
    own = TextArenaSpec("TowerOfHanoi-v0", size=1, eval_size=1, rules="From A to C.").environment_factory()
    shown = own.reset(seed=0)
    assert shown.startswith("From A to C.\nCurrent Board:") and "You are playing" not in shown


def test_two_invalid_moves_in_a_row_end_a_game():
    game = game_of("TowerOfHanoi-v0")
    assert game.act("A B").startswith("You moved disk 1 from A to B.")
    assert "invalid move" in game.act("A B") and not game.done
    assert game.act("what?").startswith("Invalid Move") and game.done
    other = game_of("Cryptarithm-v0")
    other.act("what?")
    other.act("what?")
    # An explanation in the place of a reward counts as nothing.
    assert other.done and isinstance(other._started.game.state.rewards[0], str) and other.reward == 0


def test_turns_are_limited_and_the_game_knows():
    spec = TextArenaSpec(GUESS, size=1, eval_size=1, max_turns=2)
    assert spec.max_turns == spec.options["max_tool_calling_iterations"] == 2
    game = spec.environment_factory()
    assert "within 2 turns" in game.reset(seed=0)
    number = game._started.game.game_number
    wrong = [guess for guess in range(1, 21) if guess != number]
    game.act(wrong[0])  # a model may pass a number
    assert not game.done
    assert game.act(wrong[-1]).endswith("No turns are left. The game is over.") and game.done
    assert game.reward == pytest.approx(1 - abs(wrong[-1] - number) / 19)  # the game's reward for a near guess
    assert game_of("2048-v0")._rules.max_turns == 50
    assert TextArenaSpec("Sudoku-v0", size=1, eval_size=1).max_turns == 100  # the limit of the game
    assert TextArenaSpec("Secretary-v0", size=1, eval_size=1, N=7).max_turns == 7
    assert TextArenaSpec("Secretary-v0", size=1, eval_size=1, max_turns=7).config == {}


def test_rewards_are_the_games_or_wins_only():
    plain, wins = (game_of("FrozenLake-v0", seed=1, wins_only=only) for only in (False, True))
    for game in (plain, wins):
        game.act("right" if "H" not in str(game._started.game.state.game_state["grid"][0][1]) else "down")
    assert plain.reward == pytest.approx(1 / 6) and wins.reward == 0
    assert textarena_reward([plain, wins], prompts=[]) == [plain.reward, 0.0]
    won = game_of(GUESS, wins_only=True)
    won.act(won._started.game.game_number)
    assert won.reward == 1
    never_started = TextArenaSpec(GUESS, size=1, eval_size=1).environment_factory()
    assert never_started.reward == 0
    with pytest.raises(RuntimeError, match="call `reset"):
        never_started.act("5")


def empty_cells(game):
    return [(i, j) for i in range(9) for j in range(9) if game.game_board[i][j] == 0]


def hidden_letters(game):
    state = game.state.game_state
    cells = [(i, j, letter) for i, row in enumerate(state["solution"]) for j, letter in enumerate(row)]
    return [f"{i} {j} {letter}" for i, j, letter in cells if letter.isalpha() and state["board"][i][j] == "_"]


def marks(game):
    rows = [item for table in game.game_board_solution.values() for item in table.items()]
    return [f"{name} {other} {mark}" for name, row in rows for other, mark in row.items()]


def safe_cells(game):
    yield "0 0"
    for i in range(game.rows):
        for j in range(game.cols):
            if game.grid[i][j] != -1 and not game.revealed[i][j]:
                yield f"{i} {j}"


def until_the_best(game):
    draws = game.state.game_state["draws"]
    return ["continue"] * draws.index(max(draws)) + ["accept"]


SOLUTIONS = {
    GUESS: lambda game: [str(game.game_number)],
    "ThreeCardMonte-v0": lambda game: [str(game.ball_pos)],
    "Mastermind-v0": lambda game: [" ".join(map(str, game.state.game_state["secret_code"]))],
    "TowerOfHanoi-v0": lambda game: ["A C", "A B", "C B", "A C", "B A", "B C", "A C"],
    "Cryptarithm-v0": lambda game: ["S 9", "E 5", "N 6", "D 7", "M 1", "O 0", "R 8", "Y 2"],
    "Sudoku-v0": lambda game: [f"{i + 1} {j + 1} {game.full_grid[i][j]}" for i, j in empty_cells(game)],
    "Crosswords-v0": hidden_letters,
    "LogicPuzzle-v0": marks,
    "Minesweeper-v0": safe_cells,
    "Secretary-v0": until_the_best,
}


@pytest.mark.parametrize("env_id", SOLUTIONS)
def test_a_solved_game_is_worth_one_within_the_turns_that_it_has(env_id):
    for only in (False, True):
        game = game_of(env_id, seed=3, wins_only=only)
        for move in SOLUTIONS[env_id](game._started.game):
            assert not game.done and (game.reward < 1 or not only)
            game.act(move)
        assert game.done and game.reward == 1


def test_brackets_are_added_where_textarena_adds_them():
    assert "invalid" not in game_of(GUESS).act("20")
    assert "invalid" not in game_of(f"{GUESS}-train").act("20")
    raw = game_of(f"{GUESS}-raw")
    assert "invalid" in raw.act("20") and "invalid" not in raw.act("[20]")


def test_a_seed_without_a_puzzle_gives_the_next_ones(monkeypatch):
    from textarena.envs.GuessTheNumber.env import GuessTheNumberEnv

    asked, reset = [], GuessTheNumberEnv.reset

    def fails(self, num_players, seed):
        asked.append(seed)
        if seed < limit:
            raise ZeroDivisionError("no puzzle")
        reset(self, num_players, seed)

    game = TextArenaSpec(GUESS, size=1, eval_size=1).environment_factory()
    monkeypatch.setattr(GuessTheNumberEnv, "reset", fails)
    limit = 7
    game.reset(seed=5)
    assert asked == [5, 6, 7]
    limit = 10**9
    with pytest.raises(ZeroDivisionError, match="no puzzle"):
        game.reset(seed=5)
    assert game.reward == 0  # and not the reward of the previous game


# ------------------------------------------------------------------------------------------------------ specs and rows


def test_rows_are_plain_and_evaluation_games_are_others(monkeypatch):
    spec = load_spec(f"textarena:{GUESS}", {"size": 300, "eval_size": 40, "system_prompt": "Play."}, seed=4)
    assert spec.name == f"textarena:{GUESS}"
    train, held_out = spec.train_dataset, spec.eval_dataset
    assert (len(train), len(held_out)) == (300, 40) and train.column_names == ["prompt", "seed"]
    assert train[0]["prompt"] == [{"role": "system", "content": "Play."}, {"role": "user", "content": ""}]
    assert len({*train["seed"], *held_out["seed"]}) == 340
    again = TextArenaSpec(GUESS, size=300, eval_size=40, seed=4)
    assert again.train_dataset["seed"] == train["seed"] and again.eval_dataset["seed"] == held_out["seed"]
    assert TextArenaSpec(GUESS, size=300, eval_size=40, seed=5).train_dataset["seed"] != train["seed"]
    json.dumps(train.to_list())
    # With few possible seeds, training and evaluation rows would share some.
    monkeypatch.setattr("trl_explore.environments.text_arena.NUM_SEEDS", 100)
    spec = TextArenaSpec(GUESS, size=60, eval_size=40)
    assert sorted([*spec.train_dataset["seed"], *spec.eval_dataset["seed"]]) == list(range(100))


def test_a_factory_can_be_sent_to_another_process():
    spec = TextArenaSpec("Blackjack-v0", size=1, eval_size=1, num_hands=2)
    first, second = spec.environment_factory(), pickle.loads(pickle.dumps(spec.environment_factory))()
    assert first.reset(seed=3) == second.reset(seed=3)
    assert played_on(first, "Blackjack-v0", 0, 5) == played_on(second, "Blackjack-v0", 0, 5)


@pytest.mark.slow
def test_nothing_is_imported_before_a_spec_is_made():
    code = "import sys, trl_explore.environments.text_arena; assert 'textarena' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(ImportError, match=r'pip install "trl-explore\[textarena\]"'):
        TextArenaSpec(GUESS)


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("env_id", "options", "message"),
    [
        ("GuesTheNumber-v0", {}, "`env_id` is 'GuesTheNumber-v0': unknown game of TextArena .*'GuessTheNumber-v0'"),
        ("Nothing like it", {}, "unknown game of TextArena 'Nothing like it'"),
        ("TicTacToe-v0", {}, "'TicTacToe-v0', which cannot be used: it is a game for two or more players"),
        ("PublicGoodsGame-v0", {}, "it is a game for two or more players"),
        ("TwentyQuestions-v0", {}, "it asks a language model of a paid service"),
        ("FifteenPuzzle-v0", {}, "it cannot be won"),
        ("Bandit-v0-hard", {}, "its reward is upside down"),
        ("Set-v0", {}, "it gives the reward without a game: three times the same card"),
        ("ScorableGames-v0", {}, "a file is missing from the installed TextArena"),
        ("UsedCar-v0-balanced", {}, "a module is missing"),
        ("Klondike-v0", {}, "Klondike does not compile under Python"),
        (GUESS, {"max_numbr": 5}, "does not take 'max_numbr': .* did you mean 'max_number'"),
        (GUESS, {"min_number": 30}, r"it cannot be started with .*'min_number': 30.* \(ValueError"),
        (GUESS, {"size": 0}, "`size` is 0; give a whole number of at least 1"),
        (GUESS, {"eval_size": 2.0}, "`eval_size` is 2.0"),
        (GUESS, {"max_turns": 0}, "`max_turns` is 0"),
        ("Secretary-v0", {"max_turns": 3}, "rules of Secretary-v0 announce `N=5`: set `N` to at most 3, or"),
        (GUESS, {"seed": -1}, "`seed` is -1"),
        (GUESS, {"eval_seed": "x"}, "`eval_seed` is 'x'"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_reason(env_id, options, message, monkeypatch):
    monkeypatch.setenv("OPENROUTER_API_KEY", "key")  # which does not bring a paid service in
    with pytest.raises(ValueError, match=message):
        TextArenaSpec(env_id, **options)


@pytest.mark.slow
def test_every_id_of_the_registry_is_usable_or_refused_in_one_sentence():
    """The usable games for one player make some moves, from a snapshot and from the original."""
    usable, refused = [], {}
    for env_id in registry.known_ids():
        reason = registry.refusal_reason(env_id)
        if reason is None:
            usable.append(env_id)
        else:
            refused.setdefault(reason, []).append(env_id)
    assert len(usable) + sum(map(len, refused.values())) == len(ENV_REGISTRY)
    assert len(usable) >= 159
    for reason in refused:
        assert reason.endswith(".") and len(reason) < 200
        assert not re.search(r"\n|site-packages|it cannot be started", reason)
    assert set(list_names()) == {env_id for env_id in usable if not env_id.endswith(("-train", "-raw"))}
    odd = ["", "x", "[", "[]", "[1 1]", "[0 0 a]", "[1, 2, 3]", "[99999999999999999999]", "[up]", "[A C]", "5"]
    odd.append("[\u0669]")
    for env_id in list_names():
        game = game_of(env_id)
        rng = random.Random(env_id)
        assert game.act(rng.choice(odd))
        state = game.snapshot()
        moves = [rng.choice(odd) for _ in range(4)]
        expected = [(game.act(move), game.reward, game.done) for move in moves]
        assert all(answer and -1 <= reward <= 1 for answer, reward, _ in expected), env_id
        game.restore(state)
        assert [(game.act(move), game.reward, game.done) for move in moves] == expected, env_id


WORD_GAMES = """
import copy, sys
import nltk
nltk.data.path[:] = [sys.argv[1]]
nltk.download = lambda *names, **options: False
nltk.pos_tag = lambda words: [(word, "NN") for word in words]
from trl_explore.environments import TextArenaSpec
for env_id, move in (("Wordle-v0", "plane"), ("Hangman-v0", "e"), ("WordSearch-v0", "[1 1 1 5]")):
    game = TextArenaSpec(env_id, size=1, eval_size=1).environment_factory()
    assert game.reset(seed=3)
    game.act(move)
    twin, state = copy.deepcopy(game), game.snapshot()
    told = [game.act(guess) for guess in ("stone", "t", "water")]
    assert told == [twin.act(guess) for guess in ("stone", "t", "water")], env_id
    game.restore(state)
    assert told == [game.act(guess) for guess in ("stone", "t", "water")], env_id
    if env_id == "Wordle-v0":
        assert twin._started.game.dictionary.uk_words is game._started.game.dictionary.uk_words
game = TextArenaSpec("Wordle-v0", max_turns=4).environment_factory()
assert "You have 4 attempts" in game.reset(seed=3)
game = TextArenaSpec("Wordle-v0", max_turns=4, num_guesses=3).environment_factory()
assert "You have 3 attempts" in game.reset(seed=3)
"""


@pytest.mark.slow
def test_word_games_work_where_their_word_lists_are_there(tmp_path):
    """The test writes short word lists in the place of nltk's. Nothing is downloaded."""
    folder = tmp_path / "corpora" / "words"
    folder.mkdir(parents=True)
    words = "\n".join(["stone", "plane", "water", "apple", "house", "river", "train", "bread"]) + "\n"
    for name in ("en", "en-basic"):
        (folder / name).write_text(words)
    (folder / "README").write_text("words")
    subprocess.run([sys.executable, "-c", WORD_GAMES, str(tmp_path)], check=True)


# ------------------------------------------------------------------------------------------------------ demonstrations


def test_demonstrations_are_games_as_they_are_played_and_about_half_are_won():
    spec = TextArenaSpec(GUESS, size=200, eval_size=1, max_number=50, max_turns=6)
    won = 0
    for row, shown in zip(spec.train_dataset, demonstrations(spec, 200, seed=0), strict=True):
        game = spec.environment_factory()
        assert shown["prompt"] == [{"role": "user", "content": game.reset(**row)}]
        *messages, last = shown["completion"]
        assert last == {"role": "assistant", "content": "Done."}
        for call, answer in zip(messages[::2], messages[1::2], strict=True):
            assert not game.done
            assert game.act(**call["tool_calls"][0]["function"]["arguments"]) == answer["content"]
            assert "invalid" not in answer["content"].lower()
        assert game.done
        won += game.reward == 1
        (tool,) = json.loads(shown["tools"])
        assert tool["function"]["name"] == "act" and list(tool["function"]["parameters"]["properties"]) == ["action"]
    assert 0.4 < won / 200 < 0.7


def test_other_games_have_no_demonstrations():
    spec = TextArenaSpec("Mastermind-v0", size=1, eval_size=1)
    message = "'Mastermind-v0', a game that writes no demonstrations: leave `warm_start_steps` out"
    with pytest.raises(ValueError, match=message):
        spec.demonstration(spec.train_dataset[0], random.Random(0))
