"""Fewer rows of a group trained than sampled: the rows whose rewards have the largest variance."""

import itertools
import re
from math import isnan, nan
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig
from test_credit_trainers import odd
from trl import GRPOConfig, GRPOTrainer
from world import assert_same, differ, make_trainer, never, one_batch, parameters, tiny_methods, trained

from trl_explore.credit.normalised import normalised
from trl_explore.rows.streams import LOSS_NORMALISERS
from trl_explore.selection.variance import largest_variance
from trl_explore.trainers import (
    AutoExploreConfig,
    AutoExploreTrainer,
    ExplorationConfig,
    ExplorationTrainer,
)

OURS = ExplorationTrainer, ExplorationConfig
ROWS = dict(num_generations=8, per_device_train_batch_size=16)  # two prompts


def some(completion_ids, **columns):
    """Rewards of many sizes; some completions have none."""
    return [None if sum(ids) % 7 == 0 else float(sum(ids) % 5) for ids in completion_ids]


def variance(values):
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / len(values)


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0, -3.0]), min_size=8, max_size=8), st.integers(2, 8))
def test_no_other_rows_have_a_larger_variance(rewards, number):
    mask = largest_variance(torch.tensor([rewards]), number, random=Random(0))[0]
    chosen = [reward for reward, is_chosen in zip(rewards, mask.tolist(), strict=True) if is_chosen]
    assert len(chosen) == number
    best = max(variance(subset) for subset in itertools.combinations(rewards, number))
    assert variance(chosen) == pytest.approx(best)


def test_rows_without_a_reward_come_last_and_each_group_is_on_its_own():
    assert largest_variance(torch.tensor([[nan, 1.0, nan, 1.0]]), 2, random=Random(0)).tolist() == [[0, 1, 0, 1]]
    rewards = torch.tensor([[0.0, 1.0, 0.0, 0.0], [5.0, 5.0, 1.0, 5.0], [nan, 1.0, nan, nan]])
    mask = largest_variance(rewards, 2, random=Random(0))
    assert mask[0, 1] and mask[1, 2] and mask[2, 1] and mask.sum(dim=1).tolist() == [2, 2, 2]


def test_of_equal_rows_random_ones_are_taken():
    draws = [largest_variance(torch.ones(1, 8), 2, random=Random(seed)) for seed in range(60)]
    assert torch.cat(draws).any(dim=0).all()
    again = largest_variance(torch.ones(1, 8), 2, random=Random(5))
    assert torch.equal(draws[5], again)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo"])
def test_all_rows_are_grpo_bit_for_bit(tmp_path, loss_type):
    options = dict(reward_funcs=odd, loss_type=loss_type, num_iterations=2, **ROWS)
    expected, _ = trained(GRPOTrainer, GRPOConfig, tmp_path, **options)
    assert_same(trained(*OURS, tmp_path, trained_generations=8, **options)[0], expected)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("reward", [odd, some])
def test_advantages_compare_the_trained_rows_only(tmp_path, scale, reward):
    options = dict(reward_funcs=reward, scale_rewards=scale, log_completions=True, **ROWS)
    trainer = make_trainer(*OURS, tmp_path, trained_generations=4, **options)
    output = one_batch(trainer)
    rewards = trainer.scorer.totals().view(2, 8)
    mask = largest_variance(rewards, 4, random=Random(f"{trainer.args.seed} 0 0"))
    expected = normalised(rewards.masked_fill(~mask, nan), scale=scale)
    assert len(output["completion_ids"]) == 8
    torch.testing.assert_close(output["advantages"], expected[mask])
    # The completions table has all rows.
    assert len(trainer._logs["advantages"]) == 16
    torch.testing.assert_close(torch.tensor(list(trainer._logs["advantages"])), expected.flatten())


