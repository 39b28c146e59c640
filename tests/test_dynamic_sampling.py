"""`dynamic_sampling` and `explore_threshold`: which prompts a generation batch is made of."""

import re
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from trl import GRPOConfig, GRPOTrainer
from world import (
    always,
    assert_same,
    contains_answer,
    differ,
    make_dataset,
    make_trainer,
    never,
    one_batch,
    parameters,
    tiny_methods,
    trained,
)

from trl_explore.rows.streams import merge_rows
from trl_explore.selection.order import PromptOrder
from trl_explore.selection.rounds import Rounds
from trl_explore.selection.solved import SuccessRates
from trl_explore.trainers import ExplorationConfig, ExplorationTrainer
from trl_explore.trainers.requires import Requires, check_arguments

METHODS = tiny_methods(sesa=dict(max_sketch_length=4))
PLAIN = ExplorationTrainer, ExplorationConfig


def half(completions, **kwargs):
    """Groups with contrast, whatever is said."""
    return [float(i % 2) for i in range(len(completions))]


def first_even(completions, prompts, **kwargs):
    """Groups of sums whose first number is even have contrast, the others have none."""
    return [float(i % 2 and int(prompt[0]) % 2 == 0) for i, prompt in enumerate(prompts)]


def tokens_of(output, part):
    return [ids[mask.bool()].tolist() for ids, mask in zip(output[f"{part}_ids"], output[f"{part}_mask"], strict=True)]


def prompts_of(trainer, output):
    return [trainer.tokenizer.decode(ids) for ids in tokens_of(output, "prompt")]


@given(st.integers(1, 9), st.lists(st.lists(st.integers(0, 4), min_size=2, max_size=2), max_size=12))
def test_every_pass_takes_every_place_once(size, needs):
    order = PromptOrder(range(size), shuffle=True, seed=3)
    taken = [place for counts in needs for own in order.take(counts) for place in own]
    assert len(taken) == order.taken == sum(map(sum, needs))
    for start in range(0, len(taken) - size + 1, size):
        assert sorted(taken[start : start + size]) == list(range(size))
    again = PromptOrder(range(size), shuffle=True, seed=3)
    again.begin(order.taken)
    assert again.take([2 * size]) == order.take([2 * size])


def test_processes_get_their_prompts_one_after_another():
    order = PromptOrder(range(5), shuffle=False, seed=0)
    assert order.take([2, 0, 1]) == [[0, 1], [], [2]]
    assert order.take([3]) == [[3, 4, 0]]
    assert order.passes == 6 / 5


def test_solved_prompts_are_passed_over_unless_all_are_solved():
    order = PromptOrder(range(4), shuffle=False, seed=0)
    assert order.take([3], {1, 3}.__contains__) == [[0, 2, 0]]
    assert order.taken == 5
    assert PromptOrder(range(3), shuffle=False, seed=0).take([4], lambda place: True) == [[0, 1, 2, 0]]


def test_a_rate_follows_the_newest_group_and_fades_where_its_prompt_is_passed_over():
    solved = SuccessRates()
    solved.note([(7, 1.0), (8, 0.5)])
    solved.note([(7, 0.5), (8, 1.0)])
    assert solved.rates == {7: 0.75, 8: 0.75}
    assert [solved.passes_over(7, 0.7) for _ in range(2)] == [True, False]
    assert not solved.passes_over(9, 0.0)


def test_rows_of_several_batches_are_padded_as_trl_pads():
    def rows(prompt, completion, **more):
        ids = {f"{name}_ids": torch.full((1, n), n) for name, n in (("prompt", prompt), ("completion", completion))}
        masks = {
            f"{name}_mask": torch.ones(1, n, dtype=torch.long)
            for name, n in (("prompt", prompt), ("completion", completion))
        }
        return {**ids, **masks, "num_items_in_batch": torch.tensor(completion), **more}

    first = rows(1, 2, advantages=torch.tensor([0.5]))
    second = rows(2, 3, advantages=torch.tensor([[1.0, 2.0, 3.0]]), tool_mask=torch.tensor([[1, 0, 1]]))
    merged = merge_rows([first, second], pad_id=9)
    assert merged["prompt_ids"].tolist() == [[9, 1], [2, 2]] and merged["prompt_mask"].tolist() == [[0, 1], [1, 1]]
    assert merged["completion_ids"].tolist() == [[2, 2, 9], [3, 3, 3]]
    assert merged["advantages"].tolist() == [[0.5, 0.5, 0.0], [1.0, 2.0, 3.0]]
    assert merged["tool_mask"].tolist() == [[1, 1, 0], [1, 0, 1]]
    assert merged["num_items_in_batch"] == 2
    # vLLM's ratio of a sequence is one number a row, also beside completions of one token.
    ratio = dict(importance_sampling_ratio=torch.tensor([[0.5]]), advantages=torch.tensor([1.0]))
    for lengths in ((1, 3), (3, 1), (1, 1)):
        merged = merge_rows([rows(1, length, **ratio) for length in lengths], pad_id=9)
        assert merged["importance_sampling_ratio"].tolist() == [[0.5], [0.5]]
        assert merged["completion_ids"].shape == (2, max(lengths))


