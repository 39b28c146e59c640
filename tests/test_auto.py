"""The trainer that chooses how to explore: estimates, the choice, reductions to GRPO, resume, agents, and errors.

Hints and replay have tests of their own, in `test_hints_and_replay.py`.
"""

import re
from dataclasses import replace
from random import Random

import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig
from test_branpo import Lake, Voice
from test_branpo import make as make_agent_of
from trl import GRPOConfig, GRPOTrainer, TrlParser
from world import (
    BOARDS,
    always,
    assert_same,
    differ,
    make_dataset,
    make_trainer,
    never,
    one_batch,
    parameters,
    says,
    tiny_methods,
    trained,
)

from trl_explore.auto.estimates import PLAIN, Estimates
from trl_explore.trainers import AutoExploreConfig, AutoExploreTrainer, ExplorationConfig, ExplorationTrainer

AUTO = AutoExploreTrainer, AutoExploreConfig
PLAIN_GRPO = GRPOTrainer, GRPOConfig
CUTS = dict(num_branches=3, segmentation="fixed", segment_length=2)
OPTIONS = dict(tree=dict(expansion_width=3, node_length=2), pivots=CUTS, sketches=dict(max_sketch_length=4))
ALWAYS = dict(explore_min_share=1.0, explorer_options=OPTIONS)  # every unsolved prompt is explored
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
OFF_BOUNDARY = dict(steps_per_generation=4, max_steps=7)
AGENT_OPTIONS = dict(tail_branches=dict(num_branches=2), turn_trees=dict(num_expansions=2))


def graded(completion_ids, **columns):
    """No success, but rewards that differ."""
    return [0.5 * (ids[0] % 2) for ids in completion_ids]


def hard(completions, completion_ids, **columns):
    """About one completion in eight succeeds, so that many groups fail."""
    return [float(sum(ids) % 8 == 0) for ids in completion_ids]


def own_metrics(log):
    """What TRL itself logs, without times."""
    return {name: value for name, value in log.items() if "time" not in name and "second" not in name}


def assert_logged_as(found, expected):
    assert len(found) == len(expected)
    for got, wanted in zip(found, expected, strict=True):
        wanted = own_metrics(wanted)
        assert {name: got[name] for name in wanted} == wanted


# ------------------------------------------------------------------------------------------------------- the estimates


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 99)), min_size=1, max_size=9), st.floats(0.1, 1.0))
def test_sums_are_discounted_in_every_batch(batches, discount):
    estimates = Estimates(["tree"], discount=discount, min_share=0.0)
    for contrast, tokens in batches:
        estimates.begin_batch()
        estimates.add("tree", contrast=contrast, tokens=tokens, prompts=1)
    ages = range(len(batches) - 1, -1, -1)
    contrast = sum(discount**age * batch[0] for age, batch in zip(ages, batches, strict=True))
    tokens = sum(discount**age * batch[1] for age, batch in zip(ages, batches, strict=True))
    assert estimates.sums["tree"].contrast == pytest.approx(contrast)
    assert estimates.rate("tree") == pytest.approx(contrast / tokens)
    assert estimates.sums["tree"].prompts == pytest.approx(sum(discount**age for age in ages))
    assert estimates.rate(PLAIN) is None and estimates.sums[PLAIN].tokens == 0


def chosen(rates, *, possible=None, min_share=0.0, max_cost=None, with_contrast=0.0, tokens=10_000, number=400):
    """How often each source is chosen after rows that bought contrast at these rates. `with_contrast` is the share of
    fresh prompts whose groups have contrast."""
    explorers = [name for name in rates if name != PLAIN]
    estimates = Estimates(explorers, discount=1.0, min_share=min_share, max_cost=max_cost)
    for name, rate in rates.items():
        estimates.add(name, contrast=rate * tokens, tokens=tokens, prompts=100)
    estimates.fresh_with_contrast = 100 * with_contrast
    found = estimates.choose([possible or [*rates]] * number, random=Random(0))
    return {name: found.count(name) for name in rates}


@pytest.mark.parametrize("best", [PLAIN, "tree", "pivots"])
def test_the_source_with_the_most_contrast_per_token_is_chosen(best):
    counts = chosen({**dict.fromkeys([PLAIN, "tree", "pivots"], 0.01), best: 0.02})
    assert counts[best] == 400


def test_equally_good_sources_share_the_prompts_and_little_evidence_is_tried():
    unknown = Estimates(["tree"], discount=1.0, min_share=0.0)
    assert set(unknown.choose([["tree"]] * 50, random=Random(1))) == {PLAIN, "tree"}
    counts = chosen(dict.fromkeys([PLAIN, "tree", "pivots"], 0.001))
    assert min(counts.values()) > 90
    # Ten groups with contrast against five: the worse one is still tried now and then.
    counts = chosen({PLAIN: 0.0, "tree": 0.001, "pivots": 0.0005})
    assert counts["tree"] > counts["pivots"] > 10


def test_an_explorer_without_rows_is_tried_beside_fresh_prompts_that_have_some():
    estimates = Estimates(["tree"], discount=1.0, min_share=0.0)
    estimates.add(PLAIN, contrast=50, tokens=10_000, prompts=10)
    assert 100 < estimates.choose([["tree"]] * 400, random=Random(0)).count("tree") < 300


@pytest.mark.parametrize(("with_contrast", "best"), [(0.0, "tree"), (0.4, "tree"), (0.6, PLAIN), (0.99, PLAIN)])
def test_the_more_groups_have_contrast_the_better_an_explorer_must_be(with_contrast, best):
    # Twice the contrast per token is enough if fewer than half of the groups have contrast.
    counts = chosen({PLAIN: 0.1, "tree": 0.2}, with_contrast=with_contrast)
    assert counts[best] > 395


