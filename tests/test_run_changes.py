"""What may change when a run goes on from a checkpoint: refused, told once, or free."""

import logging

import pytest
import torch
from trl import GRPOConfig
from world import TINY, differ, make_dataset, make_trainer, parameters, tiny_methods

from trl_explore.saving.changes import FREE, MOVES_DATA, NEEDED_BY_ROLLOUTS, check_changes, compared_values
from trl_explore.trainers import DeepGRPOConfig, DeepGRPOTrainer, ExplorationConfig, ExplorationTrainer

CUTS = TINY["deep_grpo"].options
METHODS = tiny_methods()
BASE = (ExplorationTrainer, ExplorationConfig, {})
DEEP, TREE, G2RL, SESA = (METHODS[name] for name in ("deep_grpo", "tree_grpo", "g2rl", "sesa"))
# Four steps per generation batch: checkpoint 2 holds rollouts that are in use, checkpoint 4 does not.
SHORT = dict(steps_per_generation=4, max_steps=4, save_strategy="steps", save_steps=2)


def written(method, folder, **options):
    trainer_class, config_class, knobs = method
    make_trainer(trainer_class, config_class, folder, **{**SHORT, **knobs, **options}).train()


def gone_on(method, folder, step=2, **options):
    trainer_class, config_class, knobs = method
    more = dict(max_steps=6, save_strategy="no")
    trainer = make_trainer(trainer_class, config_class, folder, **{**SHORT, **more, **knobs, **options})
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))
    return trainer


THEN = compared_values(
    dict(
        beta=0.0, num_generations=4, seed=3, shuffle_dataset=True, temperature=1.0, learning_rate=1e-5, dump_trees=None
    ),
    ["learning_rate", "seed"],
)
MANNERS = dict(checkpoint="out/checkpoint-6", skips_data=True, rollouts_in_use=True, boundary=4)


def test_only_what_matters_is_compared():
    assert THEN == dict(beta=0.0, num_generations=4, seed=3, shuffle_dataset=True, temperature=1.0)
    assert check_changes(THEN, THEN, **MANNERS) is None
    # Without shuffling, the seed moves nothing. Lists and tuples are the same.
    assert "seed" not in compared_values(dict(seed=3, shuffle_dataset=False), [])
    first, second = (
        compared_values(dict(shuffle_dataset=False, seed=0, delimiters=own), []) for own in ((".",), ["."])
    )
    assert first == second


def test_a_divergence_term_may_change_and_end_while_rollouts_are_in_use():
    then = {**THEN, "beta": 0.1}
    for beta in (0.0, 0.2):
        assert f"`beta` changed from 0.1 to {beta} since" in check_changes(then, {**THEN, "beta": beta}, **MANNERS)


def test_the_table_names_fields_that_there_are():
    there = {name for _, config, _ in METHODS.values() for name in config.__dataclass_fields__}
    assert {*MOVES_DATA, *NEEDED_BY_ROLLOUTS, *FREE} - there == {"train_dataset"}
    assert set(GRPOConfig.__dataclass_fields__) <= there


def test_what_changed_of_the_method_is_told_in_one_line_and_what_is_free_is_not(tmp_path, caplog):
    written(DEEP, tmp_path)
    with caplog.at_level(logging.WARNING):
        free = dict(learning_rate=1e-3, logging_steps=2, hard_states_file="hard.jsonl", log_completions=True)
        assert gone_on(DEEP, tmp_path, **free).state.global_step == 6
        assert "changed from" not in caplog.text
        changed = {**CUTS, "num_branches": 4, "depth_bias": 1.0}
        gone_on((DeepGRPOTrainer, DeepGRPOConfig, changed), tmp_path, temperature=0.5)
    (line,) = [record.message for record in caplog.records if "changed from" in record.message]
    for change in ("`temperature` changed from 1.0 to 0.5", "`num_branches` changed from 3 to 4", "`depth_bias`"):
        assert change in line
    # What a composition keeps decides.
    with pytest.raises(ValueError, match="was written by another DEEP-GRPO, which kept"):
        gone_on((Counting, DeepGRPOConfig, CUTS), tmp_path)
    # A new run may start from the weights.
    new = make_trainer(*TREE[:2], tmp_path / "new", model=str(tmp_path / "checkpoint-4"), **TREE[2])
    before = parameters(new)
    new.train()
    assert new.state.global_step == 3 and differ(parameters(new), before)


