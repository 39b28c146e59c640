"""Resume is bit-exact, also in the middle of a generation batch; half-written checkpoints are never used."""

import json
import logging

import pytest
import torch
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from world import assert_same, differ, make_dataset, make_trainer, parameters

from trl_explore.saving.checkpoints import is_complete
from trl_explore.trainers import (
    DeepGRPOConfig,
    DeepGRPOTrainer,
    ExplorationConfig,
    ExplorationTrainer,
    TreeGRPOConfig,
    TreeGRPOTrainer,
)
from trl_explore.trees.replay import read_cache

LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
CUTS = dict(num_branches=3, segmentation="fixed", segment_length=2)
OFF_BOUNDARY = dict(steps_per_generation=4, max_steps=7)  # one optimiser step per micro-batch, four per generation


def run(trainer_class, config_class, folder, **options):
    """Train with a checkpoint at step 2."""
    trainer = make_trainer(trainer_class, config_class, folder, save_strategy="steps", save_steps=2, **options)
    trainer.train()
    return trainer


def resumed(trainer_class, config_class, folder, **options):
    trainer = make_trainer(trainer_class, config_class, folder, save_strategy="no", **options)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    return trainer


CASES = {
    "off a generation boundary": OFF_BOUNDARY,
    "on a boundary": dict(steps_per_generation=2, max_steps=5),
    "two iterations": dict(num_iterations=2, steps_per_generation=2, max_steps=7),
    "accumulation": dict(gradient_accumulation_steps=2, steps_per_generation=8, max_steps=5),
    "beta": dict(beta=0.1, **OFF_BOUNDARY),
    "lora": dict(peft_config=LORA, **OFF_BOUNDARY),
    "deferred": dict(deferred_branching=True, **OFF_BOUNDARY),
    "dropped rows, several pivots, cap": dict(
        drop_zero_advantage=True, num_pivots=2, max_pivots_per_batch=5, loss_type="grpo", **OFF_BOUNDARY
    ),
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_a_resumed_run_ends_where_the_uninterrupted_one_does(tmp_path, options):
    options = {**CUTS, **options}
    whole = run(DeepGRPOTrainer, DeepGRPOConfig, tmp_path, **options)
    again = resumed(DeepGRPOTrainer, DeepGRPOConfig, tmp_path, **options)
    assert_same(parameters(again), parameters(whole))
    assert again.branch_explorer.estimator.state_dict() == whole.branch_explorer.estimator.state_dict()
    assert torch.equal(again.exploration_generator.get_state(), whole.exploration_generator.get_state())
    timing = ("seconds", "_time", "runtime", "per_second", "train_loss")
    for first, second in zip(again.state.log_history[-3:], whole.state.log_history[-3:], strict=True):
        same = [key for key in second if not key.endswith(timing)]
        assert {k: first[k] for k in same} == {k: second[k] for k in same}


TREE = dict(expansion_width=3, node_length=2)
TREE_CASES = {
    "off a generation boundary": OFF_BOUNDARY,
    "on a boundary": dict(steps_per_generation=2, max_steps=5),
    "two iterations, lora": dict(num_iterations=2, steps_per_generation=2, max_steps=7, peft_config=LORA),
    # Few prompts, so that those that are solved come back.
    "replay": dict(
        replay_buffer=True,
        replay_threshold=0.9,
        train_dataset=make_dataset().select(range(8)),
        max_steps=14,
        steps_per_generation=1,
    ),
    "once, beta": dict(share_prefix_once=True, beta=0.1, **OFF_BOUNDARY),
    "random selection": dict(selection="random", **OFF_BOUNDARY),
}


@pytest.mark.parametrize("options", TREE_CASES.values(), ids=TREE_CASES.keys())
def test_a_resumed_tree_search_ends_where_the_uninterrupted_one_does(tmp_path, options):
    options = {**TREE, "dump_trees": "trees", **options}
    whole = run(TreeGRPOTrainer, TreeGRPOConfig, tmp_path, **options)
    trees = tmp_path / "trees" / "trees_0.jsonl"
    written = trees.read_text()
    again = resumed(TreeGRPOTrainer, TreeGRPOConfig, tmp_path, **options)
    assert_same(parameters(again), parameters(whole))
    assert again.solutions.state_dict() == whole.solutions.state_dict()
    assert trees.read_text() == written  # no tree twice, none missing
    if "replay_buffer" in options:
        assert sum(entry["replay/prompts"] for entry in again.state.log_history[:-1]) > 0
        file = tmp_path / "solutions.jsonl"
        read = read_cache(file, again.processing_class, solutions_per_prompt=2, threshold=0.9)
        assert read.state_dict() == whole.solutions.state_dict()


def test_the_base_resumes_plain_grpo_exactly_where_grpo_itself_does_not(tmp_path):
    plain = run(GRPOTrainer, GRPOConfig, tmp_path / "plain", **OFF_BOUNDARY)
    exact = run(ExplorationTrainer, ExplorationConfig, tmp_path / "exact", **OFF_BOUNDARY)
    assert_same(parameters(exact), parameters(plain))
    assert_same(
        parameters(resumed(ExplorationTrainer, ExplorationConfig, tmp_path / "exact", **OFF_BOUNDARY)),
        parameters(plain),
    )
    # The control: if this starts to fail, TRL has mended it and our own buffer can go.
    assert differ(parameters(resumed(GRPOTrainer, GRPOConfig, tmp_path / "plain", **OFF_BOUNDARY)), parameters(plain))


def test_a_whole_checkpoint_stays_if_what_follows_it_is_interrupted(tmp_path, monkeypatch):
    def interrupted(**options):
        raise KeyboardInterrupt

    monkeypatch.setattr("transformers.trainer.rotate_checkpoints", interrupted)
    options = dict(save_strategy="steps", save_steps=1, save_total_limit=1)
    trainer = make_trainer(ExplorationTrainer, ExplorationConfig, tmp_path, **options)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert is_complete(tmp_path / "checkpoint-1")


def test_a_checkpoint_of_plain_grpo_loads_with_a_warning(tmp_path, caplog):
    options = dict(steps_per_generation=2, max_steps=4)
    run(GRPOTrainer, GRPOConfig, tmp_path, **options)
    with caplog.at_level(logging.WARNING):
        resumed(DeepGRPOTrainer, DeepGRPOConfig, tmp_path, **options, **CUTS)
    assert "written by a plain GRPOTrainer" in caplog.text


def test_a_checkpoint_of_another_world_size_is_refused_until_it_is_written_over(tmp_path):
    run(ExplorationTrainer, ExplorationConfig, tmp_path, max_steps=2)
    (tmp_path / "checkpoint-2" / "explore_state_1.pt").write_bytes(b"")
    with pytest.raises(ValueError, match=r"written by 2 process\(es\), this run has 1"):
        resumed(ExplorationTrainer, ExplorationConfig, tmp_path)
    run(ExplorationTrainer, ExplorationConfig, tmp_path)
    assert resumed(ExplorationTrainer, ExplorationConfig, tmp_path).state.global_step == 3


class Interrupted(DeepGRPOTrainer):
    def exploration_state(self):
        raise KeyboardInterrupt


def test_an_interrupted_save_leaves_no_half_checkpoint_that_counts_as_whole(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(Interrupted, DeepGRPOConfig, tmp_path, **CUTS)
    assert not list(tmp_path.glob("checkpoint-*"))
    run(DeepGRPOTrainer, DeepGRPOConfig, tmp_path, **CUTS)
    assert is_complete(tmp_path / "checkpoint-2")
    with pytest.raises(KeyboardInterrupt):
        run(Interrupted, DeepGRPOConfig, tmp_path, **CUTS, learning_rate=1e-3)
    assert not is_complete(tmp_path / "checkpoint-2")


def test_resume_true_passes_over_a_half_written_checkpoint(tmp_path, caplog):
    whole = run(DeepGRPOTrainer, DeepGRPOConfig, tmp_path, **CUTS, max_steps=4)
    state = tmp_path / "checkpoint-4" / "trainer_state.json"
    state.write_text(state.read_text()[:100])  # as a killed process leaves it
    trainer = make_trainer(DeepGRPOTrainer, DeepGRPOConfig, tmp_path, **CUTS, max_steps=4)
    with caplog.at_level(logging.WARNING):
        trainer.train(resume_from_checkpoint=True)
    assert "checkpoint-4: not written to the end" in caplog.text
    assert_same(parameters(trainer), parameters(whole))


def test_there_must_be_a_whole_checkpoint_to_resume(tmp_path):
    trainer = make_trainer(ExplorationTrainer, ExplorationConfig, tmp_path)
    with pytest.raises(ValueError, match="holds nothing"):
        trainer.train(resume_from_checkpoint=True)
    (tmp_path / "checkpoint-3").mkdir()
    with pytest.raises(ValueError, match="checkpoint-3, not written to the end"):
        trainer.train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match="is not a complete checkpoint"):
        trainer.train(resume_from_checkpoint=tmp_path / "checkpoint-3")


def test_state_files_load_without_pickle(tmp_path):
    run(DeepGRPOTrainer, DeepGRPOConfig, tmp_path, **CUTS, **OFF_BOUNDARY)
    folder = tmp_path / "checkpoint-2"
    state = torch.load(folder / "explore_state_0.pt", weights_only=True)
    assert state["step"] == 2 and len(state["buffered_inputs"]) == 4
    assert not list(folder.glob("*.part"))
    assert json.loads((folder / "trainer_state.json").read_text())["global_step"] == 2