@pytest.mark.parametrize(("prompts", "cost"), [(1, 8), (2, 1), (8, 4), (32, 8)])
def test_explorers_without_success_cost_a_limited_share_of_the_tokens(prompts, cost):
    estimates = Estimates(["tree", "pivots"], discount=0.9, min_share=0.3, max_cost=0.1)
    random, spent = Random(0), 0
    for _ in range(600):
        estimates.begin_batch()
        estimates.add(PLAIN, contrast=0.5 * prompts, tokens=100 * prompts, prompts=prompts)
        sources = estimates.choose([["tree", "pivots"]] * prompts, random=random)
        for name in ("tree", "pivots"):
            number = sources.count(name)
            spent += 100 * cost * number
            estimates.add(name, contrast=0, tokens=100 * cost * number, prompts=number)
    # Within the memory, fresh prompts have 5 or more groups with contrast. So 5/6 or more of the tokens count.
    # At the end, the last try of each explorer may not be paid back yet.
    assert 0.05 < spent / (600 * 100 * prompts) < 0.1 * 6 / 5 + 0.02


def test_the_limit_keeps_good_explorers_and_ends_where_fresh_prompts_yield_nothing():
    assert chosen({PLAIN: 0.01, "tree": 0.03}, max_cost=0.1)["tree"] == 400
    assert chosen({PLAIN: 0.01, "tree": 0.001, "pivots": 0.03}, max_cost=0.1)["pivots"] == 400
    assert chosen({PLAIN: 0.0, "tree": 0.0}, max_cost=0.1)["tree"] > 100
    # With 0, not even such a prompt is explored.
    assert chosen({PLAIN: 0.0, "tree": 0.03}, max_cost=0.0)["tree"] == 0


def test_one_group_with_contrast_does_not_end_exploring_for_good():
    estimates = Estimates(["tree"], discount=0.9, min_share=0.0, max_cost=0.1)
    random, late = Random(0), 0
    for batch in range(200):
        estimates.begin_batch()
        estimates.add(PLAIN, contrast=float(batch == 0), tokens=200, prompts=2)
        number = estimates.choose([["tree"]] * 2, random=random).count("tree")
        estimates.add("tree", contrast=0, tokens=800 * number, prompts=number)
        late += number * (batch >= 100)
    assert late > 50


def test_a_share_of_one_always_explores_at_random_and_a_smaller_one_sometimes():
    counts = chosen({PLAIN: 0.02, "tree": 0.0, "pivots": 0.0}, min_share=1.0)
    assert counts[PLAIN] == 0 and min(counts["tree"], counts["pivots"]) > 150
    counts = chosen({PLAIN: 0.02, "tree": 0.0, "pivots": 0.0}, min_share=0.1)
    assert 340 < counts[PLAIN] < 380 and min(counts["tree"], counts["pivots"]) > 5


@pytest.mark.parametrize("min_share", [0.0, 1.0])
def test_an_explorer_that_does_not_suit_a_prompt_is_never_chosen(min_share):
    rates = {PLAIN: 0.001, "tree": 0.02, "pivots": 0.001}
    assert chosen(rates, possible=["pivots"], min_share=min_share)["tree"] == 0
    estimates = Estimates(["tree"], discount=1.0, min_share=min_share)
    assert estimates.choose([[], ["other"]], random=Random(0)) == [PLAIN, PLAIN]


def test_prompts_that_are_explored_in_any_case_are_no_evidence_about_exploring(tmp_path, recwarn):
    estimates = Estimates(["tree"], discount=1.0, min_share=1.0)
    estimates.choose([["tree"], [], ["tree"]], random=Random(0))
    assert (estimates.num_unsolved, estimates.num_compared, estimates.num_preferred) == (3, 0, 0)
    trainer = make_trainer(*AUTO, tmp_path, reward_funcs=never, explorers=["resample"], explore_min_share=1.0)
    trainer.train()
    estimates = trainer.branch_explorer.estimates
    assert estimates.num_unsolved > 0 and estimates.num_compared == estimates.num_preferred == 0
    assert not [warning for warning in recwarn if "explore='auto'" in str(warning.message)]


def test_the_state_of_estimates_is_restored_and_new_explorers_start_without_rows():
    estimates = Estimates(["tree"], discount=0.9, min_share=0.0)
    estimates.add("tree", contrast=2, tokens=30, prompts=4)
    estimates.fresh_with_contrast = 1.5
    estimates.choose([["tree"]] * 3, random=Random(0))
    again = Estimates(["tree", "pivots"], discount=0.9, min_share=0.0)
    again.load_state_dict(estimates.state_dict())
    assert again.state_dict()["sums"] == {PLAIN: [0.0] * 3, "tree": [2, 30, 4], "pivots": [0.0] * 3}
    assert again.fresh_with_contrast == 1.5
    assert again.num_unsolved == again.num_compared == 3
    # Checkpoints of earlier versions have two sums of a source.
    again.load_state_dict({"sums": {"tree": [3, 40]}, "counts": [5, 4, 2]})
    assert again.credit == {"tree": 0.0, "pivots": 0.0}
    assert again.state_dict()["sums"]["tree"] == [3, 40, 0.0] and again.fresh_with_contrast == 0


# ------------------------------------------------------------------------------------------------- a generation batch


