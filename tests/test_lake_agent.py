"""FrozenLake for agents: demonstrations are real games, and a tiny model learns to play and to differ."""

import dataclasses
import random
import re

import pytest
import torch
from transformers import AutoTokenizer
from trl.chat_template_utils import parse_response
from world import QUIET

from examples.benchmarks.tasks.lake_agent import LAKE_AGENT, LakeGame
from trl_explore.tasks.tiny_model import CHARACTERS, MAX_LENGTH, build_tokenizer
from trl_explore.tasks.warm_start import IGNORED, encode, warm_start
from trl_explore.trainers import SESAConfig, SESATrainer

TURN = re.compile(r"!go:to=(\w)")


def demonstrations(number, seed=0):
    rng = random.Random(seed)
    problems = [LAKE_AGENT.sample_problem(rng) for _ in range(number)]
    return [(problem, LAKE_AGENT.demonstration(problem, rng)) for problem in problems]


def test_demonstrations_are_games_as_the_environment_plays_them():
    won = games = 0
    for problem, text in demonstrations(300):
        board, _, told = problem.partition("?")
        game = LakeGame(LAKE_AGENT)
        assert game.reset(board=board, prompt=problem) is None  # the prompt shows the board
        turns = text.split("<a>")
        for number, turn in enumerate(turns):
            call, _, answer = turn.partition("<eos><u>")
            if number + 1 < len(turns):
                shown, _, proposals = answer.partition("?")
                assert shown == game.go(TURN.fullmatch(call)[1])
                told = proposals or told
        if told:  # only the last move may be asked for again, and it is a new one
            assert f"goto={TURN.fullmatch(turns[-1])[1]}" not in told.split(";")
        else:
            assert turns[-1] == "." and game.done
            won, games = won + game.get_reward(), games + 1
    assert games > 100 and 0.3 < won / games < 0.8  # careless, but not hopeless


def test_games_fit_into_context_and_alphabet():
    assert len(LAKE_AGENT.boards.draw(random.Random(0))) + 2 + LAKE_AGENT.max_completion_length <= MAX_LENGTH
    for problem, text in demonstrations(200):
        assert set(problem + text) <= set(CHARACTERS)
        if " goal" in text and "?" not in text:
            tokens = build_tokenizer(tools=True)(text + "<eos>")["input_ids"]
            assert len(tokens) <= LAKE_AGENT.max_completion_length


def test_the_warm_start_teaches_only_what_the_agent_says():
    tokenizer = build_tokenizer(tools=True)
    pairs = demonstrations(16) + [("1+1", "2")]
    batch = encode(tokenizer, pairs)
    for (_, text), labels in zip(pairs, batch["labels"], strict=True):
        said = tokenizer.decode(labels[labels != IGNORED])
        turns = [turn.partition("<eos>")[0] for turn in text.split("<a>")]
        assert said == "".join(f"{turn}<eos>" for turn in turns)


def test_training_and_evaluation_boards_are_disjoint():
    train, test = LAKE_AGENT.build_dataset(500, seed=0), LAKE_AGENT.evaluation_set(32)
    assert not set(train["board"]) & set(test["board"]) and train.column_names == ["prompt", "board"]
    rng = random.Random(0)
    shown = {LAKE_AGENT.sample_problem(rng).partition("?")[0] for _ in range(500)}
    assert not shown & set(test["board"])


@pytest.mark.parametrize(
    "changes, message",
    [({"proposal_share": 2}, "`proposal_share` is 2"), ({"max_turns": 5}, "takes at least 6 moves")],
)
def test_bad_knobs(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(LAKE_AGENT, **changes)


@pytest.mark.slow
def test_a_tiny_model_plays_and_proposes_other_moves(tmp_path):
    folder = warm_start(LAKE_AGENT, seed=0, steps=250, cache_dir=tmp_path, progress=False)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    message = parse_response(tokenizer, tokenizer("!go:to=r<eos>")["input_ids"], prefix=tokenizer("<a>")["input_ids"])
    assert message["tool_calls"][0]["function"] == {"name": "go", "arguments": {"to": "r"}}
    torch.manual_seed(0)
    trainer = SESATrainer(
        model=str(folder),
        args=SESAConfig(
            output_dir=str(tmp_path / "out"),
            per_device_train_batch_size=64,
            num_generations=8,
            max_completion_length=LAKE_AGENT.max_completion_length,
            max_tool_calling_iterations=LAKE_AGENT.max_turns,
            max_steps=2,
            **{**QUIET, "seed": 42},
            **{**LAKE_AGENT.sesa_options, "num_actions": 4, "branch_depth": SESAConfig.branch_depth},
        ),
        train_dataset=LAKE_AGENT.build_dataset(64, seed=0),
        environment_factory=LAKE_AGENT.environment_factory,
    )
    trainer.train()
    log = trainer.state.log_history[0]
    # No game is won by chance: six right moves out of at most seven.
    assert log["rewards/LakeGame/mean"] > 0 and log["tools/call_frequency"] > 2
    assert log["sketch/distinct"] > 0.6 and log["agent/trajectories"] > 4  # 4 moves: often 1 or 2 if drawn in parallel
    assert log["agent/environment_errors"] == 0
