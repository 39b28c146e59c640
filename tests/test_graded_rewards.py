"""Rewards between 0 and 1 that never reach the success threshold: every method learns from them, and warns once."""

import warnings

import pytest
from world import TINY, assert_same, differ, make_trainer, parameters, text_of, tiny_methods, trained

from trl_explore.rewards.threshold import FIRST_BATCHES
from trl_explore.trainers import ExplorationConfig, ExplorationTrainer

# Methods that compare a reward with the threshold whatever else is set.
ASKING = ["deep_grpo", "tree_grpo", "sesa", "g2rl", "branpo", "attn_rl", "tree_rl"]
ALL_METHODS = tiny_methods()
MAPPED = {name: ALL_METHODS[name][:2] for name in ("tree_grpo", "g2rl")}
# With `min_correct` and `min_wrong`, no group is shaped by novelty: what trains is the reward alone.
REWARD_ALONE = {"tree_grpo": {}, "g2rl": dict(min_correct=1, min_wrong=1)}


def graded(completions, **kwargs):
    """Share of the characters that are digits, below 1."""
    return [0.9 * sum(map(str.isdigit, text_of(c))) / max(len(text_of(c)), 1) for c in completions]


def with_a_format_reward(completions, **kwargs):
    return [1.0 + reward for reward in graded(completions)]


def half_right(completions, **kwargs):
    return [float(len(text_of(c)) % 2) for c in completions]


def notes(seen):
    return [str(w.message) for w in seen if "success_threshold" in str(w.message) or "that decides" in str(w.message)]


def warned(trainer):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trainer.train()
    return notes(seen)


def run(cls, config, folder, **options):
    trainer = make_trainer(cls, config, folder, **options)
    return trainer, warned(trainer)


@pytest.mark.parametrize("method", MAPPED)
@pytest.mark.parametrize("reward", [graded, with_a_format_reward])
def test_graded_rewards_train(tmp_path, method, reward):
    options = {**TINY[method].options, **REWARD_ALONE[method]}
    got, log = trained(*MAPPED[method], tmp_path, reward_funcs=reward, **options)
    assert differ(got, parameters(make_trainer(output_dir=tmp_path)))
    assert all(entry["grad_norm"] > 0 for entry in log[:-1])


@pytest.mark.parametrize("method", MAPPED)
def test_rewards_of_0_and_1_train_as_in_the_paper_bit_for_bit(tmp_path, method):
    options = TINY[method].options
    scaled, _ = trained(*MAPPED[method], tmp_path, **options)
    binary, _ = trained(*MAPPED[method], tmp_path, reward_mapping="binary", **options)
    assert_same(scaled, binary)
    assert differ(scaled, parameters(make_trainer(output_dir=tmp_path)))


@pytest.mark.parametrize("method", MAPPED)
def test_a_binary_mapping_counts_successes_alone(tmp_path, method):
    options = {**TINY[method].options, **REWARD_ALONE[method], "reward_funcs": graded}
    got, _ = trained(*MAPPED[method], tmp_path, reward_mapping="binary", **options)
    assert not differ(got, parameters(make_trainer(output_dir=tmp_path)))


@pytest.mark.parametrize("method", ASKING)
def test_a_threshold_that_no_completion_reaches_is_named_once(tmp_path, method):
    cls, config, options = ALL_METHODS[method]
    trainer, found = run(cls, config, tmp_path, reward_funcs=graded, max_steps=FIRST_BATCHES + 1, **options)
    assert len(found) == 1
    log = [entry for entry in trainer.state.log_history if "success/max_reward" in entry][:FIRST_BATCHES]
    highest = max(entry["success/max_reward"] for entry in log)
    parts = ("No completion reached `success_threshold=", f"and {highest:.4g}", "lower `success_threshold`")
    assert all(part in found[0] for part in (*parts, "`success_reward`"))


@pytest.mark.parametrize("method", ASKING)
def test_a_threshold_that_every_completion_reaches_is_named_once(tmp_path, method):
    cls, config, options = ALL_METHODS[method]
    options = {**options, "reward_funcs": with_a_format_reward, "max_steps": FIRST_BATCHES}
    _, found = run(cls, config, tmp_path, **options)
    assert len(found) == 1
    assert "Every completion reached `success_threshold=" in found[0] and "raise `success_threshold`" in found[0]


@pytest.mark.parametrize("method", ASKING)
def test_a_threshold_that_some_completions_reach_is_not_named(tmp_path, method):
    cls, config, options = ALL_METHODS[method]
    trainer, found = run(cls, config, tmp_path, reward_funcs=half_right, max_steps=FIRST_BATCHES, **options)
    assert not found
    assert any(0 < entry.get("success/fraction", 0) < 1 for entry in trainer.state.log_history)


def test_rewards_that_are_all_0_are_not_blamed_on_the_threshold(tmp_path):
    """No sample succeeded, and no other threshold would help."""
    cls, config, options = ALL_METHODS["deep_grpo"]
    _, found = run(cls, config, tmp_path, reward_funcs=lambda completions, **kw: [0.0] * len(completions), **options)
    assert not found


def test_fields_of_every_trainer_ask_about_success_and_plain_grpo_does_not(tmp_path):
    options = dict(reward_funcs=graded, max_steps=1)
    _, found = run(ExplorationTrainer, ExplorationConfig, tmp_path, **options)
    assert not found
    for fields in (dict(budget="vip"), dict(explore_threshold=0.5)):
        _, found = run(ExplorationTrainer, ExplorationConfig, tmp_path, **fields, **options)
        assert len(found) == 1


def test_votes_ask_about_success_only_if_the_reward_decides(tmp_path):
    cls, config, options = ALL_METHODS["evol_rl"]
    options = dict(options, reward_funcs=graded, max_steps=1)
    assert len(run(cls, config, tmp_path, **options)[1]) == 1
    assert not run(cls, config, tmp_path, **{**options, "correctness": "majority"})[1]


def test_the_reward_that_decides_is_the_one_that_is_looked_at(tmp_path):
    cls, config, options = ALL_METHODS["deep_grpo"]
    options = dict(options, reward_funcs=[graded, half_right], success_reward="graded", max_steps=2)
    _, (found,) = run(cls, config, tmp_path, **options)
    assert "rewards of 'graded' were between 0" in found and "name another reward function" in found
    assert not run(cls, config, tmp_path, **{**options, "success_reward": "half_right"})[1]


def test_a_threshold_that_is_lowered_between_runs_is_looked_at_again(tmp_path):
    cls, config, options = ALL_METHODS["tree_rl"]
    trainer, found = run(cls, config, tmp_path, reward_funcs=graded, max_steps=1, **options)
    assert len(found) == 1 and found[0].startswith("In the first 1 generation batch(es): No completion")
    trainer.args.success_threshold = 0.1
    assert not warned(trainer)
    assert any(0 < entry.get("success/fraction", 0) < 1 for entry in trainer.state.log_history)
