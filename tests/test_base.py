"""The seams into TRL: reductions to GRPO, streams under every loss, scoring once, eval, sampling, errors."""

import math
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from transformers import MixtralConfig, MixtralForCausalLM, Qwen2ForSequenceClassification, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from world import (
    TINY,
    assert_same,
    contains_answer,
    differ,
    make_dataset,
    make_model,
    make_tokenizer,
    make_trainer,
    parameters,
    saved_model,
    some_letter,
    text_of,
    tiny_methods,
    trained,
)

from trl_explore.rows.rollouts import Rows
from trl_explore.rows.streams import LOSS_NORMALISERS, loss_mask, row_tokens, select_rows
from trl_explore.trainers import (
    AutoExploreConfig,
    AutoExploreTrainer,
    BranPOConfig,
    DeepGRPOConfig,
    DeepGRPOTrainer,
    ExplorationConfig,
    ExplorationTrainer,
    SESAConfig,
    SESATrainer,
    TreeGRPOConfig,
)
from trl_explore.trainers.base import watch
from trl_explore.trainers.config import upgrade_config

TIMING = ("runtime", "per_second", "_time")
SGD = dict(optim="sgd", lr_scheduler_type="constant", max_grad_norm=0.0, learning_rate=0.1, max_steps=2)
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
DROPPING = ExplorationTrainer, ExplorationConfig, dict(drop_zero_advantage=True)


class Echo(ExplorationTrainer):
    """Trains the main rows a second time as an extra stream: the sum must be (1 + weight) times GRPO."""

    weight = 0.5
    copies = 1

    def extra_streams(self, output, examples, rewards):
        prompts = row_tokens(output)[0]
        rows = Rows(
            examples=examples * self.copies,
            prompt_ids=prompts * self.copies,
            completion_ids=self.main_completion_ids * self.copies,
            loss_mask=[[1] * len(ids) for ids in self.main_completion_ids] * self.copies,
            group_size=self.num_generations,
        )
        return {"echo": (self.scorer.score("echo", rows), self.weight)}


class EchoTwice(Echo):
    copies = 2


REDUCTIONS = {
    "default": {},
    "beta": dict(beta=0.1),
    "lora": dict(peft_config=LORA),
    "lora and beta": dict(peft_config=LORA, beta=0.1),
    "iterations": dict(num_iterations=2, max_steps=4),
    "accumulation": dict(gradient_accumulation_steps=2),
    "generation longer than accumulation": dict(gradient_accumulation_steps=2, steps_per_generation=4),
    "accumulation longer than generation": dict(gradient_accumulation_steps=4, steps_per_generation=2),
    "truncated masked": dict(mask_truncated_completions=True),
    "conversational": dict(conversational=True),
    "rewards with None": dict(reward_funcs=[contains_answer, some_letter], reward_weights=[1.0, 0.5]),
    "batch scale": dict(scale_rewards="batch"),
    "normalise then sum": dict(
        reward_funcs=[contains_answer, some_letter], multi_objective_aggregation="normalize_then_sum"
    ),
    "entropy bonus": dict(entropy_coef=0.01),
    "entropy quantile": dict(top_entropy_quantile=0.5),
    "padded to a multiple": dict(pad_to_multiple_of=8),
}


@pytest.mark.parametrize("options", REDUCTIONS.values(), ids=REDUCTIONS.keys())
def test_without_hooks_the_base_is_grpo_bit_for_bit(tmp_path, options):
    expected, _ = trained(GRPOTrainer, GRPOConfig, tmp_path, **options)
    got, _ = trained(ExplorationTrainer, ExplorationConfig, tmp_path, **options)
    assert_same(got, expected)


def sgd_run(trainer_class, config_class, tmp_path, *, scale=1.0, **options):
    settings = {**SGD, **options}
    settings["learning_rate"] = settings["learning_rate"] * scale
    return trained(trainer_class, config_class, tmp_path, **settings)


@pytest.mark.parametrize("loss_type", sorted(LOSS_NORMALISERS))
@pytest.mark.parametrize("trainer_class", [Echo, EchoTwice])
def test_an_echo_of_the_main_stream_adds_its_weight_under_every_loss_type(tmp_path, loss_type, trainer_class):
    # Two rows of every group and one micro-batch: bnpo's own normaliser is then the whole batch, as for the stream.
    options = dict(loss_type=loss_type, epsilon_high=5.0 if loss_type == "cispo" else 0.2)
    if loss_type == "luspo":
        options["importance_sampling_level"] = "sequence"
    expected, _ = sgd_run(GRPOTrainer, GRPOConfig, tmp_path, scale=1.5, **options)
    got, _ = sgd_run(trainer_class, ExplorationConfig, tmp_path, **options)
    assert_same(got, expected, tolerance=1e-6)
    start = parameters(make_trainer())
    assert max((got[n] - start[n]).abs().max() for n in got) > 1e-4  # a third of it is more than the tolerance


# With these, the main stream has a term or a window of its own, which other tests look at.
NOT_SCALED = {"default", "beta", "lora and beta", "generation longer than accumulation", "entropy bonus"}
ECHO_CASES = {name: case for name, case in REDUCTIONS.items() if name not in NOT_SCALED | {"entropy quantile"}}


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
@pytest.mark.parametrize("options", ECHO_CASES.values(), ids=ECHO_CASES.keys())
def test_an_echo_adds_its_weight_in_every_setting(tmp_path, options, loss_type):
    options = {**options, "loss_type": loss_type}
    expected, _ = sgd_run(GRPOTrainer, GRPOConfig, tmp_path, scale=1.5, **options)
    got, _ = sgd_run(Echo, ExplorationConfig, tmp_path, **options)
    assert_same(got, expected, tolerance=2e-6)


