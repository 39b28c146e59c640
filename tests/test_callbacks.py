"""PassAtKCallback: it reports what a brute-force recomputation reports, and training does not notice it."""

import itertools
import random
import re

import numpy as np
import pytest
import torch
from peft import LoraConfig
from transformers import Qwen2Config, Qwen2ForSequenceClassification
from trl import GRPOConfig, GRPOTrainer
from world import assert_same, contains_answer, make_dataset, make_model, make_tokenizer, make_trainer, parameters

from trl_explore.evaluation.callbacks import PassAtKCallback

ROWS = make_dataset().select([1, 8, 14, 20, 27])
TIMES = re.compile(r"step_time|runtime|per_second|profiling|epoch_time")


class Recorder:
    """A reward function that keeps every call; one point for the digit, as the training reward."""

    __name__ = "recorder"

    def __init__(self):
        self.calls = []

    def __call__(self, **kwargs):
        self.calls.append(kwargs)
        return contains_answer(**kwargs)


def run(*, callback=None, **options):
    trainer = make_trainer(max_steps=4, logging_steps=2, **options)
    if callback is not None:
        trainer.add_callback(PassAtKCallback(trainer, ROWS, num_samples=3, k=(1, 3), **callback))
    trainer.train()
    entries = [{k: v for k, v in entry.items() if not TIMES.search(k)} for entry in trainer.state.log_history]
    states = (torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state()))
    return trainer, entries, states


def model_with_dropout():
    return make_model(attention_dropout=0.2)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_run_is_bit_identical_with_and_without_the_callback(tmp_path, method):
    def options():
        if method == "lora":
            return {"peft_config": LoraConfig(r=2, init_lora_weights=False), "output_dir": tmp_path}
        return {"model": model_with_dropout(), "output_dir": tmp_path}

    plain, plain_log, plain_states = run(**options())
    watched, watched_log, watched_states = run(callback={"every": 1, "maj_k": (3,)}, **options())
    assert_same(parameters(plain), parameters(watched))
    evaluations = [entry for entry in watched_log if "eval/pass_at_1" in entry]
    assert [entry["step"] for entry in evaluations] == [0, 1, 2, 3, 4]
    assert [entry for entry in watched_log if entry not in evaluations] == plain_log
    assert watched_states == plain_states
    assert watched.state.num_input_tokens_seen == plain.state.num_input_tokens_seen > 0


def test_evaluating_leaves_model_and_generators_as_they_were():
    trainer = make_trainer(model=model_with_dropout())
    trainer.model.train()
    trainer.model.model.layers[0].eval()  # a part that was frozen on purpose
    modes = {name: module.training for name, module in trainer.model.named_modules()}
    generation_config = trainer.model.generation_config.to_dict()
    checkpointing = trainer.model.is_gradient_checkpointing

    def draws_from_all(completions, **kwargs):
        return [random.random() + np.random.rand() + torch.rand(()).item() for _ in completions]

    callback = PassAtKCallback(trainer, ROWS, reward_funcs=draws_from_all, num_samples=2, k=(1,))
    states = (torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state()))
    first, second = callback.evaluate(), callback.evaluate()
    assert (torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())) == states
    assert first == second  # the seed decides, not what was drawn before
    assert {name: module.training for name, module in trainer.model.named_modules()} == modes
    assert trainer.model.generation_config.to_dict() == generation_config
    assert trainer.model.is_gradient_checkpointing == checkpointing


def test_the_logged_numbers_equal_a_brute_force_recomputation():
    trainer = make_trainer()
    recorder = Recorder()
    callback = PassAtKCallback(
        trainer, ROWS, reward_funcs=recorder, num_samples=4, k=(1, 2, 4), maj_k=(3,), answer_fn=lambda text: text[:1]
    )
    metrics = callback.evaluate()
    sampled, greedy = recorder.calls
    rewards = np.array(contains_answer(**sampled)).reshape(len(ROWS), 4)
    assert 0 < rewards.mean() < 1
    for k in (1, 2, 4):
        subsets = list(itertools.combinations(range(4), k))
        expected = np.mean([any(row[i] for i in subset) for row in rewards for subset in subsets])
        assert metrics[f"eval/pass_at_{k}"] == pytest.approx(expected)
    assert metrics["eval/reward"] == pytest.approx(rewards.mean())
    assert metrics["eval/greedy_accuracy"] == np.mean(contains_answer(**greedy))
    assert callback.successes == {"correct": rewards.sum(axis=1).tolist(), "greedy_correct": contains_answer(**greedy)}
    assert 0 <= metrics["eval/maj_at_3"] <= 1
    assert sampled["prompts"] == [prompt for prompt in ROWS["prompt"] for _ in range(4)]
    assert sampled["answer"] == [answer for answer in ROWS["answer"] for _ in range(4)]
    assert sampled["trainer_state"] is trainer.state
    assert greedy["prompts"] == ROWS["prompt"][:]