@pytest.mark.parametrize("name", ["tree", "pivots", "sketches", "resample"])
def test_each_explorer_adds_rows_for_unsolved_prompts(name, tmp_path):
    trainer = make_trainer(*AUTO, tmp_path, reward_funcs=never, explorers=[name], **ALWAYS)
    output = one_batch(trainer)
    (found,) = trainer.branching.results
    assert found.explorer is trainer.branch_explorer.explorers[name]
    assert len(found.branches.rows) >= 4 and found.num_tokens > 0
    sums = trainer.branch_explorer.estimates.sums
    assert sums[name].tokens == found.num_tokens and sums[name].contrast == 0
    assert sums[PLAIN].tokens == output["completion_mask"].sum() and sums[PLAIN].contrast == 0
    # Rows without contrast have no advantage, so nothing is learned.
    assert not found.scored.rows["advantages"].any()


def test_the_sums_are_of_the_groups_with_contrast_and_of_the_sampled_tokens(tmp_path):
    trainer = make_trainer(*AUTO, tmp_path, reward_funcs=hard, explorers=["resample"], **ALWAYS)
    asked = {"contrast": 0, "tokens": 0, "plain": 0, "plain tokens": 0, "with contrast": 0}
    trainer.args.explore_discount = 1.0
    for _ in range(6):
        one_batch(trainer)
        rewards = trainer.scorer.totals().view(-1, 4)
        with_contrast = rewards.amax(dim=1) > rewards.amin(dim=1)
        failed_shares = (rewards < 1).double().mean(dim=1)  # a prompt that is nearly solved counts less
        asked["with contrast"] += int(with_contrast.sum())
        asked["plain"] += (with_contrast * failed_shares).sum().item()
        asked["plain tokens"] += sum(map(len, trainer.main_completion_ids))
        for found in trainer.branching.results:
            groups = found.scored.rewards.view(-1, 4)
            asked["contrast"] += int((groups.amax(dim=1) > groups.amin(dim=1)).sum())
            asked["tokens"] += sum(map(len, found.branches.rows.completion_ids))
            assert found.num_prompts == len(groups) == int((rewards.amax(dim=1) < 1).sum())
            solved = trainer._metrics["train"]["explore/solved/resample"][-1]
            assert solved == (groups.amax(dim=1) == 1).float().mean()
            centred = groups - groups.mean(dim=1, keepdim=True)
            expected = centred / (groups.std(dim=1, keepdim=True) + 1e-4)  # GRPO's advantages
            torch.testing.assert_close(found.scored.rows["advantages"], expected.flatten())
    sums = trainer.branch_explorer.estimates.sums
    assert sums[PLAIN].contrast == pytest.approx(asked["plain"]) and asked["plain"] > 0
    assert sums[PLAIN].tokens == asked["plain tokens"] and sums[PLAIN].prompts == 12
    assert trainer.branch_explorer.estimates.fresh_with_contrast == asked["with contrast"]
    assert sums["resample"].contrast == pytest.approx(asked["contrast"]) and asked["contrast"] > 0
    assert sums["resample"].tokens == asked["tokens"]
    rate = trainer._metrics["train"]["explore/contrast_per_token/resample"][-1]
    assert rate == asked["contrast"] / asked["tokens"]
    assert "explore/credit/resample" not in trainer._metrics["train"]  # there is no limit


def test_the_credit_is_logged_and_follows_the_trainers_field(tmp_path):
    options = dict(reward_funcs=hard, explorers=["resample"], explore_discount=1.0)
    trainer = make_trainer(*AUTO, tmp_path, **options)
    metrics = trainer._metrics["train"]
    for _ in range(4):
        one_batch(trainer)
    estimates = trainer.branch_explorer.estimates
    assert metrics["explore/credit/resample"][-1] == estimates.credit["resample"]
    assert estimates.credit["resample"] <= 0.1 * estimates.sums[PLAIN].tokens
    assert metrics["explore/share/resample"] != [0.0] * 4
    trainer.args.explore_max_cost = 0.0
    one_batch(trainer)
    assert estimates.max_cost == 0 and metrics["explore/share/resample"][-1] == 0


def test_equal_rewards_are_no_contrast_whatever_rounding_makes_of_them(tmp_path):
    """The mean of eight rewards of 0.1 is not 0.1 in float32, so that GRPO's advantages are not exactly zero."""

    def a_little(completions, **columns):
        return [0.1] * len(completions)

    plain = make_trainer(*PLAIN_GRPO, tmp_path, reward_funcs=a_little, num_generations=8)
    assert one_batch(plain)["advantages"].any()  # otherwise this tests nothing
    options = dict(num_generations=8, explorers=["resample"], **ALWAYS)
    trainer = make_trainer(*AUTO, tmp_path, reward_funcs=a_little, **options)
    one_batch(trainer)
    assert trainer.branch_explorer.estimates.sums[PLAIN].contrast == 0
    assert len(trainer.branching.results) == 1
    assert trainer.branch_explorer.estimates.sums["resample"].contrast == 0


@pytest.mark.parametrize("success_reward", [None, "graded"])
def test_rows_that_are_masked_are_no_contrast(tmp_path, success_reward):
    options = dict(explorers=["resample"], success_reward=success_reward, **ALWAYS)
    trainer = make_trainer(*AUTO, tmp_path, reward_funcs=graded, mask_truncated_completions=True, **options)
    trainer.args.explore_discount = 1.0
    num_signals = num_trained = num_masked_groups = 0
    for _ in range(4):
        output = one_batch(trainer)
        is_trained = output["completion_mask"].any(dim=1)
        masked_groups = ~is_trained.view(-1, 4).any(dim=1)
        rewards = trainer.scorer.totals().view(-1, 4)
        has_contrast = (rewards.amax(dim=1) > rewards.amin(dim=1)) & ~masked_groups
        explored = sum(found.num_prompts for found in trainer.branching.results)
        assert explored >= int((~has_contrast).sum())
        num_masked_groups += int(masked_groups.sum())
        for found in trainer.branching.results:
            signal = found.scored.rows["advantages"].abs() > 1e-3
            num_signals += int(signal.sum())
            num_trained += int((signal & found.scored.rows["completion_mask"].any(dim=1)).sum())
    contrast = trainer.branch_explorer.estimates.sums["resample"].contrast
    assert num_masked_groups > 0 and num_signals > num_trained
    assert contrast == num_trained / 4