class SumOfGradients(TrainerCallback):
    def __init__(self):
        self.total = {}

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        for name, p in model.named_parameters():
            self.total[name] = self.total.get(name, 0) + p.grad


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "luspo"])
def test_over_a_generation_batch_of_several_steps_an_echo_adds_its_weight(tmp_path, loss_type):
    # The two streams cut the batch differently, so only the sum over its optimiser steps can agree.
    options = dict(
        gradient_accumulation_steps=2, steps_per_generation=4, max_steps=2, loss_type=loss_type, learning_rate=0.0
    )
    sums = []
    for trainer_class, config_class in ((GRPOTrainer, GRPOConfig), (Echo, ExplorationConfig)):
        callback = SumOfGradients()
        sgd_run(trainer_class, config_class, tmp_path, callbacks=[callback], **options)
        sums.append(callback.total)
    assert_same(sums[1], {name: 1.5 * g for name, g in sums[0].items()}, tolerance=1e-6)


@pytest.mark.parametrize("peft_config", [None, LORA], ids=["full", "lora"])
def test_the_kl_term_acts_in_both_streams(tmp_path, peft_config):
    # The reference is the initial policy (LoRA: the base model), away from which the KL term has a gradient.
    options = dict(beta=0.5, peft_config=peft_config)
    expected, _ = sgd_run(GRPOTrainer, GRPOConfig, tmp_path, scale=1.5, **options)
    got, log = sgd_run(Echo, ExplorationConfig, tmp_path, **options)
    assert_same(got, expected, tolerance=2e-6)
    assert log[-2]["echo/kl"] == pytest.approx(log[-2]["kl"], rel=1e-4)


def test_main_metrics_are_those_of_grpo_and_the_stream_logs_under_its_own_name(tmp_path):
    options = dict(reward_funcs=[contains_answer, some_letter], beta=0.1, entropy_coef=0.01, max_steps=1)
    _, expected = trained(GRPOTrainer, GRPOConfig, tmp_path, **options)
    _, got = trained(Echo, ExplorationConfig, tmp_path, **options)
    untouched = set(expected[0]) - {"loss", "grad_norm", "step_time"}
    assert {k: got[0][k] for k in untouched} == {k: expected[0][k] for k in untouched}
    for name in ("reward", "rewards/contains_answer/mean", "entropy", "kl", "completions/mean_length", "num_tokens"):
        assert got[0][f"echo/{name}"] == pytest.approx(got[0][name], rel=1e-5), name
    assert got[0]["loss"] == pytest.approx(expected[0]["loss"] + 0.5 * got[0]["echo/loss"], abs=1e-6)
    assert "echo/policy_loss" not in got[0]  # the entropy bonus belongs to the main stream


def test_an_adaptive_entropy_controller_sees_the_main_stream_only(tmp_path):
    options = dict(use_adaptive_entropy=True, entropy_target=0.1, entropy_coef=0.02, max_steps=2)
    before = make_trainer(GRPOTrainer, GRPOConfig, tmp_path, **options)
    after = make_trainer(Echo, ExplorationConfig, tmp_path, **options)
    for trainer in (before, after):
        trainer.train()
    assert after.entropy_coef == before.entropy_coef  # one decrement per step, not one per stream


class Recorder:
    """A reward function that remembers what it was called with."""

    __name__ = "recorder"

    def __init__(self):
        self.calls = []

    def __call__(self, prompts, completions, completion_ids, answer, trainer_state, log_metric, **kwargs):
        log_metric("seen", len(completions))
        self.calls.append(
            (list(prompts), list(answer), [list(ids) for ids in completion_ids], trainer_state.global_step)
        )
        return contains_answer(completions, answer)


def test_extra_rows_reach_the_reward_functions_as_main_rows_do_and_once(tmp_path):
    recorder = Recorder()
    _, log = trained(Echo, ExplorationConfig, tmp_path, reward_funcs=recorder, max_steps=1)
    main, echo = recorder.calls
    assert main == echo
    for prompt, answer in zip(main[0], main[1], strict=True):
        assert answer == str((int(prompt[0]) + int(prompt[2])) % 10)
    assert log[0]["seen"] == log[0]["echo/seen"] == 8


class Rescored(Echo):
    """Hands the rewards of half the rows back as known."""

    def extra_streams(self, output, examples, rewards):
        prompts = row_tokens(output)[0]
        rows = Rows(
            examples=examples,
            prompt_ids=prompts,
            completion_ids=self.main_completion_ids,
            loss_mask=[[1] * len(ids) for ids in self.main_completion_ids],
            group_size=self.num_generations,
            known_rewards=[[r] if i % 2 else None for i, r in enumerate(rewards.tolist())],
        )
        scored = self.scorer.score("echo", rows)
        assert torch.equal(scored.rewards, rewards)
        return {"echo": (scored, self.weight)}


def test_rows_whose_rewards_are_known_are_not_scored_again(tmp_path):
    recorder = Recorder()
    got, _ = sgd_run(Rescored, ExplorationConfig, tmp_path, reward_funcs=recorder)
    assert [len(prompts) for prompts, *_ in recorder.calls] == [8, 4] * 2
    assert recorder.calls[1][2] == recorder.calls[0][2][::2]
    expected, _ = sgd_run(Echo, ExplorationConfig, tmp_path)
    assert_same(got, expected)

    async def contains_answer_later(completions, answer, **kwargs):
        return contains_answer(completions, answer)

    later, _ = sgd_run(Rescored, ExplorationConfig, tmp_path, reward_funcs=contains_answer_later)
    assert_same(later, expected)