@pytest.mark.parametrize("loss_type", sorted(LOSS_NORMALISERS))
def test_the_gradient_is_that_of_the_trained_rows(tmp_path, loss_type):
    """As a run that sampled only these rows."""
    trainer = make_trainer(*OURS, tmp_path, trained_generations=4, reward_funcs=odd, loss_type=loss_type, **ROWS)
    output = one_batch(trainer)
    assert len(output["advantages"]) == 8 and (output["advantages"] != 0).any()
    tokens = int(output["completion_mask"].sum())
    assert (output["num_items_in_batch"] == tokens).all()
    loss = trainer._compute_loss(trainer.model, output)
    sizes = dict(num_generations=4, per_device_train_batch_size=8)
    plain = make_trainer(GRPOTrainer, GRPOConfig, tmp_path, reward_funcs=odd, loss_type=loss_type, **sizes)
    plain.current_gradient_accumulation_steps = trainer.current_gradient_accumulation_steps = 1
    torch.testing.assert_close(plain._compute_loss(plain.model, output), loss)


CASES = {
    "plain": {},
    "micro-batches": dict(gradient_accumulation_steps=2, steps_per_generation=4, per_device_train_batch_size=4),
    "iterations": dict(num_iterations=2),
    "beta": dict(beta=0.1),
    "lora": dict(peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)),
    "maxrl": dict(advantage="maxrl"),
    "pass@k": dict(advantage="passk", passk_k=2),
    "unlikeliness": dict(advantage="unlikeliness"),
    "reinforce": dict(advantage="reinforce"),
    "function": dict(advantage=lambda rewards, batch: batch.grpo + 0.1),
    "tokens": dict(clip_cov=0.2, clip_cov_low=-5.0, count_bonus=0.1),
    "filter": dict(dynamic_sampling="filter"),
    "refill": dict(dynamic_sampling="refill"),
    "refill, bnpo": dict(dynamic_sampling="refill", loss_type="bnpo"),
    "threshold": dict(explore_threshold=0.9),
    "zero advantages": dict(drop_zero_advantage=True, log_completions=True),
    "shared prefixes": dict(shared_prefix_training="on"),
    "resample": dict(explore="resample", explore_prompts="unsolved"),
    "resample, added": dict(explore="resample", explore_prompts="unsolved", explore_into="add"),
}


@pytest.mark.parametrize("case", CASES)
def test_it_trains_with(tmp_path, case):
    options = {**ROWS, "reward_funcs": odd, "max_steps": 2, **CASES[case]}
    before = parameters(make_trainer(*OURS, tmp_path, **options))
    found, log = trained(*OURS, tmp_path, trained_generations=4, **options)
    assert differ(found, before) and all(value.isfinite().all() for value in found.values())
    entry = log[0]
    assert 0 < entry["selection/trained_tokens"] and entry["selection/untrained_tokens"] > 0
    assert entry["loss"] == entry["loss"] and not isnan(entry["grad_norm"])


def test_untrained_rows_have_no_advantage_per_token_either(tmp_path):
    def own(rewards, batch):
        return 0.5 + 0 * batch.trainer.ranks.local(rewards.flatten()).unsqueeze(1) * batch.rows["completion_mask"]

    options = dict(advantage=own, count_bonus=0.2, log_completions=True, reward_funcs=odd, **ROWS)
    trainer = make_trainer(*OURS, tmp_path, trained_generations=4, **options)
    output = one_batch(trainer)
    assert output["advantages"].shape == output["completion_ids"].shape and (output["advantages"][:, 0] != 0).all()
    shown = torch.tensor(list(trainer._logs["advantages"]))
    assert int((shown != 0).sum()) == 8


def test_rare_answers_are_counted_over_all_sampled_rows(tmp_path):
    def answers(prompts, trainer):
        encode = trainer._tokenizer.encode
        ids = [encode(str(place % 4)) for place in range(len(prompts))]
        return {"prompt_ids": [encode("1+1") for _ in prompts], "completion_ids": ids, "logprobs": None}

    options = dict(count_bonus=0.2, rollout_func=answers, reward_funcs=odd, **ROWS)
    trainer = make_trainer(*OURS, tmp_path, trained_generations=2, **options)
    one_batch(trainer)
    assert trainer._metrics["train"]["credit/answered_fraction"] == [1.0]
    assert sum(sum(counts.values()) for counts in trainer.credit.counts.values()) == 16


def test_a_callback_cannot_set_what_the_constructor_refuses(tmp_path):
    trainer = make_trainer(*OURS, tmp_path, trained_generations=4, reward_funcs=odd, **ROWS)
    trainer.args.trained_generations = 9
    with pytest.raises(ValueError, match="`trained_generations=9` must be a whole number"):
        one_batch(trainer)