def test_grpos_rows_that_are_masked_are_no_contrast(tmp_path):
    options = dict(reward_funcs=never, explorers=["resample"], mask_truncated_completions=True)
    trainer = make_trainer(*AUTO, tmp_path, **options, **ALWAYS)
    num_trained = int(one_batch(trainer)["completion_mask"].any(dim=1).sum())
    (found,) = trainer.branching.results
    changed = replace(found.branches, main_advantages=dict.fromkeys(range(8), 1.0))
    contrast = trainer.branch_explorer._contrasts(replace(found, branches=changed))
    assert contrast == num_trained / 4 and 0 < num_trained < 8


def test_prompts_without_any_reward_are_not_explored(tmp_path):
    def first_prompt(prompts, **columns):
        return [0.0 if prompt == prompts[0] else None for prompt in prompts]

    trainer = make_trainer(*AUTO, tmp_path, reward_funcs=first_prompt, explorers=["resample"], **ALWAYS)
    one_batch(trainer)
    (found,) = trainer.branching.results
    assert found.num_prompts == 1 and set(found.branches.rows.parents) == {0}


@pytest.mark.parametrize("options", [dict(advantage="maxrl"), dict(advantage="pkpo", passk_k=2)], ids=str)
def test_another_process_may_have_all_groups_to_resample(tmp_path, options):
    trainer = make_trainer(*AUTO, tmp_path, reward_funcs=never, explorers=["resample"], **options, **ALWAYS)
    one_batch(trainer)
    branches = trainer.branch_explorer.explorers["resample"].explore([])
    assert len(branches.rows) == 0 and branches.advantages == []


def test_the_loss_of_an_explorer_weighs_as_much_as_its_share_of_the_prompts(tmp_path):
    trainer = make_trainer(*AUTO, tmp_path, reward_funcs=never, explorers=["resample", "pivots"], **ALWAYS)
    explorers = trainer.branch_explorer.explorers
    trainer.branch_explorer._shares = {"resample": 0.125, "pivots": 0.5}
    assert trainer.branch_explorer.weight_of(explorers["resample"]) == 0.5
    assert trainer.branch_explorer.weight_of(explorers["pivots"]) == 1.0
    one_batch(trainer)
    shares = trainer.branch_explorer._shares
    for found in trainer.branching.results:
        name = found.explorer.stream.removeprefix("explored_")
        assert trainer.branching.streams()[found.explorer.stream][1] == min(1.0, 4 * shares[name])
    # Rows that are compared with GRPO's rows share its mean.
    trainer = make_trainer(*AUTO, tmp_path, explorers=["replay"])
    (explorer,) = trainer.branch_explorer.explorers.values()
    assert trainer.branch_explorer.weight_of(explorer) is None


def one_unsolved(completion_ids, prompts, **columns):
    """No success for the prompt 1+5=, only successes for 1+0= to 1+4=, and both for all other prompts."""
    rewards = []
    for place, prompt in enumerate(prompts):
        if prompt == "1+5=":
            rewards.append(0.0)
        else:
            rewards.append(1.0 if prompt[0] == "1" else float(place % 2))
    return rewards


def test_a_batch_of_several_rounds_counts_as_one(tmp_path):
    refill = dict(dynamic_sampling="refill", shuffle_dataset=False, explore_discount=0.5)
    trainer = make_trainer(*AUTO, tmp_path, reward_funcs=one_unsolved, explorers=["resample"], **refill, **ALWAYS)
    explorer, metrics = trainer.branch_explorer, trainer._metrics["train"]
    given = []
    prepare = trainer.stream_training.prepare
    trainer.stream_training.prepare = lambda output, streams: given.append(streams) or prepare(output, streams)
    one_batch(trainer)
    metrics.clear()
    for sums in explorer.estimates.sums.values():
        sums.tokens = 1000.0
    before = trainer.sample.tokens.own
    trainer.rounds.order.begin(5)
    trainer._generate_and_score_completions(trainer.main_examples)
    # 0+5= and 1+0=, then 1+1= to 1+5= and 2+0= one by one: one explored prompt of eight.
    assert metrics["selection/rounds"] == [7] and metrics["explore/share/resample"] == [0.125]
    assert given[-1]["explored_resample"][1] == 0.5
    sampled = metrics["explore/sampled_tokens/resample"]
    assert len(sampled) == len(metrics["explore/contrast_per_token/plain"]) == 1
    assert explorer.estimates.sums["resample"].tokens == 500 + sampled[0]
    assert explorer.estimates.sums[PLAIN].tokens == 500 + trainer.sample.tokens.own - before - sampled[0]


def test_prompts_that_only_fill_up_a_round_are_neither_explored_nor_counted(tmp_path):
    trainer = make_trainer(*AUTO, tmp_path, reward_funcs=never, explorers=["resample"], **ALWAYS)
    begin, metrics = trainer.branching.begin, trainer._metrics["train"]
    trainer.branching.begin = lambda num_fillers=0: begin(1)
    one_batch(trainer)
    assert trainer.branch_explorer._sources == ["resample", PLAIN]
    assert metrics["explore/share/resample"] == [1.0]
    tokens = trainer.sample.tokens.own - metrics["explore/sampled_tokens/resample"][0]
    assert 0 < trainer.branch_explorer.estimates.sums[PLAIN].tokens < tokens


