"""Explorers: the smallest one, one of a user's own, and what the trainer checks of them."""

import importlib
import math
import re

import numpy as np
import pandas as pd
import pytest
import torch
from commands import EXAMPLES
from trl import GRPOConfig, GRPOTrainer
from world import (
    always,
    assert_same,
    contains_answer,
    differ,
    make_trainer,
    never,
    one_batch,
    parameters,
    trained,
)

from trl_explore.explorers.explorer import Explored, Explorer
from trl_explore.methods import METHODS
from trl_explore.rows.rollouts import Continuation
from trl_explore.trainers import ExplorationConfig, ExplorationTrainer, G2RLConfig, G2RLTrainer

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(EXAMPLES))
    HalfwayTrainer = importlib.import_module("own_explorer").HalfwayTrainer

RESAMPLE = dict(explore="resample", explore_prompts="unsolved")
CASES = {
    "resample": (ExplorationTrainer, RESAMPLE),
    "halfway": (HalfwayTrainer, dict(explore_prompts="unsolved")),
    "halfway of all prompts": (HalfwayTrainer, dict(explore_prompts="all")),
}
UNSOLVED = [case for case in CASES if "all" not in case]


def odd_solved(completions, answer, **kwargs):
    """Sums with an odd answer are solved sometimes, other sums never."""
    return [float(int(a) % 2 and len(c) % 3 > 0) for a, c in zip(answer, completions, strict=True)]


def exploring(case, folder, **options):
    trainer_class, own = CASES[case]
    return make_trainer(trainer_class, trainer_class.config_class, folder, **{**own, **options})


@pytest.mark.parametrize("case", UNSOLVED)
def test_if_every_prompt_is_solved_it_is_grpo_bit_for_bit(tmp_path, case):
    trainer_class, own = CASES[case]
    rewards = [contains_answer, always]
    options = dict(reward_funcs=rewards, success_reward="always", **own)
    found, log = trained(trainer_class, trainer_class.config_class, tmp_path, **options)
    expected, _ = trained(GRPOTrainer, GRPOConfig, tmp_path, reward_funcs=rewards)
    assert_same(found, expected)
    assert all(entry["explore_share"] == 0 for entry in log if "reward" in entry)


@pytest.mark.parametrize("case", UNSOLVED)
def test_solved_prompts_keep_the_rows_of_grpo_and_unsolved_ones_get_others(tmp_path, case):
    trainer = exploring(case, tmp_path, reward_funcs=odd_solved)
    output = one_batch(trainer)
    state = torch.get_rng_state()
    expected = one_batch(make_trainer(GRPOTrainer, GRPOConfig, tmp_path, reward_funcs=odd_solved))
    assert torch.equal(state, torch.get_rng_state())  # the next samples are those of GRPO as well
    solved = expected["advantages"].view(-1, 4).abs().sum(dim=1).repeat_interleave(4) > 0
    assert 0 < solved.sum() < len(solved)
    width = expected["completion_ids"].shape[1]
    assert torch.equal(output["completion_ids"][solved][:, :width], expected["completion_ids"][solved])
    assert not torch.equal(output["completion_ids"][~solved][:, :width], expected["completion_ids"][~solved])
    assert torch.equal(output["advantages"][solved], expected["advantages"][solved])


def test_a_group_that_was_sampled_again_has_the_advantages_of_its_rewards(tmp_path):
    def first_letter(completion_ids, **kwargs):
        return [float(ids[0] % 7) / 10 for ids in completion_ids]

    trainer = exploring("resample", tmp_path, reward_funcs=first_letter)
    output = one_batch(trainer)
    rewards = torch.tensor(first_letter([ids for ids in trainer.main_completion_ids])).view(-1, 4)
    expected = (rewards - rewards.mean(dim=1, keepdim=True)) / (rewards.std(dim=1, keepdim=True) + 1e-4)
    assert len(trainer.exploration.batch.explored) == 2
    torch.testing.assert_close(output["advantages"], expected.flatten(), atol=1e-4, rtol=1e-4)


def test_the_half_that_is_kept_is_that_of_grpo_and_is_not_trained(tmp_path):
    output = one_batch(exploring("halfway", tmp_path, reward_funcs=never))
    expected = one_batch(make_trainer(GRPOTrainer, GRPOConfig, tmp_path, reward_funcs=never))
    for row, ids in enumerate(expected["completion_ids"]):
        half = int(expected["completion_mask"][row].sum()) // 2
        assert torch.equal(output["completion_ids"][row][:half], ids[:half])
        assert output["tool_mask"][row][:half].sum() == 0 and output["tool_mask"][row][half] == 1


