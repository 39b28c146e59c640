"""`budget`: prompts of a batch get unequally many rows."""

import itertools
import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trl import GRPOConfig, GRPOTrainer
from world import assert_same, contains_answer, differ, make_dataset, make_trainer, one_batch, parameters, trained

from trl_explore.credit.normalised import normalised
from trl_explore.methods import METHODS
from trl_explore.selection.budget import GAINS, allocate, enough, knapsack_gain, unequal_advantages, vip_gain
from trl_explore.trainers import DeepGRPOConfig, DeepGRPOTrainer, ExplorationConfig, ExplorationTrainer

PLAIN = ExplorationTrainer, ExplorationConfig
FEW = make_dataset().select(range(8))  # prompts that come back after four steps


def knapsack_value(number, rate):
    return (1 - rate**number - (1 - rate) ** number) * rate * (1 - rate) ** 2


def vip_value(number, rate):
    return -rate * (1 - rate) / (number - 1)


VALUES = {"knapsack": knapsack_value, "vip": vip_value}


@pytest.mark.parametrize("kind, usual, expected", [("knapsack", 4, [5, 3]), ("vip", 5, [6, 4])])
def test_the_numbers_of_the_papers(kind, usual, expected):
    assert allocate([0.5, 0.1], kind=kind, usual=usual, low=2, high=2 * usual) == expected


@pytest.mark.parametrize("kind", GAINS)
@given(st.integers(2, 8), st.floats(0.01, 0.99))
def test_a_gain_is_the_growth_of_its_value_and_falls(kind, number, rate):
    gain, value = GAINS[kind], VALUES[kind]
    assert math.isclose(gain(number, rate), value(number + 1, rate) - value(number, rate), abs_tol=1e-9)
    assert gain(number, rate) >= gain(number + 1, rate) - 1e-12


@pytest.mark.parametrize("kind", GAINS)
@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0.02, 0.98), min_size=1, max_size=3), st.integers(2, 4))
def test_nothing_better_can_be_had(kind, rates, usual):
    high, value = 2 * usual, VALUES[kind]
    found = allocate(rates, kind=kind, usual=usual, low=2, high=high)
    best = max(
        sum(map(value, counts, rates))
        for counts in itertools.product(range(2, high + 1), repeat=len(rates))
        if sum(counts) == usual * len(rates)
    )
    assert math.isclose(sum(map(value, found, rates)), best, abs_tol=1e-9)


@pytest.mark.parametrize("kind", GAINS)
@given(st.lists(st.none() | st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=6), st.integers(2, 5))
def test_all_rows_are_spread_within_the_bounds(kind, rates, usual):
    found = allocate(rates, kind=kind, usual=usual, low=2, high=2 * usual)
    assert sum(found) == usual * len(rates)
    assert all(2 <= n <= 2 * usual for n in found)


def test_prompts_that_were_never_solved_get_what_others_do_not_need():
    assert allocate([1.0, 0.0], kind="knapsack", usual=4, low=2, high=8) == [2, 6]
    assert allocate([0.5, 0.0], kind="knapsack", usual=8, low=2, high=16) == [int(enough(0.5)), 12]
    assert allocate([None, 1.0], kind="knapsack", usual=4, low=2, high=8) == [4, 4]


def test_gains_at_the_edges():
    assert knapsack_gain(2, 0.0) == knapsack_gain(2, 1.0) == vip_gain(2, 0.0) == vip_gain(1, 1.0) == 0.0


def test_advantages_of_unequal_groups():
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0, 0.0])
    found = unequal_advantages(rewards, [2, 4], scale="none", usual=3, deviation=0.5)
    torch.testing.assert_close(found, torch.tensor([0.75, -0.75, 0.5625, -0.1875, -0.1875, -0.1875]))
    batch = unequal_advantages(rewards, [2, 4], scale="batch", usual=3, deviation=0.5)
    torch.testing.assert_close(batch, found / 0.5001)


@pytest.mark.parametrize("scale", ["group", "none"])
@given(st.lists(st.floats(0, 1, width=32), min_size=8, max_size=8))
def test_of_equal_groups_they_are_those_of_grpo(scale, rewards):
    rewards = torch.tensor(rewards)
    found = unequal_advantages(rewards, [4, 4], scale=scale, usual=4, deviation=1.0)
    torch.testing.assert_close(found, normalised(rewards.view(2, 4), scale=scale).flatten())


@pytest.mark.parametrize("kind", GAINS)
def test_with_narrow_bounds_it_is_grpo(tmp_path, kind):
    options = dict(train_dataset=FEW, max_steps=6)
    found, log = trained(*PLAIN, tmp_path, budget=kind, min_generations=4, max_generations=4, **options)
    expected, _ = trained(GRPOTrainer, GRPOConfig, tmp_path, **options)
    assert_same(found, expected, tolerance=1e-6)
    assert all(entry["selection/moved_rows"] == 0 for entry in log if "reward" in entry)


def test_rows_go_where_contrast_is_likely(tmp_path):
    trainer = make_trainer(*PLAIN, tmp_path, budget="knapsack", shuffle_dataset=False)
    trainer.rounds.solved.rates = {0: 0.4, 1: 1.0}
    output = one_batch(trainer)
    assert trainer.rounds.rows_of == [6, 2]
    prompts = [
        trainer.tokenizer.decode(ids[mask.bool()])
        for ids, mask in zip(*(output[f"prompt_{p}"] for p in ("ids", "mask")), strict=True)
    ]
    assert prompts == ["0+0="] * 6 + ["0+1="] * 2
    rewards = trainer.scorer.totals()
    expected = unequal_advantages(rewards, [6, 2], scale="group", usual=4, deviation=0.0)
    assert torch.equal(output["advantages"], expected)


@pytest.mark.parametrize("kind", GAINS)
@pytest.mark.parametrize("case", [PLAIN, (DeepGRPOTrainer, DeepGRPOConfig)])
def test_it_trains_and_resumes_where_it_was(tmp_path, case, kind):
    options = dict(budget=kind, train_dataset=FEW, max_steps=8, log_completions=True, num_completions_to_print=0)
    whole = make_trainer(*case, tmp_path, **options, save_strategy="steps", save_steps=6)
    start = parameters(whole)
    whole.train()
    assert differ(parameters(whole), start)
    assert any(entry["selection/moved_rows"] > 0 for entry in whole.state.log_history if "reward" in entry)
    again = make_trainer(*case, tmp_path, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert_same(parameters(again), parameters(whole))


@pytest.mark.parametrize("name", ["tree_grpo", "sesa", "g2rl", "branpo"])
def test_methods_that_compare_groups_of_one_size_refuse_it(tmp_path, name):
    method = METHODS[name]
    with pytest.raises(ValueError, match="`budget='vip'` gives prompts unequally many rows, and .* compares groups"):
        make_trainer(method.trainer_class, method.config_class, tmp_path, budget="vip")


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(budget="even"), "`budget`"),
        (dict(budget="vip", min_generations=1), "`min_generations=1` must be at least 2"),
        (dict(budget="vip", min_generations=5), "`min_generations=5` must be at most that"),
        (dict(budget="vip", max_generations=3), "`max_generations=3` at least"),
        (dict(budget="vip", dynamic_sampling="filter"), "`dynamic_sampling='filter'` compares groups of one size"),
        (dict(budget="vip", advantage="maxrl"), "`advantage='maxrl'` compares groups of one size"),
    ],
)
def test_bad_values_are_named(tmp_path, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make_trainer(*PLAIN, tmp_path, reward_funcs=contains_answer, **options)
