"""What a run writes beside its checkpoints is the same whether it was interrupted or not."""

import json
import logging
import shutil
from datetime import date, datetime, timedelta
from decimal import Decimal

import pandas as pd
import pytest
import torch
from datasets import Dataset
from world import assert_same, contains_answer, make_dataset, make_trainer, parameters

from trl_explore.trainers import (
    DeepGRPOConfig,
    DeepGRPOTrainer,
    ExplorationConfig,
    ExplorationTrainer,
    TreeGRPOConfig,
    TreeGRPOTrainer,
)
from trl_explore.trees.replay import SolutionCache, read_cache, write_cache

CUTS = dict(num_branches=3, segmentation="fixed", segment_length=2)
TREE = dict(expansion_width=3, node_length=2, dump_trees="trees")
BASE = (ExplorationTrainer, ExplorationConfig)
DEEP = (DeepGRPOTrainer, DeepGRPOConfig)
SEARCH = (TreeGRPOTrainer, TreeGRPOConfig)


def run(method, folder, *, checkpoint=None, **options):
    trainer = make_trainer(*method, folder, **{"save_strategy": "steps", "save_steps": 1, **options})
    trainer.train(resume_from_checkpoint=checkpoint and str(folder / f"checkpoint-{checkpoint}"))
    return trainer


# ------------------------------------------------------------------------------------------------ completions tables


def tables(folder):
    return {path.name: pd.read_parquet(path) for path in sorted((folder / "completions").glob("*.parquet"))}


TABLES = {
    "rows of two streams": (DEEP, CUTS),
    "deferred": (DEEP, dict(CUTS, deferred_branching=True)),
    "trees": (SEARCH, dict(TREE, dump_trees=None)),
    "evaluation": (BASE, dict(eval_strategy="steps", eval_steps=3, per_device_eval_batch_size=8)),
}


@pytest.mark.parametrize("method, options", TABLES.values(), ids=TABLES.keys())
def test_a_resume_between_two_logs_loses_no_table(tmp_path, method, options):
    # A generation batch is four steps, a table is written every third.
    options = dict(options, log_completions=True, num_completions_to_print=0, steps_per_generation=4, logging_steps=3)
    options |= dict(max_steps=6, eval_dataset=make_dataset().select(range(4)))
    run(method, tmp_path, **options)
    whole = tables(tmp_path)
    assert list(whole) == ["completions_00003.parquet", "completions_00006.parquet"]
    for step in (2, 5, 6):
        shutil.rmtree(tmp_path / "completions")
        run(method, tmp_path, checkpoint=step, **options, save_strategy="no")
        found = tables(tmp_path)
        assert list(found) == [name for name in whole if int(name[-13:-8]) >= step]
        for name, table in found.items():
            pd.testing.assert_frame_equal(table, whole[name])


def test_what_reward_functions_put_into_the_table_survives(tmp_path):
    def talkative(completions, answer, log_extra, **columns):
        log_extra("seen", [date(2020, 1, len(c) + 1) for c in completions])
        log_extra("cost", [Decimal(len(c)) / 4 for c in completions])
        return contains_answer(completions, answer)

    options = dict(reward_funcs=talkative, log_completions=True, num_completions_to_print=0, max_steps=3)
    options |= dict(steps_per_generation=4, logging_steps=3)
    run(BASE, tmp_path, **options)
    (name, whole), *_ = tables(tmp_path).items()
    shutil.rmtree(tmp_path / "completions")
    run(BASE, tmp_path, checkpoint=2, **options, save_strategy="no")
    pd.testing.assert_frame_equal(tables(tmp_path)[name], whole)
    assert set(map(type, whole["seen"])) == {date} and set(map(type, whole["cost"])) == {Decimal}


# ------------------------------------------------------------------------------------- examples of deferred branches