# ---------------------------------------------------------------------------------------------------------- reductions

REDUCTIONS = {
    "plain": {},
    "beta": dict(beta=0.1),
    "lora, accumulation": dict(peft_config=LORA, gradient_accumulation_steps=2, steps_per_generation=4),
    "iterations": dict(num_iterations=2, loss_type="grpo", scale_rewards="batch"),
    "conversational": dict(conversational=True),
}


def in_turn(cases, fast):
    """The cases, of which those that are not in `fast` are slow."""
    return [case if case in fast else pytest.param(case, marks=pytest.mark.slow) for case in cases]


@pytest.mark.parametrize("case", in_turn(REDUCTIONS, {"plain", "lora, accumulation"}))
def test_without_explorers_or_anything_worth_exploring_it_is_grpo_bit_for_bit(tmp_path, case, monkeypatch):
    options = REDUCTIONS[case]
    expected, plain_log = trained(*PLAIN_GRPO, tmp_path, **options)
    monkeypatch.setattr(Estimates, "choose", lambda estimates, possible, random: [PLAIN] * len(possible))
    for explorers in ([], ["tree", "pivots", "resample", "replay"]):
        found, log = trained(*AUTO, tmp_path, explorers=explorers, **options)
        assert_same(found, expected)
        assert_logged_as(log, plain_log)
    assert {entry.get("explore/share/tree", 0) for entry in log} == {0}
    assert any("explore/share/tree" in entry for entry in log)


def test_solved_prompts_are_not_explored(tmp_path):
    found, log = trained(*AUTO, tmp_path, reward_funcs=always, explore_min_share=1.0)
    expected, plain_log = trained(*PLAIN_GRPO, tmp_path, reward_funcs=always)
    assert_same(found, expected)
    assert_logged_as(log, plain_log)


def judged(trainer_and_config, folder, **options):
    """The completions of every call of a reward function, in a run that learns nothing, and its log."""
    calls = []

    def noting(completions, completion_ids, **columns):
        calls.append(completion_ids)
        return hard(completions, completion_ids)

    _, log = trained(*trainer_and_config, folder, reward_funcs=noting, learning_rate=0.0, **options)
    return calls, log


def test_exploring_does_not_change_what_grpo_samples_next(tmp_path):
    plain, _ = judged(PLAIN_GRPO, tmp_path)
    for name in ("tree", "pivots", "sketches", "resample"):
        calls, log = judged(AUTO, tmp_path, explorers=[name], **ALWAYS)
        assert any(entry.get(f"explore/share/{name}") for entry in log)
        assert [completions for completions in calls if completions in plain] == plain, name


# -------------------------------------------------------------------------------------------------------------- resume

RESUMED = {
    "off a generation boundary": OFF_BOUNDARY,
    "accumulation": dict(gradient_accumulation_steps=2, steps_per_generation=8, max_steps=5),
    "two iterations, lora": dict(num_iterations=2, steps_per_generation=2, max_steps=7, peft_config=LORA),
    "replay": dict(explorers=["replay", "resample"], steps_per_generation=1, max_steps=6),
}


