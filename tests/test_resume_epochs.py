"""A run may be resumed in any epoch: it goes on with the prompts that the uninterrupted run has there."""

import pytest
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from world import assert_same, contains_answer, make_trainer, parameters

from trl_explore.saving.checkpoints import next_batch
from trl_explore.trainers import DeepGRPOConfig, DeepGRPOTrainer, ExplorationConfig, ExplorationTrainer

DEEP = dict(
    trainer_class=DeepGRPOTrainer, config_class=DeepGRPOConfig, num_branches=3, segmentation="fixed", segment_length=2
)
# Two generation batches of four prompts per epoch, one prompt is left out; each is trained in two steps.
EPOCHS = dict(steps_per_generation=2, max_steps=-1, num_train_epochs=3, save_strategy="steps", save_steps=1)


def sums(num_rows=9, streaming=False):
    rows = [(i, j) for i in range(3) for j in range(4)][:num_rows]
    columns = {"prompt": [f"{i}+{j}=" for i, j in rows], "answer": [str(i + j) for i, j in rows]}
    data = Dataset.from_dict(columns)
    return data.to_iterable_dataset() if streaming else data


def noted(prompts_seen):
    def reward(prompts, completions, answer, **columns):
        prompts_seen.append(sorted(set(prompts)))
        return contains_answer(completions, answer)

    return reward


def run(folder, trainer_class=ExplorationTrainer, config_class=ExplorationConfig, *, checkpoint=None, **options):
    """Final parameters, the prompts of every generation batch, and the trainer."""
    seen = []
    data = sums(options.pop("num_rows", 9), options.pop("streaming", False))
    trainer = make_trainer(
        trainer_class,
        config_class,
        folder,
        **{**EPOCHS, **options},
        train_dataset=data,
        reward_funcs=noted(seen),
    )
    trainer.train(resume_from_checkpoint=checkpoint)
    return parameters(trainer), seen, trainer


def resumed(folder, step, **options):
    return run(folder, checkpoint=str(folder / f"checkpoint-{step}"), **{**options, "save_strategy": "no"})


CASES = {
    "shuffled": {},
    "deferred branches": dict(DEEP, deferred_branching=True),
    "in order": dict(shuffle_dataset=False),
    "two iterations": dict(num_iterations=2, num_train_epochs=2),
    "accumulation that does not divide an epoch": dict(
        gradient_accumulation_steps=4, steps_per_generation=2, num_rows=13
    ),
    "stream": dict(streaming=True, max_steps=12),
    "stream in order": dict(streaming=True, shuffle_dataset=False, max_steps=12),
    "stream that does not fill a step": dict(
        streaming=True, gradient_accumulation_steps=4, steps_per_generation=2, num_rows=13, max_steps=5
    ),
    "workers": dict(dataloader_num_workers=1),
}


FAST = ("in order", "stream")