def dated(kind):
    rows = make_dataset()
    columns = {
        "when": [datetime(2020, 1, 1) + timedelta(days=i) for i in range(len(rows))],
        "day": [date(2020, 1, 1 + i % 9) for i in range(len(rows))],
        "price": [Decimal(i) / 4 for i in range(len(rows))],
        "raw": [bytes([i]) for i in range(len(rows))],
        "weights": [[0.5, i] for i in range(len(rows))],
    }
    data = Dataset.from_dict({**rows.to_dict(), **columns})
    return data.with_format("numpy") if kind == "numpy" else data


@pytest.mark.parametrize("kind", ["python", "numpy"])
def test_examples_of_any_column_wait_in_a_checkpoint_for_their_branches(tmp_path, kind):
    types = []

    def typed(completions, answer, **columns):
        types.append({name: type(columns[name][0]) for name in ("when", "day", "price", "raw", "weights")})
        assert all(len(set(map(type, columns[name]))) == 1 for name in types[-1])
        return contains_answer(completions, answer)

    options = dict(CUTS, deferred_branching=True, train_dataset=dated(kind), reward_funcs=typed, max_steps=3)
    whole = run(DEEP, tmp_path, **options)
    assert torch.load(tmp_path / "checkpoint-2" / "explore_state_0.pt", weights_only=True)["method"]["queue"]
    again = run(DEEP, tmp_path, checkpoint=2, **options, save_strategy="no")
    assert_same(parameters(again), parameters(whole))
    assert all(found == types[0] for found in types)


def test_a_column_that_cannot_wait_there_is_named_before_the_first_step(tmp_path):
    data = (
        make_dataset()
        .add_column("when", [0] * 36)
        .with_transform(lambda rows: {**rows, "when": [pd.Timestamp(2020, 1, 1)] * len(rows["prompt"])})
    )
    trainer = make_trainer(*DEEP, tmp_path, **CUTS, deferred_branching=True, train_dataset=data)
    with pytest.raises(ValueError, match=r"cannot hold the pandas.*Timestamp of the column 'when': convert"):
        trainer.train()
    assert trainer.state.global_step == 0


# --------------------------------------------------------------------------------------------- more than one run here


HARD = (DEEP, dict(CUTS, hard_states_file="states/hard.jsonl"), "states/hard.jsonl")
TREES = (SEARCH, TREE, "trees/trees_0.jsonl")
SOLUTIONS = (SEARCH, dict(TREE, dump_trees=None, replay_buffer=True, replay_threshold=0.9), "solutions.jsonl")
FILES = {"hard states": HARD, "trees": TREES, "solutions": SOLUTIONS}


@pytest.mark.parametrize("method, options, name", FILES.values(), ids=FILES.keys())
def test_a_run_that_begins_again_in_its_folder_leaves_nothing_twice(tmp_path, caplog, method, options, name):
    run(method, tmp_path, **options, save_strategy="no")
    whole = (tmp_path / name).read_text()
    assert whole.count("\n") > 2
    with caplog.at_level(logging.WARNING):
        run(method, tmp_path, **{**options, "max_steps": 2}, save_strategy="no")
    assert whole.startswith((tmp_path / name).read_text())
    assert (tmp_path / "_earlier-1" / name).read_text() == whole
    assert caplog.text.count("contained files of an earlier run") == 1
    run(method, tmp_path, **options, save_strategy="no")
    assert (tmp_path / name).read_text() == whole
    assert sorted(path.name for path in tmp_path.glob("_*")) == ["_earlier-1", "_earlier-2"]


@pytest.mark.parametrize("method, options, name", FILES.values(), ids=FILES.keys())
def test_a_resumed_run_goes_on_with_its_files_to_the_byte(tmp_path, method, options, name):
    options = dict(options, max_steps=5)
    run(method, tmp_path, **options)
    whole = (tmp_path / name).read_bytes()
    for step in (2, 5):
        run(method, tmp_path, checkpoint=step, **options, save_strategy="no")
        assert (tmp_path / name).read_bytes() == whole
    assert not list(tmp_path.glob("_*"))