@pytest.mark.parametrize("case", UNSOLVED)
def test_all_sampled_tokens_are_counted(tmp_path, case):
    asked = []

    def noting(completion_ids, completions, answer, **columns):
        asked.append(sum(len(ids) for ids in completion_ids))
        return odd_solved(completions, answer)

    trainer_class, own = CASES[case]
    _, log = trained(trainer_class, trainer_class.config_class, tmp_path, reward_funcs=noting, max_steps=1, **own)
    plain, explored = asked
    assert log[0]["explore/plain_tokens"] == plain
    if case == "resample":
        assert log[0]["generation/sampled_tokens"] == plain + explored
    else:  # the first halves were sampled once
        assert plain < log[0]["generation/sampled_tokens"] < plain + explored


@pytest.mark.parametrize("case, into", [*((case, "replace") for case in CASES), *((case, "add") for case in UNSOLVED)])
def test_it_trains_and_resumes_bit_for_bit(tmp_path, case, into):
    options = dict(max_steps=4, log_completions=True, num_completions_to_print=0, explore_into=into)
    whole = exploring(case, tmp_path / "whole", save_strategy="steps", save_steps=2, **options)
    start = parameters(whole)
    whole.train()
    assert differ(parameters(whole), start)
    again = exploring(case, tmp_path / "whole", **options)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert_same(parameters(again), parameters(whole))
    for path in (tmp_path / "whole" / "completions").iterdir():
        assert pd.read_parquet(path)["prompt"].notna().all()


def test_rewards_may_be_shaped_as_well(tmp_path):
    got, log = trained(G2RLTrainer, G2RLConfig, tmp_path, reward_funcs=odd_solved, success_threshold=0.5, **RESAMPLE)
    assert log[0]["explore_share"] > 0 and "geometry/mean_novelty" in log[0]


def test_evaluation_explores_nothing(tmp_path):
    trainer = exploring("resample", tmp_path, reward_funcs=never, eval_strategy="no")
    trainer.evaluate(trainer.train_dataset.select(range(4)))
    assert trainer.exploration.batch.explored == [] and trainer.sample.tokens.own == 0


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(explore="resamble", explore_prompts="unsolved"), "`explore`: unknown value 'resamble'"),
        (dict(explore="resample"), "`explore='resample'` samples a prompt once more"),
        (dict(explore_into="add"), "`explore_into='add'` is about prompts that GRPO samples first"),
        (dict(RESAMPLE, max_completion_length=None), "`explore='resample'` needs a limit"),
    ],
)
def test_values_that_make_no_sense_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ExplorationConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **options)


@pytest.mark.parametrize("name", ["deep_grpo", "tree_grpo"])
def test_trainers_that_explore_in_their_own_way_refuse_the_field(tmp_path, name):
    cls = METHODS[name].trainer_class
    with pytest.raises(ValueError, match=rf"`explore='resample'` is a way of exploring, and {cls.__name__}"):
        make_trainer(cls, METHODS[name].config_class, tmp_path, **RESAMPLE)


class Given(Explorer):
    """Returns what the test says."""

    name = "given"
    result: object = None

    def explore(self, groups, plain):
        return self.result


def with_explorer(explorer_class, folder, **options):
    class Trainer(ExplorationTrainer):
        def make_explorer(self):
            return explorer_class(self, self.sample, self.scorer)

    return make_trainer(Trainer, ExplorationConfig, folder, **options)


def given(folder, result, **options):
    trainer = with_explorer(Given, folder, **options)
    trainer.explorer.result = result
    return trainer


FOUR = Explored([[1]] * 4)