def test_reward_models_score_extra_rows_too(tmp_path):
    torch.manual_seed(0)
    config = make_model().config
    config.num_labels = 1
    judge = Qwen2ForSequenceClassification(config)
    judge.eval()
    tokenizer = make_tokenizer()
    options = dict(reward_funcs=judge, reward_processing_classes=tokenizer)
    got, log = sgd_run(Rescored, ExplorationConfig, tmp_path, **options)
    expected, _ = sgd_run(Echo, ExplorationConfig, tmp_path, **options)
    assert_same(got, expected, tolerance=1e-6)
    assert log[0]["echo/reward"] == pytest.approx(log[0]["reward"]) != 0


def test_a_reward_function_with_a_wrong_count_is_named_also_on_extra_rows(tmp_path):
    def short_on_parts(completions, **kwargs):
        return [0.0] * (len(completions) - (len(completions) < 8))

    with pytest.raises(ValueError, match="'short_on_parts' returned 3 rewards for 4 completions"):
        trained(Rescored, ExplorationConfig, tmp_path, reward_funcs=short_on_parts)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(learning_rate=-1), "`learning_rate=-1` must be a finite number, at least 0."),
        (dict(learning_rate=math.nan), "`learning_rate=nan` must be"),
        (dict(temperature=0), "`temperature=0` must be positive"),
        (dict(max_completion_length=0), "`max_completion_length=0` must be at least 1 token."),
        (dict(top_p=1.5), "`top_p=1.5` must be in (0, 1]"),
        (dict(min_p=-0.1), "`min_p=-0.1` must be in [0, 1]"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_values_that_would_end_a_run_later_are_refused_at_construction(options, words, tmp_path):
    with pytest.raises(ValueError) as error:
        ExplorationConfig(str(tmp_path), use_cpu=True, bf16=False, **options)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("config", "field", "places", "most"),
    [
        (DeepGRPOConfig, "num_branches", 16, 6250),
        (TreeGRPOConfig, "expansion_width", 4, 25_000),
        (BranPOConfig, "num_branches", 16, 6250),
    ],
)
def test_a_field_that_asks_for_absurdly_many_rows_is_refused(config, field, places, most, tmp_path):
    options = dict(use_cpu=True, bf16=False, per_device_train_batch_size=16, num_generations=4)
    config(str(tmp_path), **options, **{field: most})
    with pytest.raises(ValueError) as error:
        config(str(tmp_path), **options, **{field: most + 1})
    assert f"`{field}={most + 1}` can sample {most + 1:,} completions from each of {places} places" in str(error.value)
    assert f"lower it to at most {most}, or" in str(error.value)


def test_a_limit_of_pivots_allows_more_branches(tmp_path):
    options = dict(use_cpu=True, bf16=False, per_device_train_batch_size=16, num_generations=4)
    DeepGRPOConfig(str(tmp_path), **options, num_branches=50_000, max_pivots_per_batch=2)


class Empty(ExplorationTrainer):
    def extra_streams(self, output, examples, rewards):
        rows = Rows(examples=[], prompt_ids=[], completion_ids=[], loss_mask=[], group_size=4)
        assert self.sample([], 2, 3) == []
        assert self.scorer.score("none", rows) is None
        return {}


@pytest.mark.parametrize("order", ["first", "last"])
@pytest.mark.parametrize("replaced", [False, True])
def test_the_end_of_a_watch_leaves_other_watches(order, replaced):
    class Trainer:
        def _compute_loss(self):
            return 1

    trainer, seen = Trainer(), []
    if replaced:  # by a user, before any watch
        trainer._compute_loss = lambda: 2
    before = dict(trainer.__dict__)
    ends = [watch(trainer, "loss", lambda result, name=name: seen.append(name)) for name in ("a", "b")]
    if order == "last":
        ends.reverse()
    ends[0]()
    assert trainer._compute_loss() == 1 + replaced
    assert seen == (["b"] if order == "first" else ["a"])
    ends[0]()  # a second end changes nothing
    ends[1]()
    assert trainer._compute_loss() == 1 + replaced and len(seen) == 1
    if order == "last":
        assert trainer.__dict__ == before


def test_a_stream_without_rows_changes_nothing(tmp_path):
    got, _ = trained(Empty, ExplorationConfig, tmp_path)
    expected, _ = trained(GRPOTrainer, GRPOConfig, tmp_path)
    assert_same(got, expected)


class Shaped(ExplorationTrainer):
    def shape_rewards(self, rewards_per_func):
        return 1 - rewards_per_func


def test_shaped_rewards_train_and_raw_rewards_are_logged(tmp_path):
    def inverted(completions, answer, **kwargs):
        return [1 - r for r in contains_answer(completions, answer)]

    got, log = trained(Shaped, ExplorationConfig, tmp_path)
    expected, inverted_log = trained(GRPOTrainer, GRPOConfig, tmp_path, reward_funcs=inverted)
    _, raw_log = trained(GRPOTrainer, GRPOConfig, tmp_path, max_steps=1)
    assert_same(got, expected)
    assert log[0]["shaped_reward"] == inverted_log[0]["reward"]
    for name in ("reward", "reward_std", "rewards/contains_answer/mean", "rewards/contains_answer/std"):
        assert log[0][name] == pytest.approx(raw_log[0][name], rel=1e-6), name