@pytest.mark.parametrize("case", RESUMED)
def test_a_resumed_run_ends_where_the_uninterrupted_one_does(tmp_path, case):
    options = dict(ALWAYS, explore_min_share=0.7, explorers=["tree", "pivots", "resample"], reward_funcs=hard)
    options |= RESUMED[case]
    whole = make_trainer(*AUTO, tmp_path, save_strategy="steps", save_steps=3, **options)
    whole.train()
    again = make_trainer(*AUTO, tmp_path, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert_same(parameters(again), parameters(whole))
    assert again.branch_explorer.num_batches == whole.branch_explorer.num_batches > 0
    assert again.branch_explorer.estimates.state_dict() == whole.branch_explorer.estimates.state_dict()
    first, second = again.exploration_state(), whole.exploration_state()
    for name, expected in second["explorers"].items():
        assert first["explorers"][name].keys() == expected.keys()
        for field, value in expected.items():
            found = first["explorers"][name][field]
            assert torch.equal(found, value) if isinstance(value, torch.Tensor) else found == value, (name, field)
    assert torch.equal(again.exploration_generator.get_state(), whole.exploration_generator.get_state())
    assert_logged_as(again.state.log_history[:-1], whole.state.log_history[:-1])
    assert any(name.startswith("explore/solved/") for entry in whole.state.log_history[3:] for name in entry)


def test_a_checkpoint_of_another_list_of_explorers_keeps_what_is_known(tmp_path):
    options = dict(reward_funcs=hard, max_steps=4, **ALWAYS)
    whole = make_trainer(*AUTO, tmp_path, explorers=["pivots"], save_strategy="steps", save_steps=2, **options)
    whole.train()
    again = make_trainer(*AUTO, tmp_path, explorers=["pivots", "resample"], **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert again.branch_explorer.num_batches == 4
    assert again.branch_explorer.explorers["pivots"].num_batches >= 2


# --------------------------------------------------------------------------------------------------- with other fields

COMBINED = {
    "maxrl": dict(advantage="maxrl"),
    "passk": dict(advantage="passk", passk_k=2),
    "pkpo": dict(advantage="pkpo", passk_k=2),
    "unlikeliness": dict(advantage="unlikeliness"),
    "filter": dict(dynamic_sampling="filter"),
    "refill": dict(dynamic_sampling="refill", max_sampling_rounds=3),
    "dropped rows": dict(drop_zero_advantage=True),
    "not scaled": dict(scale_rewards="none"),
    "scaled by batch": dict(scale_rewards="batch"),
    "count bonus": dict(count_bonus=0.5),
    "lora": dict(peft_config=LORA),
    "shared prefixes": dict(shared_prefix_training="on"),
}
EXPLORERS = [["tree", "pivots", "resample"], ["sketches", "replay"]]


@pytest.mark.filterwarnings("ignore:After .* round", "ignore:`count_bonus", "ignore:`explore='auto'")
@pytest.mark.parametrize("case", in_turn(COMBINED, {"maxrl", "refill", "dropped rows", "lora"}))
def test_it_trains_with(tmp_path, case):
    """The rows of every explorer are trained, whatever the main rows' advantages are."""
    for number, explorers in enumerate(EXPLORERS):
        options = dict(COMBINED[case], explorers=explorers, **ALWAYS, max_steps=2)
        trainer = make_trainer(*AUTO, tmp_path / str(number), reward_funcs=hard, log_completions=True, **options)
        before = parameters(trainer)
        trainer.train()
        assert differ(before, parameters(trainer))
        log = trainer.state.log_history
        used = {name for name in explorers if any(entry.get(f"explore/share/{name}") for entry in log)}
        assert used - {"replay"}
        for entry in log[:-1]:
            assert all(value == value for value in entry.values()), entry
        files = sorted((tmp_path / str(number) / "completions").iterdir())
        table = pd.concat([pd.read_parquet(file) for file in files])
        assert {"main", *(f"explored_{name}" for name in used)} == set(table["stream"])
        assert table[table["stream"] != "main"]["parent"].notna().all()


@pytest.mark.filterwarnings("ignore:After .* round", "ignore:`explore='auto'")
@pytest.mark.parametrize("case", in_turn([*COMBINED][:7], {"maxrl", "filter", "dropped rows"}))
def test_if_nothing_is_explored_it_is_grpo_with(tmp_path, case, monkeypatch):
    options = dict(COMBINED[case])
    monkeypatch.setattr(Estimates, "choose", lambda estimates, possible, random: [PLAIN] * len(possible))
    found, _ = trained(*AUTO, tmp_path, reward_funcs=hard, **options)
    expected, _ = trained(ExplorationTrainer, ExplorationConfig, tmp_path, reward_funcs=hard, **options)
    assert_same(found, expected)


def test_a_count_bonus_is_no_contrast(tmp_path):
    """Prompts are explored if their rewards are equal, although a bonus makes their advantages differ."""
    options = dict(count_bonus=0.5, max_completion_length=1, train_dataset=make_dataset().select(range(2)))
    trainer = make_trainer(*AUTO, tmp_path, reward_funcs=never, explorers=["resample"], **options, **ALWAYS)
    has_bonus = []
    for _ in range(12):
        has_bonus.append(bool(one_batch(trainer)["advantages"].any()))
        assert trainer.branching.results[0].num_prompts == 2
    assert any(has_bonus)


@pytest.mark.filterwarnings("ignore:GiGPO compares", "ignore:`explore='auto'", "ignore:All .* failed completions")
@pytest.mark.parametrize("method", ["g2rl", "gigpo", "evol_rl"])
def test_methods_that_change_credit_or_rewards_can_explore(tmp_path, method, monkeypatch):
    cls, config, own = tiny_methods()[method]
    found, log = trained(cls, config, tmp_path, reward_funcs=hard, explore="auto", **ALWAYS, **own)
    used = [name for entry in log for name, value in entry.items() if name.startswith("explore/share/") and value]
    assert used
    expected, _ = trained(cls, config, tmp_path, reward_funcs=hard, **own)
    assert differ(found, expected)
    monkeypatch.setattr(Estimates, "choose", lambda estimates, possible, random: [PLAIN] * len(possible))
    found, _ = trained(cls, config, tmp_path, reward_funcs=hard, explore="auto", **own)
    assert_same(found, expected)


# -------------------------------------------------------------------------------------------------------------- agents


@pytest.fixture(autouse=True)
def sound_lake(monkeypatch):
    monkeypatch.setattr(Lake, "breaks", "")


def seldom(environments, **columns):
    """Games of exactly three moves succeed."""
    return [float(environment.episode.steps == 3) for environment in environments]


def make_agent(folder, **options):
    options = dict(reward_funcs=[seldom], explore_min_share=1.0, explorer_options=AGENT_OPTIONS) | options
    return make_agent_of(AutoExploreTrainer, AutoExploreConfig, folder, **options)


@pytest.mark.parametrize("name", ["tail_branches", "turn_trees", "resample", "pivots"])
def test_each_explorer_of_an_agent_trains_rows(tmp_path, monkeypatch, name):
    says(Voice(0.5), monkeypatch.setattr)
    trainer = make_agent(tmp_path, explorers=[name], max_steps=6)
    before = parameters(trainer)
    trainer.train()
    log = trainer.state.log_history
    used = [entry for entry in log if f"explore/sampled_tokens/{name}" in entry]
    assert used and any(entry[f"explore/solved/{name}"] for entry in used)
    assert any(entry[f"explore/contrast_per_token/{name}"] for entry in used) and differ(before, parameters(trainer))
    assert any(f"explored_{name}/reward" in entry for entry in used)
    weight = trainer.branch_explorer.weight_of(trainer.branch_explorer.explorers[name])
    assert (weight is None) == (name in ("tail_branches", "turn_trees"))


def test_an_agent_chooses_from_its_own_explorers_and_resumes(tmp_path, monkeypatch):
    says(Voice(0.5), monkeypatch.setattr)
    options = dict(max_steps=6, steps_per_generation=2, boards=[*BOARDS, *BOARDS])
    whole = make_agent(tmp_path, save_strategy="steps", save_steps=3, **options)
    whole.train()
    assert [*whole.branch_explorer.explorers] == ["tail_branches", "turn_trees"]
    shares = set()
    for entry in whole.state.log_history:
        shares |= {name for name, value in entry.items() if name.startswith("explore/share/") and value}
    assert len(shares) >= 2
    again = make_agent(tmp_path, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert_same(parameters(again), parameters(whole))
    assert again.branch_explorer.estimates.state_dict() == whole.branch_explorer.estimates.state_dict()


def test_an_agent_without_explorers_is_grpo_bit_for_bit(tmp_path, monkeypatch):
    says(Voice(0.5), monkeypatch.setattr)
    runs = []
    for cls, config, own in ((*PLAIN_GRPO, {}), (*AUTO, dict(explorers=[]))):
        trainer = make_agent_of(cls, config, tmp_path, reward_funcs=[seldom], **own)
        trainer.train()
        runs.append(parameters(trainer))
    assert_same(*runs)


def first_group_succeeds(environments, **columns):
    return [float(row < 4) for row in range(len(environments))]


@pytest.mark.parametrize("reward", [never, first_group_succeeds])
def test_turn_trees_of_several_rounds_keep_states(tmp_path, monkeypatch, reward):
    says(Voice(0.5), monkeypatch.setattr)
    options = dict(turn_trees=dict(num_expansions=1, num_rounds=2))
    trainer = make_agent(tmp_path, explorers=["turn_trees"], explorer_options=options, reward_funcs=[reward])
    one_batch(trainer)
    assert trainer.branching.results[0].num_tokens > 0


class Dice(Lake):
    """Its answers depend on chance, so that calls cannot be replayed."""

    dice = Random(0)

    def move(self, direction: str) -> str:
        return super().move(direction) + Dice.dice.choice("abcdefgh")

    move.__doc__ = Lake.move.__doc__


def test_an_agent_whose_answers_depend_on_chance_explores_from_copies(tmp_path, monkeypatch):
    says(Voice(0.3), monkeypatch.setattr)
    options = dict(factory=Dice, explorers=["tail_branches"], max_steps=3)
    with pytest.warns(UserWarning), pytest.raises(RuntimeError, match="by chance.*set `environment_state='copy'`"):
        make_agent(tmp_path, **options).train()
    trainer = make_agent(tmp_path, environment_state="copy", **options)
    with pytest.warns(UserWarning, match="its answers depend on chance"):
        trainer.train()
    assert trainer.forks.states._kinds == {None: "copy"}
    assert any(entry.get("explored_tail_branches/reward") is not None for entry in trainer.state.log_history)


def test_rows_whose_environment_raised_are_not_sampled_again(tmp_path, monkeypatch):
    says(Voice(0.5), monkeypatch.setattr)
    trainer = make_agent(tmp_path, explorers=["resample"], reward_funcs=[never])
    monkeypatch.setattr(trainer.forks, "has_failed", lambda row: row != 2)
    one_batch(trainer)
    (found,) = trainer.branching.results
    assert found.num_prompts == 2 and set(found.branches.rows.parents) == {2}


# -------------------------------------------------------------------------------------------------------------- errors

BAD = {
    "unknown": (dict(explorers=["trees"]), "`explorers`: unknown explorer 'trees'; did you mean 'tree'"),
    "a list in a list": (dict(explorers=[["tree"]]), "`explorers`: unknown explorer"),
    "a text": (dict(explorers="tree"), r"`explorers='tree'` must be a list of names, for example \['tree'"),
    "of agents": (dict(explorers=["tail_branches"]), "`explorers`: 'tail_branches' explores the turns of an agent"),
    "twice": (dict(explorers=["tree", "tree"]), "names an explorer twice: name each once"),
    "options of an unknown one": (dict(explorer_options={"trees": {}}), "explorer_options`: unknown explorer 'trees'"),
    "options of an explorer that is not used": (
        dict(explorers=["tree"], explorer_options={"pivots": {"num_branch": 3}}),
        r"`explorer_options\['pivots'\]`: unknown field 'num_branch'; did you mean 'num_branches'",
    ),
    "options that are a text": (dict(explorer_options="tree"), "`explorer_options='tree'` must be a dictionary"),
    "options that are a number": (dict(explorer_options={"tree": 4}), r"\['tree'\]` is 4: give a dictionary"),
    "discount of 0": (dict(explore_discount=0.0), r"`explore_discount=0.0` must be in \(0, 1\]"),
    "a discount that is a text": (dict(explore_discount="high"), "`explore_discount='high'` must be"),
    "cost below 0": (dict(explore_max_cost=-0.1), "`explore_max_cost=-0.1` must be a finite number of at least 0"),
    "share above 1": (dict(explore_min_share=1.5), r"`explore_min_share=1.5` must be in \[0, 1\]"),
    "environment state": (dict(environment_state="kept"), "`environment_state`: unknown value 'kept'"),
    "no limit": (dict(max_completion_length=None), "`max_completion_length=None`: `explore='auto'` needs a limit"),
    "a second limit": (dict(generation_kwargs={"max_new_tokens": 4}), "`max_completion_length=8` are two limits"),
    "a share of prompts": (dict(explore_share_end=0.5), "`explore_share_end=0.5` has no effect"),
    "unknown way": (dict(explore="trees"), "`explore`: unknown value 'trees'"),
    "explorers without a choice": (dict(explore="replay", explorers=["tree"]), "no effect with `explore='replay'`"),
    "a column that is missing": (dict(explorers=["hints"]), "`hint_column='hint'` is no column of the data"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_work_is_one_clear_error_before_the_model_is_loaded(tmp_path, case):
    options, message = BAD[case]
    with pytest.raises(ValueError, match=message) as caught:
        make_trainer(*AUTO, tmp_path, model="there-is/no-such-model", **options)
    assert str(caught.value).count("\n") == 0


BAD_OPTIONS = {
    ("tree", "expansion_widht", 4): "unknown field 'expansion_widht'; did you mean 'expansion_width'",
    ("tree", "temperature", 0.5): "`temperature` is a field of the trainer: set it there",
    ("pivots", "deferred_branching", True): "`deferred_branching` cannot be set for one explorer of several: leave it",
    ("tree", "replay_buffer", True): "`replay_buffer` cannot be set for one explorer of several: leave it out",
    ("pivots", "num_branches", 1): "`num_branches=1` must be at least 2",
    ("pivots", "num_branches", "3"): "`num_branches='3'` has the wrong type: give a value of type `int`",
    ("tree", "expansion_width", True): "`expansion_width=True` has the wrong type",
}


@pytest.mark.parametrize(("name", "field", "value"), BAD_OPTIONS)
def test_a_wrong_option_of_an_explorer_is_one_clear_error(tmp_path, name, field, value):
    message = re.escape(f"`explorer_options['{name}']`: ") + BAD_OPTIONS[name, field, value]
    with pytest.raises(ValueError, match=message) as caught:
        make_trainer(*AUTO, tmp_path, model="there-is/no-such-model", explorer_options={name: {field: value}})
    assert str(caught.value).count("\n") == 0


AGENT_BAD = {
    "single turns": (dict(explorers=["tree"]), "'tree' explores completions of a single turn, but.*tools"),
    "hints": (dict(explore="hints"), "`explore`: 'hints' explores completions of a single turn.*`explore='auto'`"),
    "one engine": (
        dict(explorer_options={"turn_trees": {"environment_state": "replay"}}),
        r"`explorer_options\['turn_trees'\]`: `environment_state` is a field of the trainer: set it there",
    ),
    "limits": (
        dict(explorer_options={"tail_branches": {"interaction_limits": [2]}}),
        "`interaction_limits` cannot be set for one explorer of several",
    ),
}


@pytest.mark.parametrize("case", AGENT_BAD)
def test_what_cannot_work_for_an_agent_is_one_clear_error(tmp_path, case):
    options, message = AGENT_BAD[case]
    with pytest.raises(ValueError, match=message):
        make_agent(tmp_path, **options)


def test_fields_of_the_choice_without_the_choice_are_an_error(tmp_path):
    for options in (dict(explorers=["tree"]), dict(explorer_options={"tree": {}})):
        with pytest.raises(ValueError, match=f"`{next(iter(options))}=.*has no effect with `explore=None`"):
            make_trainer(ExplorationTrainer, ExplorationConfig, tmp_path, **options)


def test_options_can_be_json_on_the_command_line():
    flags = ["--output_dir", "out", "--use_cpu", "true", "--explorers", "tree", "pivots"]
    flags += ["--explorer_options", '{"tree": {"expansion_width": 3}}', "--environment_state", "copy"]
    (args,) = TrlParser(AutoExploreConfig).parse_args_and_config(flags)
    assert args.environment_state == "copy"
    assert args.explorers == ["tree", "pivots"] and args.explorer_options == {"tree": {"expansion_width": 3}}


def test_options_follow_a_callback_that_changes_shared_fields(tmp_path):
    trainer = make_trainer(*AUTO, tmp_path, reward_funcs=never, explorers=["pivots"], **ALWAYS)
    trainer.args.sampling_batch_size, trainer.args.success_threshold = 3, 0.5
    one_batch(trainer)
    own = trainer.branch_explorer.options["pivots"].args
    assert own.sampling_batch_size == 3 and own.success_threshold == 0.5
    assert own.num_branches == 3 and own.explore is None


def test_with_a_success_reward_a_format_reward_is_no_contrast(tmp_path):
    """Groups whose format differs, and whose completions all fail, are explored."""

    def form(completions, **columns):
        return [float(place % 2) for place in range(len(completions))]

    def right(completions, **columns):
        return [0.0] * len(completions)

    options = dict(reward_funcs=[form, right], explorers=["resample"], success_threshold=1.5, **ALWAYS)
    trainer = make_trainer(*AUTO, tmp_path, **options)
    one_batch(trainer)
    assert not trainer.branching.results
    trainer = make_trainer(*AUTO, tmp_path, success_reward="right", **options)
    one_batch(trainer)
    (found,) = trainer.branching.results
    assert found.num_prompts == 2
    sums = trainer.branch_explorer.estimates.sums
    assert sums[PLAIN].contrast == sums["resample"].contrast == 0


def test_sketches_stay_in_the_context_of_the_model(tmp_path):
    options = dict(sketches=dict(max_sketch_length=4, context_length=20))
    trainer = make_trainer(*AUTO, tmp_path, explorers=["sketches"], explorer_options=options)
    assert trainer.branch_explorer.explorers["sketches"].explorer.context_length == 20
    trainer = make_trainer(
        *AUTO, tmp_path, explorers=["sketches"], explorer_options=dict(sketches={}), max_completion_length=8
    )
    assert trainer.branch_explorer.explorers["sketches"].explorer.context_length == 128  # the model's
    options = dict(sketches=dict(max_sketch_length=4, context_length=8))
    with pytest.raises(ValueError, match="leave no room for a prompt in a context of 8 tokens"):
        make_trainer(*AUTO, tmp_path, explorers=["sketches"], explorer_options=options)
