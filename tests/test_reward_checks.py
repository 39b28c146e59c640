"""What is said of reward functions that do not do what they should, in Python and on the command line."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import TINY_RUN, as_flags
from datasets import Dataset
from world import contains_answer, make_dataset, make_trainer, saved_model, trained

from trl_explore.cli import main
from trl_explore.rewards.checks import RewardError, check_rewards
from trl_explore.trainers import ExplorationConfig, ExplorationTrainer, TreeGRPOConfig, TreeGRPOTrainer

REWARDS = """
def raises(completions, **kwargs):
    return [{}["gold"] for _ in completions]

def too_few(completions, **kwargs):
    return [0.0] * (len(completions) - 1)

def nothing(completions, **kwargs):
    return None

def words(completions, **kwargs):
    return ["right"] * len(completions)

def needs_gold(completions, gold, **kwargs):
    return [0.0] * len(completions)

def takes_little(completions):
    return [0.0] * len(completions)

def never_scores(completions, **kwargs):
    return [None] * len(completions)

async def later(completions, **kwargs):
    return None
"""
GIVEN = "it must return a list of 4 numbers, one per completion, None where it has no opinion."
TOLD = {
    "raises": "The reward function 'raises' raised KeyError in told_rewards.py, line 3: 'gold'",
    "too_few": f"The reward function 'too_few' returned 3 rewards for 4 completions; {GIVEN}",
    "nothing": f"The reward function 'nothing' returned None; {GIVEN}",
    "words": f"The reward function 'words' returned str 'right' for completion 0; {GIVEN}",
    "later": f"The reward function 'later' returned None; {GIVEN}",
    "needs_gold": "function 'needs_gold' cannot be called: missing a required argument: 'gold'. It is given",
    "takes_little": "'takes_little' cannot be called: got an unexpected keyword argument 'prompts'. It is given",
}
UNSCORED = "None of the completions of 1 prompt(s) in a row has a reward, so nothing can be learned: "


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    """An empty working directory with a data file and a module of rewards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    sys.modules.pop("told_rewards", None)
    Path("told_rewards.py").write_text(REWARDS)
    rows = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(4)]
    Path("data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def train(name, method):
    fields = {**TINY_RUN, "method": method, "model_name_or_path": saved_model(), "dataset_name": "data.jsonl"}
    fields |= {"reward_funcs": f"told_rewards.{name}", "max_steps": 1, "max_completion_length": 4}
    return main(["train", *as_flags(fields)])


@pytest.mark.parametrize(("name", "method"), [*((name, "deep_grpo") for name in TOLD), ("raises", "grpo")])
def test_training_tells_a_reward_functions_mistake_in_one_line(name, method, workdir, capsys):
    assert train(name, method) == 2
    error = capsys.readouterr().err.split("trl-explore: error: ")[1]
    assert TOLD[name] in error and error.count("\n") == 1
    assert not Path("out/model.safetensors").exists()


def test_training_stops_where_no_completion_has_a_reward(workdir, capsys):
    assert train("never_scores", "deep_grpo") == 2
    error = capsys.readouterr().err.split("trl-explore: error: ")[1]
    assert f"{UNSCORED}never_scores returned None or NaN for all of them." in error
    assert "the data has answer, prompt" in error
    assert not Path("out/model.safetensors").exists()


@pytest.mark.parametrize("command", ["eval", "filter"])
def test_measuring_tells_a_reward_functions_mistake_in_one_line(command, workdir, capsys):
    flags = {
        "eval": ["--dataset", "data.jsonl", "--num_samples", "4", "--max_new_tokens", "4", "--output_dir", "out"],
        "filter": ["--dataset_name", "data.jsonl", "--max_completion_length", "4", "--output", "hard.jsonl"],
    }
    rewards = ["--model_name_or_path", saved_model(), "--reward_funcs", "told_rewards.nothing"]
    assert main([command, *rewards, *flags[command]]) == 2
    error = capsys.readouterr().err.split("trl-explore: error: ")[1]
    assert "The reward function 'nothing' returned None; it must return a list of" in error


def test_in_python_a_functions_own_exception_stays_what_it_is_and_gets_a_note(tmp_path):
    def raises(completions, **kwargs):
        raise KeyError("gold")

    with pytest.raises(KeyError) as info:
        trained(ExplorationTrainer, ExplorationConfig, tmp_path, reward_funcs=raises)
    (note,) = info.value.__notes__
    assert note.startswith("The reward function 'raises' raised KeyError in test_reward_checks.py, line ")


@pytest.mark.parametrize("given", [None, "0000", b"0000", 0.5, {"a": 1.0}, torch.tensor(1.0)])
def test_what_is_no_list_is_refused(given):
    with pytest.raises(RewardError, match="'r' returned .*; it must return a list of 4 numbers"):
        check_rewards(given, "r", 4)


@pytest.mark.parametrize("wrong", ["1.0", [1.0], torch.tensor([1.0, 2.0]), {}])
def test_what_is_no_number_is_refused(wrong):
    with pytest.raises(RewardError, match="for completion 1; it must return a list of 2 numbers"):
        check_rewards([None, wrong], "r", 2)


@pytest.mark.parametrize(
    "given",
    [
        [1, 0.0],
        (True, None),
        torch.tensor([1.0, 0.0]),
        np.array([1.0, 0.0]),
        [np.float32(1), np.bool_(False)],
        [math.nan, torch.tensor([0.5])],
        (reward for reward in (1.0, 0.0)),
    ],
    ids=lambda given: type(given).__name__,
)
def test_what_trl_takes_is_taken(given):
    assert len(check_rewards(given, "r", 2)) == 2


def scoring(batches):
    """A reward function that scores only in these of its calls."""
    calls = iter(range(100))

    def sometimes(completions, **kwargs):
        return contains_answer(completions, **kwargs) if next(calls) in batches else [None] * len(completions)

    return sometimes


@pytest.mark.parametrize(
    ("scored", "max_steps", "prompts", "stops_after"),
    [
        (set(), 20, 8, 3),  # batches of two prompts
        ({0, 1, 3}, 20, 8, 7),  # the fourth batch in a row
        (set(), 2, 4, 2),  # a short run, at its end
    ],
)
def test_eight_prompts_in_a_row_or_a_run_without_rewards_stop_the_run(
    tmp_path, scored, max_steps, prompts, stops_after
):
    options = dict(reward_funcs=scoring(scored), max_steps=max_steps)
    trainer = make_trainer(ExplorationTrainer, ExplorationConfig, tmp_path, **options)
    message = f"of {prompts} prompt.s. in a row has a reward.* sometimes returned None or NaN"
    with pytest.raises(RewardError, match=message):
        trainer.train()
    assert trainer.state.global_step == stops_after


def test_a_short_run_after_one_with_rewards_does_not_stop(tmp_path):
    trainer = make_trainer(ExplorationTrainer, ExplorationConfig, tmp_path, reward_funcs=scoring({0}), max_steps=1)
    trainer.train()
    trainer.train()
    assert trainer.state.log_history[0]["reward"] is None


@pytest.mark.parametrize("scored", [{0, 4}, {1, 4}])
def test_a_few_prompts_without_rewards_do_not_stop_the_run(tmp_path, scored):
    _, log = trained(ExplorationTrainer, ExplorationConfig, tmp_path, reward_funcs=scoring(scored), max_steps=5)
    assert [entry["step"] for entry in log if "loss" in entry] == [1, 2, 3, 4, 5]


def test_one_unreadable_answer_does_not_stop_a_run_of_one_prompt_per_batch(tmp_path):
    def some(completions, answer, **columns):
        return [None if gold == "?" else float(gold in text) for text, gold in zip(completions, answer, strict=True)]

    first = make_dataset().select(range(4))
    rows = [{**row, "answer": row["answer"] if place else "?"} for place, row in enumerate(first)]
    data = Dataset.from_list(rows)
    options = dict(train_dataset=data, per_device_train_batch_size=4, shuffle_dataset=False, max_steps=4)
    _, log = trained(ExplorationTrainer, ExplorationConfig, tmp_path, reward_funcs=some, **options)
    assert [entry["reward"] is None for entry in log if "loss" in entry] == [True, False, False, False]


def test_a_search_without_rewards_stops_the_run_too(tmp_path):
    with pytest.raises(RewardError, match="in a row has a reward"):
        trained(TreeGRPOTrainer, TreeGRPOConfig, tmp_path, reward_funcs=scoring(set()), node_length=4)


def test_an_evaluation_without_rewards_does_not_stop_the_run(tmp_path):
    options = dict(eval_dataset=make_dataset().select(range(2)), per_device_eval_batch_size=4)
    options["reward_funcs"] = scoring(set())
    trainer = make_trainer(ExplorationTrainer, ExplorationConfig, tmp_path, **options)
    assert trainer.evaluate()["eval_reward"] is None