class PerToken(ExplorationTrainer):
    def assign_advantages(self, output):
        return output["advantages"].unsqueeze(1).expand(output["completion_ids"].shape)


def test_constant_advantages_per_token_equal_scalar_ones(tmp_path):
    got, _ = trained(PerToken, ExplorationConfig, tmp_path, steps_per_generation=2)
    expected, _ = trained(GRPOTrainer, GRPOConfig, tmp_path, steps_per_generation=2)
    assert_same(got, expected, tolerance=1e-7)


class Rolled(ExplorationTrainer):
    """Samples each prompt after a token of its own, as SESA's sketches do."""

    def rollout(self, prompt_ids, plain):
        return plain([ids + [7] for ids in prompt_ids])


def test_a_method_that_samples_itself_leaves_prompts_and_evaluation_alone(tmp_path):
    trainer = make_trainer(
        Rolled, ExplorationConfig, tmp_path, eval_dataset=make_dataset().select(range(4)), max_steps=1
    )
    reference = make_trainer(
        GRPOTrainer, GRPOConfig, tmp_path, eval_dataset=make_dataset().select(range(4)), max_steps=1
    )
    torch.manual_seed(0)
    first = trainer.evaluate()
    torch.manual_seed(0)
    second = reference.evaluate()
    assert first.keys() == second.keys()
    assert {k: (v, second[k]) for k, v in first.items() if v != second[k] and not k.endswith(TIMING)} == {}
    trainer.train()
    reference.train()
    assert differ(parameters(trainer), parameters(reference))
    log, expected = trainer.state.log_history[-2], reference.state.log_history[-2]
    prompt_tokens = 8 * 4  # a row is billed for its own prompt of four characters, not for the sampling prefix
    assert log["num_tokens"] - 8 * log["completions/mean_length"] == prompt_tokens
    assert expected["num_tokens"] - 8 * expected["completions/mean_length"] == prompt_tokens


def test_sampling_keeps_counts_budgets_and_the_global_random_state(tmp_path):
    trainer = make_trainer(ExplorationTrainer, ExplorationConfig, tmp_path)
    trainer.model.train()
    before = torch.get_rng_state()
    groups = trainer.sample([[5, 15, 6], [5], [6, 7]], [3, 1, 2], [1, 8, 4])
    assert torch.equal(torch.get_rng_state(), before)
    assert [len(group) for group in groups] == [3, 1, 2]
    for group, budget in zip(groups, [1, 8, 4], strict=True):
        for continuation in group:
            assert 1 <= len(continuation.token_ids) <= budget
            assert continuation.finished == (continuation.token_ids[-1] == 1)
            assert 1 not in continuation.token_ids[:-1] and 0 not in continuation.token_ids
    assert trainer.generation_config.max_new_tokens == 8


def test_the_same_state_samples_the_same_and_the_next_call_differs(tmp_path):
    trainer = make_trainer(ExplorationTrainer, ExplorationConfig, tmp_path)
    state = trainer.exploration_generator.get_state()
    first = trainer.sample([[5, 6]] * 4, 4, 8)
    second = trainer.sample([[5, 6]] * 4, 4, 8)
    trainer.exploration_generator.set_state(state)
    assert trainer.sample([[5, 6]] * 4, 4, 8) == first != second


@pytest.mark.parametrize("num_beams", [1, 3])
def test_samples_continue_each_prefix_as_generate_would_and_know_their_entropies(tmp_path, num_beams):
    options = {"do_sample": False, "num_beams": num_beams}
    trainer = make_trainer(ExplorationTrainer, ExplorationConfig, tmp_path, generation_kwargs=options)
    trainer.model.train()
    prefixes = [[5, 15, 6], [9, 8, 7, 6, 5], [6]]
    for prefix, group in zip(prefixes, trainer.sample(prefixes, 2, 6, entropies=True), strict=True):
        expected = trainer.model.generate(torch.tensor([prefix]), max_new_tokens=6, pad_token_id=0, **options)[0]
        ids = expected[len(prefix) :].tolist()
        ids = ids[: ids.index(1) + 1] if 1 in ids else ids
        with torch.no_grad():
            logprobs = trainer.model(expected[None]).logits[0, len(prefix) - 1 : -1].log_softmax(dim=-1)
        entropies = -(logprobs.exp() * logprobs).sum(dim=-1)[: len(ids)]
        assert len(group) == 2
        for continuation in group:
            assert (continuation.token_ids, continuation.finished) == (ids, ids[-1] == 1)
            assert continuation.entropies == pytest.approx(entropies.tolist(), abs=1e-4)


METHODS = {
    "plain": (ExplorationTrainer, ExplorationConfig, {}),
    **tiny_methods(deep_grpo=dict(num_branches=2)),
    "SESA, lists": (SESATrainer, SESAConfig, dict(mode="sequential", candidate_separator="+", max_lists=1)),
}


def slow_but(fast, cases):
    """Parameters of a test, of which the default suite runs those with these names."""
    slow = {name: [] if name in fast else [pytest.mark.slow] for name in cases}
    return [pytest.param(*case, id=name, marks=slow[name]) for name, case in cases.items()]


WITH_BEAMS = slow_but({"plain", "tree_grpo", "deep_grpo", "sesa", "SESA, lists", "auto"}, METHODS)


@pytest.mark.parametrize("method, config, options", WITH_BEAMS)
def test_every_method_samples_with_beams(tmp_path, method, config, options):
    _, log = trained(method, config, tmp_path, **options, generation_kwargs={"num_beams": 2}, max_steps=1)
    assert log[0]["completions/mean_length"] > 0 and log[0]["generation/main_seconds"] > 0