@pytest.mark.parametrize("kind", ["filter", "refill"])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "bnpo"])
def test_where_all_groups_have_contrast_it_is_grpo(tmp_path, kind, loss_type):
    options = dict(reward_funcs=half, loss_type=loss_type, max_steps=4)
    found, log = trained(*PLAIN, tmp_path, dynamic_sampling=kind, **options)
    expected, _ = trained(GRPOTrainer, GRPOConfig, tmp_path, **options)
    assert_same(found, expected)
    assert all(entry["selection/kept_groups"] == entry["selection/rounds"] == 1 for entry in log if "reward" in entry)


@pytest.mark.parametrize("options", [{}, dict(steps_per_generation=2, num_iterations=2, max_steps=8)])
@pytest.mark.parametrize("shuffle", [True, False])
def test_the_prompts_are_those_of_the_data_loader_where_nothing_is_refilled(tmp_path, options, shuffle):
    data = make_dataset().select(range(8))  # one pass is 4 steps
    options = dict(dict(reward_funcs=half, train_dataset=data, shuffle_dataset=shuffle, max_steps=6), **options)
    found, _ = trained(*PLAIN, tmp_path, dynamic_sampling="refill", **options)
    expected, _ = trained(GRPOTrainer, GRPOConfig, tmp_path, **options)
    assert_same(found, expected)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "bnpo"])
def test_what_is_filtered_does_not_count(tmp_path, loss_type):
    """Half of the groups: the other half alone, in a batch of its own."""
    both = Dataset.from_dict({"prompt": ["0+1=", "1+1="]})
    options = dict(loss_type=loss_type, max_steps=1, shuffle_dataset=False, optim="sgd", max_grad_norm=0.0)
    said = {"0+1=": [5, 6, 7, 1], "1+1=": [8, 9, 1]}

    def rollout(prompts, trainer):
        ids = [trainer._tokenizer(prompt)["input_ids"] for prompt in prompts]
        spoken = [[10 + i, *said[prompt]] for i, prompt in enumerate(prompts)]
        return {"prompt_ids": ids, "completion_ids": spoken, "logprobs": None}

    def reward(completions, prompts, **kwargs):
        return [float(i % 4 == 0 and p == "0+1=") for i, p in enumerate(prompts)]

    told = dict(options, reward_funcs=reward, rollout_func=rollout)
    found, _ = trained(*PLAIN, tmp_path, train_dataset=both, dynamic_sampling="filter", **told)
    alone = Dataset.from_dict({"prompt": ["0+1="]})
    expected, _ = trained(
        GRPOTrainer, GRPOConfig, tmp_path, train_dataset=alone, per_device_train_batch_size=4, **told
    )
    assert_same(found, expected, tolerance=1e-6)
    assert differ(found, trained(GRPOTrainer, GRPOConfig, tmp_path, train_dataset=both, **told)[0])


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_a_batch_without_contrast_trains_nothing(tmp_path, loss_type):
    options = dict(reward_funcs=never, loss_type=loss_type, beta=0.1)
    trainer = make_trainer(*PLAIN, tmp_path, dynamic_sampling="filter", **options)
    start = parameters(trainer)
    trainer.train()
    assert_same(parameters(trainer), start)