@pytest.mark.parametrize(
    "case", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_a_run_resumed_in_any_epoch_ends_where_the_uninterrupted_one_does(tmp_path, case):
    options = CASES[case]
    whole, _, trainer = run(tmp_path, **options)
    last = trainer.state.global_step
    # Off a generation boundary, at the end of an epoch, after it, and where nothing is left to do.
    for step in sorted({1, 4, 5, last} & set(range(last + 1))):
        again, _, trainer = resumed(tmp_path, step, **options)
        assert_same(again, whole)
        assert trainer.state.global_step == last


def test_a_resumed_epoch_has_its_own_order_of_prompts(tmp_path):
    _, whole, _ = run(tmp_path)
    epochs = [whole[0:2], whole[2:4], whole[4:6]]
    assert all(len(set(first + second)) == 8 for first, second in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert resumed(tmp_path, 6)[1] == whole[3:]
    assert resumed(tmp_path, 8)[1] == whole[4:]
    assert resumed(tmp_path, 5, ignore_data_skip=True)[1][:2] == whole[2:4]  # the epoch begins again


def test_plain_grpo_repeats_its_first_epoch(tmp_path):
    # The control: if this starts to fail, TRL has mended it and our seam can go.
    options = dict(trainer_class=GRPOTrainer, config_class=GRPOConfig)
    _, whole, _ = run(tmp_path, **options)
    assert resumed(tmp_path, 4, **options)[1][:2] == whole[:2] != whole[2:4]


def test_a_checkpoint_at_the_end_of_an_epoch_is_followed_by_what_its_end_brings(tmp_path):
    # The checkpoint of step 4 is written before the evaluation of that epoch, which draws random numbers.
    options = dict(eval_strategy="epoch", eval_dataset=sums(4), logging_strategy="epoch", per_device_eval_batch_size=8)
    whole, _, trainer = run(tmp_path, **options)
    again, _, other = resumed(tmp_path, 4, **options)
    assert_same(again, whole)
    found, expected = (
        [(log["step"], *log.keys() & {"loss", "eval_loss"}) for log in t.state.log_history[:-1]]
        for t in (other, trainer)
    )
    assert (
        found
        == expected
        == [(4, "loss"), (4, "eval_loss"), (8, "loss"), (8, "eval_loss"), (12, "loss"), (12, "eval_loss")]
    )


def test_checkpoints_of_epochs_owe_nothing(tmp_path):
    options = dict(eval_strategy="epoch", eval_dataset=sums(4), save_strategy="epoch", per_device_eval_batch_size=8)
    whole, _, _ = run(tmp_path, **options)
    again, _, other = resumed(tmp_path, 8, **options)
    assert_same(again, whole)
    assert [log["step"] for log in other.state.log_history if "eval_loss" in log] == [4, 8, 12]


def test_a_run_that_goes_on_beyond_its_end_takes_the_next_prompts(tmp_path):
    # Epoch strategies tell an epoch's end where training stops, also in the middle of its data.
    options = dict(save_strategy="epoch", max_steps=12, lr_scheduler_type="constant")
    _, whole, _ = run(tmp_path / "whole", **options)
    run(tmp_path, **{**options, "max_steps": 6})
    assert resumed(tmp_path, 6, **options)[1] == whole[3:]


def test_the_loss_of_a_logging_interval_survives_a_resume(tmp_path):
    options = dict(logging_steps=3, num_train_epochs=1, max_steps=3)
    _, _, trainer = run(tmp_path, **options)
    _, _, other = resumed(tmp_path, 2, **options)
    assert other.state.log_history[0]["loss"] == trainer.state.log_history[0]["loss"]
    assert other.state.log_history[0]["reward"] == trainer.state.log_history[0]["reward"]


def position(epoch, batches, ended=False, stopped=False):
    return dict(epoch=epoch, batches=batches, ended=ended, stopped=stopped)


@pytest.mark.parametrize(
    ("at", "batches_per_epoch", "options", "expected"),
    [
        (position(1, 4), 4, {}, (2, 0, True)),  # the last batch of an epoch, saved before its end was told
        (position(1, 4, ended=True), 4, {}, (2, 0, False)),
        (position(1, 3, ended=True), 4, {}, (2, 0, False)),  # a callback ended the epoch early
        (position(1, 3, ended=True, stopped=True), 4, {}, (1, 3, False)),  # `max_steps` cut it
        (position(1, 4, ended=True, stopped=True), 4, {}, (2, 0, False)),
        # The last step of an epoch may have fewer batches.
        (position(0, 6), 2, dict(batches_per_step=4), (1, 0, True)),
        (position(0, 4), 2, dict(batches_per_step=4), (0, 4, False)),
        # A finished run only tells the end of its epoch.
        (position(2, 4), 4, dict(finished=True), (2, 4, True)),
        (position(2, 3, ended=True), 4, dict(finished=True), (2, 3, False)),
    ],
)
def test_where_a_resumed_run_goes_on(at, batches_per_epoch, options, expected):
    assert next_batch(at, batches_per_epoch, **{"batches_per_step": 1, "finished": False, **options}) == expected
