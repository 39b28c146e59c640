"""Data whose rows have other columns than are stored: transforms, formats, and environments that own their prompts."""

import re

import numpy as np
import pytest
from datasets import Dataset
from test_branpo import Lake, odd_steps
from trl import GRPOConfig, GRPOTrainer
from world import (
    BOARDS,
    assert_same,
    contains_answer,
    make_agent,
    make_dataset,
    make_model,
    make_tokenizer,
    make_trainer,
    parameters,
    tiny_methods,
)

from trl_explore.evaluation.evaluate import Sampling, evaluate
from trl_explore.evaluation.hard_prompts import filter_hard_prompts
from trl_explore.rows.columns import row_columns
from trl_explore.rows.rollouts import Rows
from trl_explore.trainers import DeepGRPOConfig, DeepGRPOTrainer, ExplorationConfig, ExplorationTrainer


def agent(cls, config, folder, **options):
    sizes = dict(per_device_train_batch_size=8, num_generations=4, max_completion_length=40)
    data = Dataset.from_dict({"board": BOARDS})
    own = dict(environment_factory=Lake, reward_funcs=[odd_steps], train_dataset=data, eval_dataset=None)
    return make_agent(cls, config, folder, **own, **{**sizes, **options})


METHODS = tiny_methods(sesa=dict(max_sketch_length=4))
PLAIN = ExplorationTrainer, ExplorationConfig


def on_the_fly(data=None):
    """The small world's data, whose prompts are made when rows are read."""
    stored = (make_dataset() if data is None else data).rename_column("prompt", "sum")
    return stored.with_transform(lambda rows: {"prompt": rows["sum"], "answer": rows["answer"]})


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_on_prompts_that_are_made_on_the_fly(tmp_path, method):
    cls, config, options = METHODS[method]
    found = []
    for data in (make_dataset(), on_the_fly()):
        trainer = make_trainer(cls, config, tmp_path, train_dataset=data, max_steps=1, **options)
        assert trainer.longest_prompt() == 4
        trainer.train()
        found.append(parameters(trainer))
    assert_same(*found)


@pytest.mark.parametrize(
    "options", [dict(dynamic_sampling="refill"), dict(explore_threshold=0.5), dict(budget="vip")], ids=str
)
def test_prompts_that_are_made_on_the_fly_are_chosen_as_others(tmp_path, options):
    found = []
    for number, data in enumerate((make_dataset(), on_the_fly())):
        saved = dict(save_strategy="steps", save_steps=2)
        trainer = make_trainer(*PLAIN, tmp_path / str(number), train_dataset=data, **options, **saved)
        trainer.train()
        found.append(parameters(trainer))
    trainer.train(resume_from_checkpoint=str(tmp_path / "1" / "checkpoint-2"))
    assert_same(*found)
    assert_same(parameters(trainer), found[0])


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_formatted_rows_train_as_in_grpo(tmp_path, kind):
    data = make_dataset().add_column("number", list(range(36))).with_format(kind)
    found = []
    for cls, config, options in ((GRPOTrainer, GRPOConfig, {}), (*PLAIN, dict(explore_threshold=0.99))):
        trainer = make_trainer(cls, config, tmp_path, train_dataset=data, **options)
        trainer.train()
        found.append(parameters(trainer))
    assert_same(*found)


def dropped():
    return make_dataset().with_transform(lambda rows: {"answer": rows["answer"]})


def hidden():
    return make_dataset().with_format("torch", columns=["answer"])


@pytest.mark.parametrize("make", [dropped, hidden])
def test_rows_that_are_read_without_a_prompt_are_refused(tmp_path, make):
    with pytest.raises(ValueError, match=re.escape("no `prompt` column, only ['answer']")):
        make_trainer(*PLAIN, tmp_path, train_dataset=make())


def test_columns_are_those_of_rows():
    for data in (make_dataset(), on_the_fly(), make_dataset().to_iterable_dataset()):
        assert row_columns(data) == ["prompt", "answer"]
    assert row_columns(make_dataset().to_iterable_dataset().map(lambda row: row)) is None
    assert row_columns(Dataset.from_dict({"prompt": []})) == ["prompt"]


def test_prompts_that_are_made_on_the_fly_can_be_measured_and_filtered():
    given = dict(reward_funcs=contains_answer, processing_class=make_tokenizer())
    options = dict(given, sampling=Sampling(num_samples=2, max_new_tokens=4), progress=False)
    found = [evaluate(make_model(), data, **options)["metrics"] for data in (make_dataset(), on_the_fly())]
    assert found[0] == found[1]
    options = dict(given, k=2, max_completion_length=4)
    kept = [filter_hard_prompts(make_model(), data, **options) for data in (make_dataset(), on_the_fly())]
    assert [row["prompt"] for row in kept[0]] == [row["prompt"] for row in kept[1]]


def test_deferred_branches_keep_formatted_columns(tmp_path):
    data = make_dataset().add_column("number", list(range(36))).with_format("numpy")
    options = dict(num_branches=2, segmentation="fixed", segment_length=2, deferred_branching=True, branch_from="all")
    saved = dict(save_strategy="steps", save_steps=2)
    whole = make_trainer(DeepGRPOTrainer, DeepGRPOConfig, tmp_path, train_dataset=data, **options, **saved)
    whole.train()
    again = make_trainer(DeepGRPOTrainer, DeepGRPOConfig, tmp_path, train_dataset=data, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same(parameters(again), parameters(whole))
    assert all(isinstance(point.origin.example["number"], np.integer | int) for point in again.branch_explorer._queue)


@pytest.mark.parametrize("method", ["branpo", "deep_grpo", "agent_tree_grpo", "gigpo", "g2rl"])
def test_environments_may_own_the_task_of_rows_without_a_prompt(tmp_path, method):
    cls, config, options = METHODS[method]
    trainer = agent(cls, config, tmp_path, **options)
    trainer.train()
    assert trainer.state.global_step == 2 and trainer.longest_prompt() is None
    example, environments = {"board": BOARDS[0]}, [trainer.environments[0]]
    assert len(trainer.scorer.judge([example], [[5, 1]], prompt_ids=[[3, 4]], environments=environments)[0]) == 1
    # As if another process had two rows more: they are filled up with rows that train nothing.
    trainer.ranks.most = lambda value: value + 2
    row = Rows([example], [[5]], [[6, 1]], [[1, 1]], group_size=1, known_rewards=[[1.0] * len(trainer.scorer.names)])
    assert trainer.scorer.score("more", row).real.tolist() == [True, False, False]