SOME = dict(explore_prompts="unsolved")  # GRPO samples every prompt, and the method samples the unsolved ones again
WITH_OWN_LIMIT = {
    **{name: (name, {}) for name in ("tree_rl", "attn_rl", "deep_grpo", "branpo", "agent_tree_grpo", "tree_grpo")},
    "sesa, one response": ("sesa", dict(mode="sequential", max_sketch_length=64)),
    "sesa, some prompts": ("sesa", SOME),
    "sesa, some prompts without sketches": ("sesa", dict(SOME, num_sketches=0)),
}


@pytest.mark.parametrize("method, more", WITH_OWN_LIMIT.values(), ids=WITH_OWN_LIMIT.keys())
def test_rows_of_a_method_and_of_grpo_have_one_limit_of_tokens(tmp_path, method, more):
    trainer_class, config_class, options = tiny_methods()[method]
    limit = 12 if more else 4  # more and fewer tokens are both another limit
    words = f"`generation_kwargs={{'max_new_tokens': {limit}}}` and `max_completion_length=8` are two limits of a "
    words += f"completion, and {trainer_class.__name__} samples rows with `max_completion_length`: "
    words += "leave `max_new_tokens` out."
    options = {**options, **more, "generation_kwargs": {"max_new_tokens": limit}}
    with pytest.raises(ValueError, match=re.escape(words)):
        make_trainer(trainer_class, config_class, tmp_path, **options)


NOT_SAMPLED = {
    "`generation_kwargs={'num_return_sequences': 2}`: .* raise `num_generations=4`": dict(
        generation_kwargs={"num_return_sequences": 2}
    ),
    "`generation_kwargs={'num_beams': 2}`: vLLM .*set `use_vllm=False`": dict(
        use_vllm=True, generation_kwargs={"num_beams": 2}
    ),
    "`max_completion_length=None`: a vLLM server .*Set a number": dict(
        use_vllm=True, vllm_mode="server", max_completion_length=None
    ),
    "are two limits of a completion, and `explore='resample'` samples rows": dict(
        SOME, explore="resample", generation_kwargs={"max_new_tokens": 4}
    ),
}


@pytest.mark.parametrize("message, options", NOT_SAMPLED.items(), ids=NOT_SAMPLED.keys())
def test_what_cannot_be_sampled_is_refused_at_construction(tmp_path, message, options):
    with pytest.raises(ValueError, match=message):
        make_trainer(ExplorationTrainer, ExplorationConfig, tmp_path, **options)


@pytest.mark.parametrize("method", ["tree_grpo", "deep_grpo", "sesa"])
def test_a_limit_that_vllm_prefers_to_those_of_requests_is_refused(tmp_path, method):
    trainer_class, config_class, options = tiny_methods()[method]
    options = dict(options, use_vllm=True, generation_kwargs={"max_tokens": 8})
    words = f"`generation_kwargs={{'max_tokens': 8}}` .*with which {trainer_class.__name__} samples: leave"
    with pytest.raises(ValueError, match=words):
        make_trainer(trainer_class, config_class, tmp_path, **options)


SWITCHED_OFF = ["tree_rl", "attn_rl", "branpo", "agent_tree_grpo", "auto"]


@pytest.mark.parametrize("limit", [4, 12])
def test_methods_that_are_switched_off_have_the_limit_of_grpo(tmp_path, limit):
    options = dict(generation_kwargs={"max_new_tokens": limit}, max_steps=1)
    expected, _ = trained(GRPOTrainer, GRPOConfig, tmp_path / "grpo", **options)
    for name in SWITCHED_OFF:
        trainer_class, config_class, tiny = tiny_methods()[name]
        off = {**tiny, **TINY[name].neutral, **options}
        got, _ = trained(trainer_class, config_class, tmp_path / name, **off)
        assert_same(got, expected)


def all_differ(completions, **kwargs):
    return [float(i) for i in range(len(completions))]


def first_group_differs(completions, **kwargs):
    return [float(i) if i < 4 else 0.7 for i in range(len(completions))]


@pytest.mark.parametrize("loss_type", sorted(LOSS_NORMALISERS))
@pytest.mark.parametrize("options", [{}, dict(gradient_accumulation_steps=2), dict(steps_per_generation=4)])
def test_with_nothing_to_drop_dropping_changes_nothing(tmp_path, loss_type, options):
    options = dict(options, loss_type=loss_type, reward_funcs=all_differ, max_steps=2)
    options |= dict(epsilon_high=5.0) if loss_type == "cispo" else {}
    options |= dict(importance_sampling_level="sequence") if loss_type == "luspo" else {}
    expected, _ = sgd_run(GRPOTrainer, GRPOConfig, tmp_path, **options)
    got, _ = sgd_run(ExplorationTrainer, ExplorationConfig, tmp_path, drop_zero_advantage=True, **options)
    assert_same(got, expected)


def test_where_rows_are_dropped_bnpos_micro_batches_keep_their_weight(tmp_path):
    options = dict(loss_type="bnpo", gradient_accumulation_steps=2, per_device_train_batch_size=4, max_steps=1)
    options |= dict(reward_funcs=first_group_differs)
    start, noted = parameters(make_trainer()), {}

    class Noting(ExplorationTrainer):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            noted["kept"], noted["all"] = int(loss_mask(output).sum()), int(output["completion_mask"].sum())
            return output

    plain, _ = sgd_run(GRPOTrainer, GRPOConfig, tmp_path, **options)
    got, _ = sgd_run(Noting, ExplorationConfig, tmp_path, drop_zero_advantage=True, **options)
    assert 0 < noted["kept"] < noted["all"]
    factor = noted["all"] / noted["kept"]
    assert_same(got, {name: start[name] + factor * (p - start[name]) for name, p in plain.items()}, tolerance=2e-6)