def test_solutions_that_were_written_again_after_the_checkpoint_are_replaced(tmp_path):
    """A run drops solutions after a checkpoint and writes the whole file again. Then it crashes."""
    method, options, name = SOLUTIONS
    options = dict(options, max_steps=5)
    file, settings = tmp_path / name, dict(solutions_per_prompt=2, threshold=0.9)
    trainer = run(method, tmp_path, **options)
    whole = file.read_bytes()
    for num_prompts in (0, 100):  # the later file is shorter or longer than the file of the checkpoint
        later = SolutionCache(**settings)
        for prompt in range(num_prompts):
            later.offer([prompt], [[6, 7, 8, 1]], 0.5)
        write_cache(file, later, trainer.processing_class)
        finished = run(method, tmp_path, checkpoint=2, **{**options, "max_steps": 2}, save_strategy="no")
        found = read_cache(file, trainer.processing_class, **settings)
        assert found.state_dict() == finished.solutions.state_dict() and len(found) > 0
        write_cache(file, later, trainer.processing_class)
        run(method, tmp_path, checkpoint=2, **options, save_strategy="no")
        assert file.read_bytes() == whole


@pytest.mark.parametrize("method, options, name", FILES.values(), ids=FILES.keys())
def test_checkpoints_of_weights_alone_begin_files_anew(tmp_path, caplog, method, options, name):
    options = dict(options, save_only_model=True)
    run(method, tmp_path, **options)
    whole = (tmp_path / name).read_text()
    with caplog.at_level(logging.WARNING):
        run(method, tmp_path, checkpoint=1, **options, save_strategy="no")
    assert "checkpoint-1 holds weights alone (`save_only_model=True`)" in caplog.text
    assert "plain GRPOTrainer" not in caplog.text
    assert (tmp_path / "_earlier-1" / name).read_text() == whole
    if name != "solutions.jsonl":
        assert {json.loads(line)["step"] for line in (tmp_path / name).read_text().splitlines()} == {1, 2}


def test_tables_of_an_earlier_run_are_kept_apart_and_its_checkpoints_are_told(tmp_path, caplog):
    options = dict(log_completions=True, num_completions_to_print=0)
    run(BASE, tmp_path, **options, max_steps=2)
    with caplog.at_level(logging.WARNING):
        run(BASE, tmp_path, **options, max_steps=1, save_strategy="no")
    assert list(tables(tmp_path)) == ["completions_00001.parquet"]
    assert len(tables(tmp_path / "_earlier-1")) == 2
    assert "checkpoint-2 is of an earlier run, and `resume_from_checkpoint=True` uses it" in caplog.text


def test_a_table_of_an_evaluation_before_training_is_of_this_run(tmp_path):
    options = dict(log_completions=True, num_completions_to_print=0, max_steps=1, per_device_eval_batch_size=8)
    trainer = make_trainer(*BASE, tmp_path, **options, eval_dataset=make_dataset().select(range(2)))
    trainer.evaluate()
    trainer.train()
    assert list(tables(tmp_path)) == ["completions_00000.parquet", "completions_00001.parquet"]


def test_a_checkpoint_of_another_folder_begins_files_anew(tmp_path):
    method, options, name = HARD
    run(method, tmp_path / "first", **options)
    run(method, tmp_path / "second", **options)
    trainer = make_trainer(*method, tmp_path / "second", **options)
    trainer.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-2"))
    assert (tmp_path / "second" / "_earlier-1" / name).is_file()
    assert {json.loads(line)["step"] for line in (tmp_path / "second" / name).read_text().splitlines()} == {2}


def test_solutions_to_start_from_are_not_moved_away(tmp_path):
    method, options, name = SOLUTIONS
    run(method, tmp_path, **options, save_strategy="no")
    found = (tmp_path / name).read_text().splitlines()
    run(method, tmp_path, **options, save_strategy="no", replay_file=str(tmp_path / name), max_steps=1)
    assert set(found) <= set((tmp_path / name).read_text().splitlines()) and not list(tmp_path.glob("_*"))