def test_all_samples_of_a_prompt_share_one_prompt_pass():
    trainer = make_trainer()
    prompt_passes = []

    def note(module, args, kwargs):
        if kwargs["input_ids"].shape[1] > 1:
            prompt_passes.append(len(kwargs["input_ids"]))

    trainer.model.model.register_forward_pre_hook(note, with_kwargs=True)
    PassAtKCallback(trainer, ROWS, num_samples=4, k=(1,), greedy=False, batch_size=8).evaluate()
    assert prompt_passes == [2, 2, 1]  # where 8, 8 and 4 completions are sampled


def test_greedy_completions_are_the_models_own_whatever_the_padding_and_batch_size():
    trainer = make_trainer(model=make_model(seed=4, eos_token_id=[1, 9], attention_dropout=0.5))
    trainer.model.eval()
    tokenizer = make_tokenizer()
    rows = [{"prompt": "1+2=", "answer": "3"}, {"prompt": "a;1+2;3+4=", "answer": "7"}, {"prompt": "9", "answer": "1"}]
    expected = []
    for row in rows:  # one prompt at a time: no padding, no cache
        ids = tokenizer(row["prompt"])["input_ids"]
        start = len(ids)
        while len(ids) < start + 8 and (len(ids) == start or ids[-1] not in (1, 9)):
            ids.append(trainer.model(torch.tensor([ids])).logits[0, -1].argmax().item())
        expected.append(ids[start:])
    trainer.model.train()
    for batch_size in (1, 2, 64):
        recorder = Recorder()
        PassAtKCallback(trainer, rows, reward_funcs=recorder, num_samples=1, k=(1,), batch_size=batch_size).evaluate()
        greedy = recorder.calls[len(recorder.calls) // 2 :]
        assert [ids for call in greedy for ids in call["completion_ids"]] == expected


def test_conversational_prompts_get_the_chat_template_and_messages():
    trainer = make_trainer(conversational=True)
    recorder = Recorder()
    rows = make_dataset(conversational=True).select([1, 8])
    PassAtKCallback(trainer, rows, reward_funcs=recorder, num_samples=2, k=(2,), maj_k=(2,)).evaluate()
    (message,) = recorder.calls[0]["completions"][0]
    assert message["role"] == "assistant" and isinstance(message["content"], str)
    assert recorder.calls[0]["prompts"][0] == rows["prompt"][0]


def test_reward_functions_can_use_trls_logging_without_reaching_the_training_log(tmp_path):
    def talkative(completions, log_extra, log_metric, **kwargs):
        log_extra("length", [len(text) for text in completions])
        log_metric("seen", 1e9)
        return [1.0] * len(completions)

    trainer = make_trainer(output_dir=tmp_path, max_steps=1)
    trainer.add_callback(PassAtKCallback(trainer, ROWS, reward_funcs=talkative, num_samples=1, k=(1,)))
    trainer.train()
    assert not any("seen" in entry for entry in trainer.state.log_history)


def test_the_trainers_reward_functions_count_with_their_weights_async_ones_included():
    async def later(completions, **kwargs):
        return [0.5] * len(completions)

    def missing(completions, **kwargs):
        return [None] * len(completions)

    trainer = make_trainer(reward_funcs=[contains_answer, later, missing], reward_weights=[2.0, 1.0, 4.0])
    with pytest.raises(ValueError, match="success_threshold must be given"):
        PassAtKCallback(trainer, ROWS)
    both = PassAtKCallback(trainer, ROWS, num_samples=4, k=(1,), success_threshold=2.5).evaluate()
    alone = PassAtKCallback(trainer, ROWS, num_samples=4, k=(1,), reward_funcs=contains_answer).evaluate()
    assert both["eval/pass_at_1"] == alone["eval/pass_at_1"]
    assert both["eval/reward"] == pytest.approx(2 * alone["eval/reward"] + 0.5)


def test_reward_models_of_the_trainer_score_prompt_and_completion(tmp_path):
    torch.manual_seed(0)
    judge = Qwen2ForSequenceClassification(Qwen2Config(**{**make_model().config.to_dict(), "num_labels": 1}))
    recorder = Recorder()
    trainer = GRPOTrainer(
        model=make_model(),
        reward_funcs=[recorder, judge],
        reward_processing_classes=[None, make_tokenizer()],
        processing_class=make_tokenizer(),
        train_dataset=ROWS,
        args=GRPOConfig(output_dir=tmp_path, use_cpu=True, bf16=False, report_to=[], reward_weights=[0.0, 1.0]),
    )
    metrics = PassAtKCallback(trainer, ROWS, num_samples=2, k=(1,), greedy=False, success_threshold=0.0).evaluate()
    call = recorder.calls[0]
    scores = []
    for prompt, completion in zip(call["prompts"], call["completions"], strict=True):
        ids = make_tokenizer()(prompt + completion, return_tensors="pt")["input_ids"]
        scores.append(judge(ids).logits[0, 0].item())
    assert metrics["eval/reward"] == pytest.approx(np.mean(scores), abs=1e-5)
    assert metrics["eval/pass_at_1"] == pytest.approx(np.mean([score >= 0 for score in scores]))


def test_prompts_without_a_reward_are_left_out():
    def only_threes(completions, answer, **kwargs):
        return [1.0 if gold == "3" else None for gold in answer]

    rows = [{"prompt": "1+2=", "answer": "3"}, {"prompt": "1+3=", "answer": "4"}]
    trainer = make_trainer()
    callback = PassAtKCallback(trainer, rows, reward_funcs=only_threes, greedy=False)
    assert callback.evaluate()["eval/pass_at_1"] == 1.0 and callback.successes == {"correct": [8, 0]}
    with pytest.raises(ValueError, match="gold"):
        PassAtKCallback(trainer, rows[1:], reward_funcs=only_threes).evaluate()


@pytest.mark.parametrize(
    "callback, config, steps",
    [
        ({"every": 3}, {}, [0, 3, 4]),
        ({"every": 2}, {}, [0, 2, 4]),
        ({"at_begin": False}, {}, [4]),
        ({}, {"eval_steps": 0.25}, [0, 1, 2, 3, 4]),
    ],
)
def test_evaluations_happen_when_they_are_due_and_never_twice(tmp_path, callback, config, steps):
    trainer = make_trainer(output_dir=tmp_path, max_steps=4, **config)
    watch = PassAtKCallback(trainer, ROWS, num_samples=1, k=(1,), greedy=False, metric_prefix="test", **callback)
    trainer.add_callback(watch)
    trainer.train()
    assert [entry["step"] for entry in watch.history] == steps
    logged = [entry for entry in trainer.state.log_history if "test/pass_at_1" in entry]
    assert [(entry["step"], entry["test/pass_at_1"]) for entry in logged] == [
        (entry["step"], entry["test/pass_at_1"]) for entry in watch.history
    ]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"k": (1, 9)}, "num_samples=8"),
        ({"k": ()}, r"k=\(\)"),
        ({"maj_k": (0,)}, r"maj_k=\(0,\)"),
        ({"temperature": 0.0}, "greedy=True"),
        ({"every": 0}, "every=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"eval_dataset": []}, "`prompt`"),
        ({"eval_dataset": [{"question": "1"}]}, "`prompt`"),
        ({"reward_funcs": torch.nn.Identity()}, "synchronous"),
    ],
)
def test_arguments_out_of_range_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        PassAtKCallback(make_trainer(), **{"eval_dataset": ROWS, **arguments})