def loss_and_gradient(folder, kind=DROPPING, **options):
    """Of one batch of which rows are dropped; and the trainer and its rows."""
    trainer_class, config_class, *own = kind
    trainer = make_trainer(trainer_class, config_class, folder, **{**SGD, **dict(*own), **options})
    trainer.model.train()
    torch.manual_seed(5)
    inputs = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    trainer.current_gradient_accumulation_steps = 1
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    gradient = {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}
    return trainer, inputs, loss.item(), gradient


@pytest.mark.parametrize("loss_type", sorted(LOSS_NORMALISERS))
def test_an_entropy_bonus_keeps_its_size_where_rows_are_dropped(tmp_path, loss_type):
    options = dict(loss_type=loss_type, beta=0.1)
    _, _, without, plain = loss_and_gradient(tmp_path, **options)
    trainer, inputs, loss, gradient = loss_and_gradient(tmp_path, **options, entropy_coef=0.3)
    mask = inputs["completion_mask"] * inputs["tool_mask"]
    assert 0 < mask.any(dim=1).sum() < 8
    ids, attention = (
        torch.cat([inputs[f"prompt_{part}"], inputs[f"completion_{part}"]], dim=1) for part in ("ids", "mask")
    )
    trainer.model.zero_grad()
    logits = trainer.model(ids, attention_mask=attention).logits[:, -mask.shape[1] - 1 : -1]
    entropies = torch.distributions.Categorical(logits=logits).entropy()
    bonus = 0.3 * (entropies * mask).sum() / mask.sum()
    bonus.backward()
    assert loss == pytest.approx(without - bonus.item(), abs=1e-6)
    expected = {name: plain[name] - p.grad for name, p in trainer.model.named_parameters()}
    assert_same(gradient, expected, tolerance=5e-6)


@pytest.mark.parametrize(
    "loss_type, beta", [("grpo", 0.0), ("grpo", 0.5), ("bnpo", 0.5), ("dr_grpo", 0.5), ("sapo", 0.5)]
)
def test_loss_and_kl_term_are_means_over_the_rows_that_are_kept(tmp_path, loss_type, beta):
    options = dict(loss_type=loss_type, beta=beta, peft_config=LORA)  # away from the reference
    trainer, inputs, loss, gradient = loss_and_gradient(tmp_path, **options)
    kept = (inputs["completion_mask"] * inputs["tool_mask"]).any(dim=1).nonzero().squeeze(1)
    assert 0 < len(kept) < 8
    trainer.stream_training.main_totals = None
    trainer.model.zero_grad()
    alone = trainer.compute_loss(trainer.model, select_rows(inputs, kept))
    alone.backward()
    assert loss == pytest.approx(alone.item(), abs=1e-6)
    own = {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}
    assert_same(gradient, own, tolerance=1e-6)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo"])
def test_the_router_loss_keeps_its_size_where_rows_are_dropped(tmp_path, loss_type):
    def difference(**options):
        values = []
        for coef in (0.0, 0.5):
            torch.manual_seed(0)
            sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, max_position_embeddings=128)
            heads = dict(num_attention_heads=2, num_key_value_heads=2, num_local_experts=2, num_experts_per_tok=1)
            ends = dict(vocab_size=29, eos_token_id=1, pad_token_id=0, initializer_range=0.3)
            model = MixtralForCausalLM(MixtralConfig(**sizes, **heads, **ends, router_aux_loss_coef=coef))
            values.append(loss_and_gradient(tmp_path, model=model, loss_type=loss_type, **options)[2:])
        (without, plain), (loss, gradient) = values
        return loss - without, {name: gradient[name] - plain[name] for name in plain}

    (value, expected), (got, gradient) = difference(drop_zero_advantage=False), difference()
    assert value > 0.1 and got == pytest.approx(value, abs=1e-6)
    assert_same(gradient, expected, tolerance=1e-6)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo", "dr_grpo"])
def test_dropping_rows_acts_in_both_streams_alike(tmp_path, loss_type):
    # As without dropping, bnpo's own mean is that of the stream where there is one micro-batch.
    steps = 1 if loss_type == "bnpo" else 2
    options = dict(drop_zero_advantage=True, loss_type=loss_type, gradient_accumulation_steps=steps)
    got, _ = sgd_run(Echo, ExplorationConfig, tmp_path, **options)
    expected, _ = sgd_run(ExplorationTrainer, ExplorationConfig, tmp_path, scale=1.5, **options)
    assert_same(got, expected, tolerance=2e-6)


def graded(wrong, right=1.0):
    """The task's reward on another scale."""

    def reward(completions, answer, **kwargs):
        return [right if a in text_of(c) else wrong for c, a in zip(completions, answer, strict=True)]

    return reward


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(scale_rewards="batch"),
        dict(scale_rewards="batch", drop_zero_advantage=False),
        dict(multi_objective_aggregation="normalize_then_sum"),
    ],
    ids=["group", "batch", "batch, not dropped", "normalise then sum"],
)
def test_dropping_rows_does_not_depend_on_the_scale_of_rewards(tmp_path, options):
    options = dict(num_generations=8, per_device_train_batch_size=16, drop_zero_advantage=True, max_steps=1) | options
    start = parameters(make_trainer())
    updates = []
    for wrong in (0.0, 0.1, 0.3, -0.7):
        got, _ = sgd_run(Echo, ExplorationConfig, tmp_path, reward_funcs=graded(wrong), **options)
        updates.append(torch.cat([(got[name] - start[name]).flatten() for name in start]))
    for update in updates[1:]:
        assert (update - updates[0]).norm() < 1e-3 * updates[0].norm()