@pytest.mark.parametrize(
    "result, message",
    [
        (None, "Explorer 'given' returned None: return a list with one `Explored` for each prompt."),
        ([None, FOUR], "return a list with one `Explored` for each prompt."),
        ([], "Explorer 'given' returned 0 results for 2 prompts."),
        ([Explored([[1]] * 3), FOUR], "returned 3 completions for a prompt, but a prompt has"),
        ([Explored([[1], [], [1], [1]]), FOUR], "returned an empty completion: give at least one token."),
        ([Explored(["a"] * 4), FOUR], "returned 'a' as a completion: give a list of token ids."),
        ([Explored([Continuation([1])] * 4), FOUR], "as a completion: give a list of token ids."),
        ([Explored([[5] * 9] * 4), FOUR], "a completion of 9 tokens, more than `max_completion_length=8`"),
        (
            [Explored([[5, 1]] * 4, loss_mask=[[1]] * 4), FOUR],
            "returned `loss_mask` of lengths [1, 1, 1, 1] for completions of [2, 2, 2, 2] tokens",
        ),
        ([Explored([[1]] * 4, loss_mask=[[0.5]] * 4), FOUR], "returned a `loss_mask` of [0.5]: use 1 to train"),
        ([Explored([[1]] * 4, advantages=[1.0] * 4), FOUR], "`advantages` of lengths [0, 0, 0, 0]"),
        ([Explored([[1]] * 4, advantages=[[math.nan]] * 4), FOUR], "`advantages` that are not finite: [nan]"),
        ([Explored([[1]] * 4, rewards=[[1.0, 2.0]] * 4), FOUR], "returned `rewards` with [2, 2, 2, 2] values for 4"),
        ([Explored([[1]] * 4, rewards=[1.0] * 4), FOUR], "returned `rewards` with [0, 0, 0, 0] values for 4"),
        ([Explored([[1]] * 4, logged=[{}]), FOUR], "returned 1 values in `logged` for 4 completions: give one value"),
    ],
)
def test_a_wrong_result_of_an_explorer_is_named(tmp_path, result, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        one_batch(given(tmp_path, result))


def test_a_prompt_without_advantages_keeps_those_of_grpo(tmp_path):
    own = Explored([[5, 1]] * 4, advantages=[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]])
    grpo = Explored([[6, 1], [7, 1], [8, 1], [9, 1]])

    def first(completion_ids, **kwargs):
        return [float(ids[0]) for ids in completion_ids]

    found = one_batch(given(tmp_path, [grpo, own], reward_funcs=first))["advantages"]
    assert found[4:].tolist() == own.advantages
    expected = torch.tensor([6.0, 7.0, 8.0, 9.0])
    expected = (expected - expected.mean()) / (expected.std() + 1e-4)
    torch.testing.assert_close(found[:4], expected.unsqueeze(1).repeat(1, 2), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("prompts", ["all", "unsolved"])
def test_rewards_of_some_prompts_are_kept_and_the_others_are_asked_for(tmp_path, prompts):
    result = [Explored([[5, 1]] * 4, rewards=[[0.1], [0.2], [0.3], [0.4]]), Explored([[6, 1]] * 4)]
    trainer = given(tmp_path, result, reward_funcs=never, explore_prompts=prompts)
    one_batch(trainer)
    expected = torch.tensor([0.1, 0.2, 0.3, 0.4, 0, 0, 0, 0])
    torch.testing.assert_close(trainer.scorer.totals(), expected)


def test_numpy_scalars_in_the_state_of_an_explorer_are_resumed_as_python_numbers(tmp_path):
    class Remembering(Explorer):
        name, state = "remembering", {"a": [np.float64(0.1), (np.int64(3), True)], np.str_("b"): {"c": np.bool_(True)}}

        def explore(self, groups, plain):
            return [FOUR for _ in groups]

        def state_dict(self):
            return self.state

        def load_state_dict(self, state):
            self.state = state

    options = dict(save_strategy="steps", save_steps=1)
    with_explorer(Remembering, tmp_path, max_steps=1, **options).train()
    again = with_explorer(Remembering, tmp_path, max_steps=2, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert repr(again.explorer.state) == "{'a': [0.1, (3, True)], 'b': {'c': True}}"


def test_changes_of_a_prompt_by_its_explorer_are_changes_of_copies(tmp_path):
    class Changing(Explorer):
        needs_samples = True

        def explore(self, groups, plain):
            for group in groups:
                group.prompt_ids.append(5)
                group.example["answer"] = "?"
                for sample in group.samples:
                    sample.token_ids.append(5)
                    sample.rewards[0] = 7.0
            return [Explored([[5, 1]] * 4) for _ in groups]

    answers = []

    def noting(completions, answer, **kwargs):
        answers.extend(answer)
        return [0.0] * len(completions)

    trainer = with_explorer(Changing, tmp_path, reward_funcs=noting)
    output = one_batch(trainer)
    expected = one_batch(make_trainer(GRPOTrainer, GRPOConfig, tmp_path, reward_funcs=never))
    assert torch.equal(output["prompt_ids"], expected["prompt_ids"])
    assert "?" not in answers and len(answers) == 16
    assert all(example["answer"] != "?" for example in trainer.main_examples)


def test_make_explorer_must_return_an_explorer(tmp_path):
    with pytest.raises(TypeError, match=r"Trainer\.make_explorer returned .*: return an `Explorer`, made with"):
        with_explorer(lambda *parts: Given, tmp_path)


def test_a_prefix_must_not_be_empty_and_begun_has_one_entry_for_each(tmp_path):
    trainer = make_trainer(ExplorationTrainer, ExplorationConfig, tmp_path)
    with pytest.raises(ValueError, match="A prefix is empty: begin with the tokens of the prompt."):
        trainer.sample([[]], 1, 4)
    with pytest.raises(ValueError, match="`begun` has 2 entries for 1 prefixes"):
        trainer.sample([[5]], 1, 4, begun=[0, 0])


def test_an_explorer_of_ones_own_refuses_tools_and_rollout_func(tmp_path):
    with pytest.raises(ValueError, match="`rollout_func` cannot be combined with HalfwayTrainer"):
        make_trainer(HalfwayTrainer, HalfwayTrainer.config_class, tmp_path, rollout_func=lambda prompts, trainer: {})