def test_trainers_whose_episodes_are_no_single_completion_are_refused():
    trainer = make_trainer(rollout_func=lambda prompts, trainer: {})
    with pytest.raises(ValueError, match="rollout_func"):
        PassAtKCallback(trainer, ROWS)


def test_coverage_is_the_share_of_targets_found(tmp_path):
    rows = [
        {"prompt": "1+1=", "answer": "2", "targets": ["a", "b"]},
        {"prompt": "1+2=", "answer": "3", "targets": ["c"]},
    ]
    trainer = make_trainer(output_dir=tmp_path)
    texts = iter(["a", "x", "b", "b", "x", "c", "x", "x", "", ""])  # four samples each, then the greedy ones
    options = dict(num_samples=4, k=(1,), coverage_k=(2, 4), max_completion_length=1)
    metrics = PassAtKCallback(trainer, rows, answer_fn=lambda text: next(texts), **options).evaluate()
    assert metrics["eval/coverage_at_2"] == pytest.approx((0.5 + 1.0) / 2)
    assert metrics["eval/coverage_at_4"] == 1.0
    with pytest.raises(ValueError, match="coverage_k needs a column `targets`"):
        PassAtKCallback(trainer, [{"prompt": "1+1=", "answer": "2"}], coverage_k=(4,))


@pytest.mark.parametrize("targets", [7, "ab", [["a"], ["b"]], []])
def test_targets_of_another_form_are_refused(tmp_path, targets):
    rows = [{"prompt": "1+1=", "answer": "2", "targets": targets}]
    with pytest.raises(ValueError, match="coverage_k needs a column `targets` with a list .* one row has"):
        PassAtKCallback(make_trainer(output_dir=tmp_path), rows, coverage_k=(4,))