@pytest.mark.parametrize(
    "value, loss_type", [(0.0, "dapo"), (0.0, "grpo"), (0.1, "dapo"), (0.3, "dapo"), (0.7, "dapo")]
)
def test_rows_of_equal_rewards_train_nothing_and_make_no_forward_pass(tmp_path, value, loss_type):
    options = dict(reward_funcs=graded(value, value), num_generations=8, drop_zero_advantage=True, max_steps=2)
    before = parameters(make_trainer())
    got, log = trained(Echo, ExplorationConfig, tmp_path, loss_type=loss_type, **options)
    assert_same(got, before)
    assert "echo/entropy" not in log[0] and log[0]["echo/loss"] == log[0]["echo/computed_fraction"] == 0.0


@pytest.mark.parametrize("beta, drop, share", [(0.0, False, 0.5), (0.1, False, 1.0), (0.1, True, 0.5)])
def test_the_share_of_rows_that_are_computed_is_logged(tmp_path, beta, drop, share):
    options = dict(beta=beta, drop_zero_advantage=drop, reward_funcs=first_group_differs, max_steps=1)
    _, log = trained(Echo, ExplorationConfig, tmp_path, **options)
    assert log[0]["echo/computed_fraction"] == share


class Flattened(ExplorationTrainer):
    """Every completion is worth 0.7 in the end."""

    def shape_rewards(self, rewards_per_func):
        return torch.full_like(rewards_per_func, 0.7)


class Spread(ExplorationTrainer):
    """Completions differ in the end."""

    def shape_rewards(self, rewards_per_func):
        return rewards_per_func + torch.arange(float(len(rewards_per_func))).unsqueeze(1)


def test_what_rows_are_worth_after_shaping_decides_what_is_dropped(tmp_path):
    options = dict(num_generations=8, drop_zero_advantage=True, max_steps=1)
    before = parameters(make_trainer())
    got, _ = trained(Flattened, ExplorationConfig, tmp_path, **options)
    assert_same(got, before)
    got, _ = trained(Spread, ExplorationConfig, tmp_path, reward_funcs=graded(0.7, 0.7), **options)
    assert differ(got, before)


def test_a_plain_grpo_config_gets_the_methods_defaults_and_keeps_the_values_of_its_user(tmp_path):
    @dataclass
    class OtherConfig(ExplorationConfig):
        """Defaults that differ from GRPO's."""

        epsilon_high: float | None = 0.28
        beta: float = 0.5
        scale_rewards: str = "none"
        num_generations: int = 16

    args = GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, beta=0.1, generation_batch_size=16)
    own = make_trainer(ExplorationTrainer, lambda **fields: args).args  # TRL's defaults
    assert isinstance(own, ExplorationConfig) and vars(args).items() <= vars(own).items()
    upgraded = upgrade_config(args, OtherConfig)
    assert (upgraded.epsilon_high, upgraded.scale_rewards) == (0.28, "none")
    assert upgraded.beta == 0.1
    # The size of a batch was computed from this field, so it stays.
    assert (upgraded.num_generations, upgraded.generation_batch_size) == (8, args.generation_batch_size)


@pytest.mark.parametrize(
    ("trainer", "config", "fields"),
    [
        (AutoExploreTrainer, ExplorationConfig, "`explore`"),
        (AutoExploreTrainer, DeepGRPOConfig, "`num_branches`, `num_pivots`, .*"),
        (ExplorationTrainer, DeepGRPOConfig, "`num_branches`, `num_pivots`, .*"),
        (DeepGRPOTrainer, ExplorationConfig, "`success_threshold`"),
    ],
)
def test_a_configuration_whose_fields_would_be_ignored_is_refused(tmp_path, trainer, config, fields):
    name = trainer.config_class.__name__
    message = (
        f"type `{config.__name__}`, but `{trainer.__name__}` has other fields or defaults .{fields}.: use `{name}`"
    )
    with pytest.raises(ValueError, match=message):
        make_trainer(trainer, config, tmp_path)


@dataclass
class LaxConfig(ExplorationConfig):
    success_threshold: float | None = 0.5


@dataclass
class OwnDeepConfig(DeepGRPOConfig):
    num_branches: int = 2


class OwnDeepTrainer(DeepGRPOTrainer):
    config_class = OwnDeepConfig


def test_a_configuration_that_loses_nothing_is_accepted(tmp_path):
    assert make_trainer(AutoExploreTrainer, ExplorationConfig, tmp_path, explore="auto").args.explore == "auto"
    assert make_trainer(DeepGRPOTrainer, LaxConfig, tmp_path).args.success_threshold == 0.5
    assert make_trainer(DeepGRPOTrainer, ExplorationConfig, tmp_path, success_threshold=1.0).args.num_branches == 8
    assert make_trainer(OwnDeepTrainer, DeepGRPOConfig, tmp_path).args.num_branches == 8
    with pytest.raises(ValueError, match="`ExplorationTrainer` has other fields or defaults .`num_branches`"):
        make_trainer(ExplorationTrainer, OwnDeepConfig, tmp_path)
    assert make_trainer(ExplorationTrainer, AutoExploreConfig, tmp_path).args.explore == "auto"