@pytest.mark.parametrize(("rows", "kept"), [([True] * 2, 1.0), ([True] * 4 + [False] * 2, 2 / 3)])
def test_kept_groups_are_counted_if_they_span_processes(tmp_path, rows, kept):
    """Two processes with the same mask, and groups of four rows."""
    logged, keep = {}, torch.tensor(rows)
    policy = SimpleNamespace(
        args=ExplorationConfig(str(tmp_path), use_cpu=True, num_generations=4, dynamic_sampling="filter"),
        ranks=SimpleNamespace(summed=lambda values: {name: 2 * value for name, value in values.items()}),
        log_metric=logged.__setitem__,
    )
    scorer = SimpleNamespace(rewards_per_func=keep, equal_reward_rows=lambda rewards, group_size: ~rewards)
    output = {"completion_mask": torch.ones(len(rows), 3, dtype=torch.long)}
    assert Rounds(policy, scorer, None).batch([{}] * len(rows), lambda inputs: (output, {}))[2] is not None
    assert logged["selection/kept_groups"] == pytest.approx(kept)


def test_columns_are_removed_where_transformers_would(tmp_path):
    options = dict(reward_funcs=half, remove_unused_columns=True, dynamic_sampling="refill")
    assert make_trainer(*PLAIN, tmp_path, **options).rounds.order.data.column_names == ["prompt"]


def test_other_prompts_take_the_place_of_those_without_contrast(tmp_path):
    trainer = make_trainer(*PLAIN, tmp_path, reward_funcs=first_even, dynamic_sampling="refill", shuffle_dataset=False)
    assert prompts_of(trainer, one_batch(trainer))[::4] == ["0+0=", "0+1="]
    trainer.rounds.order.begin(5)
    output = trainer._generate_and_score_completions(trainer.main_examples)
    assert prompts_of(trainer, output) == ["0+5="] * 4 + ["2+0="] * 4
    assert output["advantages"].abs().min() > 0
    assert trainer._metrics["train"]["selection/rounds"][-1] == 7  # 1+0= to 1+5= and 2+0= one by one, the first beside
    assert trainer._metrics["train"]["selection/missing_groups"][-1] == 0


def test_rows_are_those_of_their_rounds(tmp_path):
    rounds = []

    def noting(completions, prompts, completion_ids, **columns):
        rounds.append(completion_ids)
        return first_even(completions, prompts)

    trainer = make_trainer(*PLAIN, tmp_path, reward_funcs=noting, dynamic_sampling="refill", shuffle_dataset=False)
    one_batch(trainer)
    rounds.clear()
    trainer.rounds.order.begin(11)
    output = trainer._generate_and_score_completions(trainer.main_examples)
    rows = tokens_of(output, "completion")
    assert prompts_of(trainer, output)[::4] == ["2+1=", "2+0="]  # 1+5= made room
    assert rows == rounds[1] + rounds[0][4:]


def test_a_shortage_is_told_once_and_trains_what_there_is(tmp_path):
    trainer = make_trainer(*PLAIN, tmp_path, reward_funcs=never, dynamic_sampling="refill", max_sampling_rounds=3)
    start = parameters(trainer)
    with pytest.warns(UserWarning, match=r"After 3 round\(s\) of sampling, 2 group\(s\) of a batch still") as told:
        trainer.train()
    assert sum("of sampling" in str(w.message) for w in told) == 1
    assert_same(parameters(trainer), start)
    log = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert [entry["selection/rounds"] for entry in log] == [3, 3, 3]
    assert [entry["selection/prompts_seen"] for entry in log] == [6, 12, 18]
    assert log[-1]["selection/passes"] == 0.5 and log[-1]["selection/missing_groups"] == 2
    prompt_tokens = 3 * 2 * 4 * 4  # rounds, prompts, rows, tokens
    assert log[0]["selection/discarded_tokens"] == log[0]["num_tokens"] - prompt_tokens


@pytest.mark.parametrize("kind", ["filter", "refill"])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_takes_it_and_resumes(tmp_path, method, kind):
    trainer_class, config_class, own = METHODS[method]
    options = dict(own, dynamic_sampling=kind, max_steps=5, log_completions=True, num_completions_to_print=0)
    options |= dict(max_sampling_rounds=3, steps_per_generation=2, per_device_train_batch_size=4)
    whole = make_trainer(
        trainer_class, config_class, tmp_path / "whole", **options, save_strategy="steps", save_steps=3
    )
    start = parameters(whole)
    whole.train()
    assert differ(parameters(whole), start)
    log = [entry for entry in whole.state.log_history if "reward" in entry]
    assert all(entry["selection/rounds"] >= 1 for entry in log)
    again = make_trainer(trainer_class, config_class, tmp_path / "whole", **options)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert_same(parameters(again), parameters(whole))
    later = [entry for entry in again.state.log_history if "reward" in entry]
    for name in ("prompts_seen", "discarded_tokens", "rounds"):
        assert later[-1][f"selection/{name}"] == log[-1][f"selection/{name}"]