def test_groups_that_all_fail_train_nothing(tmp_path):
    options = dict(reward_funcs=never, trained_generations=4, **ROWS)
    before = parameters(make_trainer(*OURS, tmp_path, **options))
    assert_same(trained(*OURS, tmp_path, **options)[0], before)


def test_a_resumed_run_ends_where_the_uninterrupted_one_does(tmp_path):
    options = dict(ROWS, per_device_train_batch_size=8, steps_per_generation=2, gradient_accumulation_steps=1)
    options |= dict(reward_funcs=odd, trained_generations=4, max_steps=5, save_strategy="steps", save_steps=3)
    whole = make_trainer(*OURS, tmp_path / "whole", **options)
    whole.train()
    again = make_trainer(*OURS, tmp_path / "again", **options)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert_same(parameters(again), parameters(whole))


TOGETHER = ["deep_grpo", "sesa", "g2rl", "evol_rl", "auto"]


@pytest.mark.parametrize("method", TOGETHER)
def test_methods_train_with_it(tmp_path, method):
    trainer_class, config_class, own = tiny_methods()[method]
    options = {"reward_funcs": odd, **own, "max_steps": 2}
    options |= dict(num_generations=4, per_device_train_batch_size=8)
    plain, _ = trained(trainer_class, config_class, tmp_path, **options)
    found, log = trained(trainer_class, config_class, tmp_path, trained_generations=2, **options)
    assert all(value.isfinite().all() for value in found.values())
    assert differ(found, plain) and "selection/trained_tokens" in log[0]


REFUSED = {
    "tree_grpo": "has no effect, because the values of a tree are the advantages",
    "tree_rl": "has no effect, because the values of a tree are the advantages",
    "attn_rl": "has no effect, because the values of a tree are the advantages",
    "gigpo": "leaves out trajectories, and GiGPO compares the steps of all",
    "branpo": "BranPOTrainer with 'tail_branches' gives these rows credit together with others",
    "agent_tree_grpo": "AgentTreeGRPOTrainer with 'turn_trees' gives these rows credit together with others",
}


@pytest.mark.parametrize("method", REFUSED)
def test_methods_that_compare_all_rows_refuse_it(tmp_path, method):
    trainer_class, config_class, own = tiny_methods()[method]
    with pytest.raises(ValueError, match=re.escape(REFUSED[method])):
        make_trainer(trainer_class, config_class, tmp_path, **{**own, "trained_generations": 2})


def test_auto_names_the_explorer_that_does_not_go_with_it(tmp_path):
    own = dict(explorers=["tree", "replay"], trained_generations=2)
    with pytest.raises(ValueError, match="AutoExploreTrainer with 'replay' gives these rows credit"):
        make_trainer(AutoExploreTrainer, AutoExploreConfig, tmp_path, **own)


ERRORS = {
    "pass@k": (dict(trained_generations=4, advantage="passk", passk_k=4), "`trained_generations=4` gives every row"),
    "pkpo": (dict(trained_generations=2, advantage="pkpo", passk_k=3), "`passk_k=3` is more than the"),
    "text": (dict(trained_generations="2"), "`trained_generations='2'` must be a whole number"),
    "too many": (dict(trained_generations=9), "`trained_generations=9` must be a whole number from 2 to"),
    "one": (dict(trained_generations=1), "`trained_generations=1` must be a whole number from 2 to"),
    "budget": (dict(trained_generations=4, budget="vip"), "both decide how many rows of a prompt are trained"),
    "objectives": (
        dict(trained_generations=4, multi_objective_aggregation="normalize_then_sum"),
        "`trained_generations=4` compares total rewards",
    ),
    "micro-batch": (
        dict(trained_generations=3, per_device_train_batch_size=4, steps_per_generation=2),
        "would train 1.5 rows of a micro-batch of `per_device_train_batch_size=4`",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_what_cannot_work_is_one_clear_error(tmp_path, case):
    options, message = ERRORS[case]
    with pytest.raises(ValueError, match=re.escape(message)):
        ExplorationConfig(str(tmp_path), use_cpu=True, bf16=False, num_generations=8, **options)