@dataclass
class ConfigOnCPU(ExplorationConfig):
    use_cpu: bool = True
    bf16: bool = False
    report_to: str = "none"


class OnCPU(ExplorationTrainer):
    config_class = ConfigOnCPU


def test_no_args_make_a_config_of_the_methods_class(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = OnCPU(saved_model(), contains_answer, train_dataset=make_dataset())
    assert type(trainer.args) is ConfigOnCPU
    assert trainer.args.output_dir == f"{Path(saved_model()).name}-Exploration"


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(loss_type="ppo"), "loss_type='ppo'"),
        (dict(train_dataset=make_dataset().rename_column("prompt", "question")), r'\("question", "prompt"\)`\.'),
        (dict(sampling_batch_size=0), "sampling_batch_size=0"),
    ],
    ids=["loss", "data", "batch"],
)
def test_bad_input_is_refused_before_any_model_work(tmp_path, options, words):
    touched = []
    model = make_model()
    model.register_forward_pre_hook(lambda *args: touched.append(1))
    with pytest.raises(ValueError, match=words):
        make_trainer(ExplorationTrainer, ExplorationConfig, tmp_path, model=model, **options)
    assert not touched


def test_an_unknown_config_field_names_the_nearest_one(tmp_path):
    with pytest.raises(TypeError, match="unknown field 'drop_zero_advantages'; did you mean 'drop_zero_advantage'"):
        ExplorationConfig(str(tmp_path), drop_zero_advantages=True)


def test_continuous_batching_samples_the_same_as_generate(tmp_path):
    prefixes = [[5, 15, 6], [9, 8, 7, 6, 5], [6], [7, 7], [8]]
    batching = dict(
        use_transformers_continuous_batching=True,
        transformers_continuous_batching_config={"num_blocks": 64, "max_batch_tokens": 64},
    )

    def greedy(eos_token_ids, **options):
        trainer = make_trainer(
            ExplorationTrainer, ExplorationConfig, tmp_path, generation_kwargs={"do_sample": False}, **options
        )
        trainer.model.train()
        trainer.eos_token_ids = trainer.generation_config.eos_token_id = eos_token_ids
        return trainer.sample(prefixes, 2, [6, 6, 2, 6, 6])

    # A token that greedy decoding reaches early becomes an end token, so that requests finish out of order.
    stop = greedy([1])[1][0].token_ids[1]
    expected = greedy([1, stop])
    assert [group[0].finished for group in expected][:2] == [False, True]
    assert greedy([1, stop], **batching) == expected


def test_log_probabilities_are_measured_without_the_dropout_of_adapters(tmp_path):
    lora = LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=0.5, init_lora_weights=False)
    trainer = make_trainer(ExplorationTrainer, ExplorationConfig, tmp_path, peft_config=lora)
    trainer.model.train()
    before = torch.get_rng_state()
    first = trainer.sample.token_logprobs([[5, 6]], [[7, 8, 1]])
    assert trainer.sample.token_logprobs([[5, 6]], [[7, 8, 1]]) == first
    assert trainer.model.training and torch.equal(torch.get_rng_state(), before)


# What each method does with `max_completion_length=None`: GRPO then samples as many tokens as the backend allows.
REFUSED_WITHOUT_LIMIT = {"tree_grpo": "search tree", "sesa": "completions with a sketch", "auto": "`explore='auto'`"}
WITHOUT_LIMIT = {name: (name, REFUSED_WITHOUT_LIMIT.get(name)) for name in tiny_methods()}


@pytest.mark.parametrize(
    "name, refusal", slow_but({*REFUSED_WITHOUT_LIMIT, "deep_grpo", "branpo", "tree_rl", "gigpo"}, WITHOUT_LIMIT)
)
def test_without_a_limit_of_tokens_a_method_trains_or_refuses_it_at_construction(tmp_path, name, refusal):
    trainer_class, config_class, options = tiny_methods()[name]
    options = dict(options, max_completion_length=None, max_steps=1)
    if refusal is None:
        _, log = trained(trainer_class, config_class, tmp_path, **options)
        assert log[0]["step"] == 1
    else:
        with pytest.raises(ValueError, match=f"`max_completion_length=None`: .*{refusal}.* Set a number"):
            make_trainer(trainer_class, config_class, tmp_path, **options)


def test_without_a_limit_of_tokens_branches_end_where_the_longest_main_row_does(tmp_path):
    trainer_class, config_class, _ = tiny_methods()["agent_tree_grpo"]
    trainer = make_trainer(trainer_class, config_class, tmp_path, max_completion_length=None, max_steps=1)
    trainer.train()
    main = max(len(trajectory.completion_ids) for trajectory in trainer.forks.trajectories)
    leaves = [len(leaf.completion_ids) for tree in trainer.branch_explorer.trees.values() for leaf in tree.leaves]
    assert len(leaves) > len(trainer.forks.trajectories) and max(leaves) == main


def test_sketches_that_are_off_need_no_limit_of_tokens(tmp_path):
    options = dict(max_completion_length=None, max_steps=2)
    ours = trained(SESATrainer, SESAConfig, tmp_path, num_sketches=0, **options)
    assert_same(ours[0], trained(output_dir=tmp_path, **options)[0])


def test_a_loss_that_divides_by_the_limit_of_tokens_needs_one(tmp_path):
    with pytest.raises(ValueError, match="`max_completion_length=None`: `loss_type='dr_grpo'` divides by"):
        ExplorationConfig(str(tmp_path), use_cpu=True, max_completion_length=None, loss_type="dr_grpo")