def test_the_table_has_the_rows_of_all_rounds(tmp_path):
    options = dict(reward_funcs=first_even, dynamic_sampling="refill", shuffle_dataset=False, max_steps=4)
    trainer = make_trainer(*PLAIN, tmp_path, log_completions=True, num_completions_to_print=0, **options)
    trainer.train()
    tables = [pd.read_parquet(path) for path in sorted((tmp_path / "completions").iterdir())]
    assert sum(map(len, tables)) > 4 * 8
    for table in tables:
        groups = table.groupby(table.index // 4)["first_even"].transform("nunique") > 1
        assert (table["contrast"] == groups).all()
    for entry in (entry for entry in trainer.state.log_history if "reward" in entry):  # all rounds are paid for
        prompt_tokens = entry["selection/prompts_seen"] * 4 * 4  # rows and tokens of a prompt
        assert entry["num_tokens"] == entry["generation/sampled_tokens"] + prompt_tokens


def test_solved_prompts_are_sampled_less(tmp_path):
    asked = []

    def low(completions, prompts, **kwargs):
        asked.extend(prompts[::4])
        return [float(int(prompt[0]) < 3) for prompt in prompts]

    options = dict(train_dataset=make_dataset().select(range(0, 36, 3)), explore_threshold=0.5, max_steps=14)
    trainer = make_trainer(*PLAIN, tmp_path, reward_funcs=low, **options)
    trainer.train()
    solved = sum(int(prompt[0]) < 3 for prompt in asked)
    assert solved < 0.4 * len(asked)
    assert trainer.state.log_history[-2]["selection/skipped_prompts"] > 0


def test_it_resumes_with_its_rates(tmp_path):
    options = dict(train_dataset=make_dataset().select(range(8)), explore_threshold=0.2, max_steps=9)
    whole = make_trainer(*PLAIN, tmp_path, **options, save_strategy="steps", save_steps=6)
    whole.train()
    again = make_trainer(*PLAIN, tmp_path, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert_same(parameters(again), parameters(whole))
    assert again.rounds.state() == whole.rounds.state()
    assert whole.state.log_history[-2]["selection/skipped_prompts"] > 0


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(dynamic_sampling="on"), "`dynamic_sampling`"),
        (dict(max_sampling_rounds=0), "`max_sampling_rounds=0` must be at least 1"),
        (dict(explore_threshold=1.0), "`explore_threshold=1.0` must be in [0, 1)"),
    ],
)
def test_bad_values_are_named(tmp_path, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make_trainer(*PLAIN, tmp_path, **options)


@pytest.mark.parametrize(
    "options", [dict(explore_threshold=0.5), dict(dynamic_sampling="refill"), dict(trained_generations=2)], ids=str
)
def test_groups_that_span_processes_are_refused(tmp_path, options):
    args = ExplorationConfig(str(tmp_path), use_cpu=True, num_generations=4, per_device_train_batch_size=4, **options)
    args.per_device_train_batch_size = 6  # as if another process had the rest of a group
    given = dict(tools=None, rollout_func=None, environment_factory=None, train_dataset=make_dataset())
    with pytest.raises(ValueError, match=f"with `{[*options][0]}=.*would span several"):
        check_arguments("ExplorationTrainer", Requires(), args, samples_as_grpo=True, **given)


def test_off_in_yaml_is_off(tmp_path):
    assert make_trainer(*PLAIN, tmp_path, dynamic_sampling=False).args.dynamic_sampling == "off"


@pytest.mark.parametrize("options", [dict(dynamic_sampling="refill"), dict(explore_threshold=0.5)])
def test_a_stream_has_no_order_to_choose_from(tmp_path, options):
    with pytest.raises(ValueError, match="`train_dataset` is a stream"):
        make_trainer(*PLAIN, tmp_path, train_dataset=make_dataset().to_iterable_dataset(), **options)


def test_a_stream_can_be_filtered(tmp_path):
    options = dict(train_dataset=make_dataset().to_iterable_dataset(), dynamic_sampling="filter")
    trainer = make_trainer(*PLAIN, tmp_path, reward_funcs=[contains_answer, always], **options)
    trainer.train()