MOVED = {
    "num_generations": dict(num_generations=2),
    "steps_per_generation": dict(steps_per_generation=2),
    "gradient_accumulation_steps": dict(gradient_accumulation_steps=2),
    "per_device_train_batch_size": dict(per_device_train_batch_size=4),
    "num_iterations": dict(num_iterations=2),
    "shuffle_dataset": dict(shuffle_dataset=False),
    "seed": dict(seed=4),
    "train_dataset": dict(train_dataset=make_dataset().select(range(30))),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    written(BASE, folder)
    return folder


@pytest.mark.parametrize("name", MOVED)
def test_what_moves_the_data_is_refused_by_the_trainer(plain, name):
    for step in (2, 4):
        told = f"`{name}` changed from .*checkpoint-{step} was written: prompts would be.*`ignore_data_skip=True`"
        with pytest.raises(ValueError, match=told):
            gone_on(BASE, plain, step, **MOVED[name])


def test_a_stream_instead_of_rows_is_refused(plain):
    stream = make_dataset().to_iterable_dataset()
    with pytest.raises(ValueError, match="`train_dataset` changed from '36 rows' to 'a stream'"):
        gone_on(BASE, plain, train_dataset=stream)


@pytest.mark.parametrize("name", MOVED)
def test_it_may_change_where_the_data_begin_anew(plain, name):
    assert gone_on(BASE, plain, ignore_data_skip=True, **MOVED[name]).state.global_step == 6


def test_a_divergence_term_can_begin_between_generation_batches_only(plain, caplog):
    with pytest.raises(ValueError, match=r"`beta` changed from 0.0 to 0.1 .*still in use there.*steps that 4 divides"):
        gone_on(BASE, plain, 2, beta=0.1)
    with caplog.at_level(logging.WARNING):
        assert gone_on(BASE, plain, 4, beta=0.1).state.log_history[-2]["kl"] > 0
        assert gone_on(BASE, plain, 2, beta=0.1, ignore_data_skip=True).state.global_step == 6
    assert caplog.text.count("`beta` changed from 0.0 to 0.1") == 2


PAIRS = {"deep to tree": (DEEP, TREE), "tree to deep": (TREE, DEEP), "g2rl to deep": (G2RL, DEEP)}
PAIRS |= {"tree to g2rl": (TREE, G2RL), "sesa to g2rl": (SESA, G2RL), "deep to plain": (DEEP, BASE)}


@pytest.mark.parametrize("first, second", PAIRS.values(), ids=PAIRS.keys())
def test_another_methods_checkpoint_is_refused_with_the_remedy(tmp_path, first, second):
    written(first, tmp_path, steps_per_generation=1, max_steps=2)
    one, other = first[0]._name, second[0]._name
    told = f"checkpoint-2 was written by {one}, whose state cannot be used by {other}: go on with .*, or start a new "
    with pytest.raises(ValueError, match=told + "run from its weights, with `model='.*checkpoint-2'`"):
        gone_on(second, tmp_path)


@pytest.mark.parametrize("step", [2, 4])
def test_a_method_goes_on_from_plain_grpo_and_starts_fresh(plain, caplog, step):
    with caplog.at_level(logging.WARNING):
        trainer = gone_on(DEEP, plain, step)
    assert f"checkpoint-{step} was written by plain GRPO: the method starts fresh" in caplog.text
    assert trainer.state.global_step == 6 and len(trainer.branch_explorer.estimator) > 0


class Counting(DeepGRPOTrainer):
    def exploration_state(self):
        return {**super().exploration_state(), "count": 3}


def test_deferred_branches_may_be_switched(tmp_path, caplog):
    written(DEEP, tmp_path / "on", deferred_branching=True)
    written(DEEP, tmp_path / "off")
    with caplog.at_level(logging.WARNING):
        off = gone_on(DEEP, tmp_path / "on", deferred_branching=False)
        on = gone_on(DEEP, tmp_path / "off", deferred_branching=True)
    assert off.branch_explorer._queue == [] and len(on.branch_explorer._queue) > 0
    assert "`deferred_branching` changed from True to False" in caplog.text
    assert "`deferred_branching` changed from False to True" in caplog.text


def test_a_state_of_another_format_is_refused_with_one_sentence(tmp_path):
    written(BASE, tmp_path)
    file = tmp_path / "checkpoint-2" / "explore_state_0.pt"
    state = torch.load(file, weights_only=True)
    first = {name: state[name] for name in ("step", "buffered_inputs", "rollout", "metrics", "generator", "method")}
    for content, number in ((first, 1), ({**state, "format": 9}, 9)):
        torch.save(content, file)
        with pytest.raises(ValueError, match=rf"has format {number}, and this version reads format 2: .*`model="):
            gone_on(BASE, tmp_path)
