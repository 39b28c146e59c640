"""Advantages that a user computes: functions, import paths, weighted lists, and their errors."""

import functools
import json
import re
from math import inf, nan

import pytest
import torch
from test_credit_trainers import odd
from trl import GRPOConfig, GRPOTrainer, TrlParser
from world import assert_same, differ, make_trainer, never, one_batch, tiny_methods, trained

from trl_explore.credit.functions import AdvantageBatch
from trl_explore.credit.maxrl import maxrl
from trl_explore.credit.normalised import normalised
from trl_explore.trainers import AutoExploreConfig, AutoExploreTrainer, ExplorationConfig, ExplorationTrainer

OURS = ExplorationTrainer, ExplorationConfig


def make(folder, **options):
    return make_trainer(*OURS, folder, **{"reward_funcs": odd, **options})


def centred(rewards):
    return rewards - rewards.nanmean(dim=1, keepdim=True)


def short_is_better(rewards, batch):
    """Like GRPO, but less for long completions."""
    return centred(rewards) - 0.01 * batch.gather(batch.rows["completion_mask"].sum(dim=1))


def first_tokens(rewards, batch):
    """Per token: only the first two tokens of a completion count."""
    mask = batch.rows["completion_mask"].clone()
    mask[:, 2:] = 0
    return mask * batch.trainer.ranks.local(centred(rewards).flatten()).unsqueeze(1)


def scaled(rewards, factor=2.0):
    return factor * centred(rewards)


def odd_or_none(completion_ids, **columns):
    """A third of the completions has no reward."""
    return [None if sum(ids) % 3 == 0 else float(sum(ids) % 2) for ids in completion_ids]


class Scaled:
    """A callable object."""

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, rewards):
        return self.factor * centred(rewards)


class Module(torch.nn.Module):
    def forward(self, rewards, batch):
        return batch.gather(batch.trainer.ranks.local(centred(rewards).flatten()))


def array(rewards):
    return centred(rewards).flip(1).numpy()[:, ::-1]  # with negative strides, which torch does not read


def numbers(rewards):
    return centred(rewards).tolist()


# ----------------------------------------------------------------------------------------------------- what is trained


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_a_function_that_returns_grpos_advantages_is_grpo_bit_for_bit(tmp_path, loss_type):
    options = dict(reward_funcs=odd, num_iterations=2, loss_type=loss_type)
    expected, _ = trained(GRPOTrainer, GRPOConfig, tmp_path, **options)
    got, log = trained(*OURS, tmp_path, advantage=lambda rewards, batch: batch.grpo, **options)
    assert_same(got, expected)
    assert any(name.startswith("credit/advantage_size/") for name in log[0])


@pytest.mark.parametrize("given", [maxrl, "trl_explore.credit.maxrl.maxrl", "trl_explore.credit.maxrl:maxrl", [maxrl]])
def test_a_function_trains_as_the_field_that_computes_the_same(tmp_path, given):
    expected, _ = trained(*OURS, tmp_path, reward_funcs=odd, advantage="maxrl")
    got, log = trained(*OURS, tmp_path, reward_funcs=odd, advantage=given)
    assert_same(got, expected)
    assert log[0]["credit/advantage_size/trl_explore.credit.maxrl:maxrl"] > 0


CALLABLES = [centred, Scaled(1.0), functools.partial(scaled, factor=1.0), Module(), array, numbers]


@pytest.mark.parametrize("own", CALLABLES, ids=["function", "object", "partial", "module", "numpy", "list"])
def test_whatever_can_be_called_gets_the_total_rewards_and_may_return_any_array(tmp_path, own):
    trainer = make(tmp_path, advantage=own, reward_funcs=odd_or_none, per_device_train_batch_size=16)
    found, rewards = one_batch(trainer)["advantages"], trainer.scorer.totals().view(-1, 4)
    assert rewards.isnan().any()
    torch.testing.assert_close(found, centred(rewards).nan_to_num(0.0).flatten())


def grpos(rewards):
    return centred(rewards) / (rewards.std(dim=1, keepdim=True) + 1e-4)


@pytest.mark.parametrize("weights", [[0.7, 0.2, -3.0], None])
def test_a_list_is_a_weighted_sum_and_without_weights_a_sum(tmp_path, weights):
    trainer = make(tmp_path, advantage=["grpo", "maxrl", centred], advantage_weights=weights)
    found = one_batch(trainer)["advantages"]
    rewards = trainer.scorer.totals().view(-1, 4)
    first, second, third = weights or [1, 1, 1]
    expected = first * grpos(rewards) + second * maxrl(rewards) + third * centred(rewards)
    torch.testing.assert_close(found, expected.flatten())
    assert {name for name in trainer._metrics["train"] if name.startswith("credit/")} == {
        "credit/advantage_size/grpo",
        "credit/advantage_size/maxrl",
        "credit/advantage_size/test_advantage_functions:centred",
    }


def test_a_function_sees_the_batch(tmp_path):
    seen = []

    def look(rewards, batch):
        seen.append(batch)
        assert rewards.shape == (2, 4) and isinstance(batch, AdvantageBatch)
        return centred(rewards)

    trainer = make(tmp_path, advantage=look, reward_funcs=[odd, never], reward_weights=[2.0, 1.0])
    output = one_batch(trainer)
    (batch,) = seen
    assert batch.rewards_per_func.shape == (2, 4, 2) and batch.trainer is trainer
    assert torch.equal(2 * batch.rewards_per_func[..., 0], trainer.scorer.totals().view(2, 4))
    assert torch.equal(batch.success_rewards.flatten(), trainer.scorer.success())
    assert [row["prompt"] for row in batch.examples] == [row["prompt"] for row in trainer.main_examples]
    assert torch.equal(batch.rows["completion_ids"], output["completion_ids"])
    assert torch.equal(batch.gather(torch.arange(8)), torch.arange(8).view(2, 4))


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_one_advantage_per_token(tmp_path, loss_type):
    trainer = make(tmp_path, advantage=["grpo", first_tokens], loss_type=loss_type, count_bonus=0.1)
    output = one_batch(trainer)
    assert output["advantages"].shape == output["completion_ids"].shape
    rewards = trainer.scorer.totals().view(-1, 4)
    grpo = grpos(rewards).flatten()
    torch.testing.assert_close(output["advantages"][:, 0], grpo + centred(rewards).flatten())
    torch.testing.assert_close(output["advantages"][:, 3], grpo)
    options = dict(reward_funcs=odd, loss_type=loss_type, max_steps=1)
    expected, _ = trained(GRPOTrainer, GRPOConfig, tmp_path, **options)
    assert differ(trained(*OURS, tmp_path, advantage=first_tokens, **options)[0], expected)


def test_functions_neither_change_rewards_nor_see_each_others_changes(tmp_path):
    def halve(rewards, batch):
        rewards.zero_()
        batch.rewards_per_func.zero_()
        batch.success_rewards.zero_()
        return batch.grpo.mul_(0.5)

    expected = one_batch(make(tmp_path))["advantages"]
    for given in ([halve, "grpo"], ["grpo", halve]):
        trainer = make(tmp_path, advantage=given)
        torch.testing.assert_close(one_batch(trainer)["advantages"], 1.5 * expected)
        assert trainer.scorer.totals().any() and trainer.shaped_rewards.any()


def test_tokens_of_a_completion_without_a_reward_get_nothing(tmp_path):
    def own(rewards, batch):
        per_row = batch.trainer.ranks.local(rewards.flatten()) + 1  # NaN for some rows
        return per_row.unsqueeze(1) * batch.rows["completion_mask"]

    trainer = make(tmp_path, advantage=own, reward_funcs=odd_or_none, per_device_train_batch_size=16)
    output = one_batch(trainer)
    unscored = trainer.scorer.totals().isnan()
    assert unscored.any() and (output["advantages"][unscored] == 0).all()
    assert (output["advantages"][~unscored, 0] > 0).all()


def test_entries_of_the_same_name_have_metrics_of_their_own(tmp_path):
    trainer = make(tmp_path, advantage=[lambda rewards: rewards + 1, lambda rewards: 0 * rewards])
    one_batch(trainer)
    name = f"credit/advantage_size/{__name__}:{test_entries_of_the_same_name_have_metrics_of_their_own.__qualname__}"
    first, second = (trainer._metrics["train"][f"{name}.<locals>.<lambda>{end}"] for end in ("", " 2"))
    assert first[0] >= 1 and second == [0.0]


def test_a_callback_may_set_what_the_constructor_takes(tmp_path):
    trainer = make(tmp_path)
    trainer.args.advantage = ("grpo", "maxrl")
    found = one_batch(trainer)["advantages"]
    rewards = trainer.scorer.totals().view(-1, 4)
    torch.testing.assert_close(found, (normalised(rewards, scale="group") + maxrl(rewards)).flatten())


# -------------------------------------------------------------------------------------------------------- with methods

# TreeGRPO, TreeRL, AttnRL and Tree-GRPO for agents have credit of their own.
OWN_CREDIT = ("grpo", "tree_grpo", "tree_rl", "attn_rl", "agent_tree_grpo")
METHODS = [name for name in tiny_methods() if name not in OWN_CREDIT]


@pytest.mark.parametrize("own", [short_is_better, first_tokens], ids=lambda own: own.__name__)
@pytest.mark.parametrize("method", METHODS)
def test_methods_train_with_a_function(tmp_path, method, own):
    trainer_class, config_class, options = tiny_methods()[method]
    options = {"reward_funcs": odd, **options, "max_steps": 2}
    plain, _ = trained(trainer_class, config_class, tmp_path, **options)
    found, log = trained(trainer_class, config_class, tmp_path, advantage=own, **options)
    assert all(value.isfinite().all() for value in found.values())
    assert differ(found, plain)
    assert any(f"credit/advantage_size/test_advantage_functions:{own.__name__}" in entry for entry in log)


@pytest.mark.parametrize(
    ("own", "advantage"), [(lambda rewards: rewards + 7, 7), (short_is_better, 0), (first_tokens, 0)]
)
def test_explorers_without_credit_of_their_own_use_functions_of_rewards(tmp_path, own, advantage):
    options = dict(explorers=["resample"], explore_min_share=1.0, advantage=own, reward_funcs=never)
    trainer = make_trainer(AutoExploreTrainer, AutoExploreConfig, tmp_path, **options)
    one_batch(trainer)
    (found,) = trainer.branching.results
    # All rewards are equal, and GRPO's advantages stand for those of functions that read the batch.
    assert (found.scored.rows["advantages"] == advantage).all()


@pytest.mark.parametrize("sampling", ["filter", "refill"])
def test_dynamic_sampling_with_a_function_per_token(tmp_path, sampling):
    found, log = trained(*OURS, tmp_path, advantage=first_tokens, dynamic_sampling=sampling, reward_funcs=odd)
    assert all(value.isfinite().all() for value in found.values()) and "selection/kept_groups" in log[0]


# -------------------------------------------------------------------------------------------------- files and commands


def test_a_resumed_run_reports_another_function_and_not_the_same_one(tmp_path, caplog):
    options = dict(reward_funcs=odd, max_steps=2, save_strategy="steps", save_steps=1)
    make(tmp_path / "first", advantage=Scaled(1.0), **options).train()
    checkpoint = str(tmp_path / "first" / "checkpoint-1")
    make(tmp_path / "again", advantage=Scaled(1.0), **options).train(resume_from_checkpoint=checkpoint)
    assert "changed from" not in caplog.text
    make(tmp_path / "other", advantage=centred, **options).train(resume_from_checkpoint=checkpoint)
    assert "`advantage` changed from 'test_advantage_functions:Scaled' to" in caplog.text


def test_the_card_names_the_function(tmp_path):
    trainer = make(tmp_path, advantage=["grpo", centred], advantage_weights=[1.0, 2.0])
    trainer.create_model_card()
    assert "test_advantage_functions:centred" in (tmp_path / "README.md").read_text()


def test_a_run_with_a_lambda_is_saved_and_resumed(tmp_path):
    options = dict(advantage=lambda rewards: centred(rewards), reward_funcs=odd, max_steps=4, save_strategy="steps")
    whole = make(tmp_path / "whole", **options, save_steps=2)
    whole.train()
    arguments = torch.load(tmp_path / "whole" / "checkpoint-2" / "training_args.bin", weights_only=False)
    assert "<lambda>" in arguments.advantage and "<lambda>" in json.loads(whole.args.to_json_string())["advantage"]
    again = make(tmp_path / "again", **options, save_steps=2)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert_same(dict(again.model.state_dict()), dict(whole.model.state_dict()))
    assert callable(whole.args.advantage)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], "grpo"),
        (["--advantage", "maxrl"], "maxrl"),
        (["--advantage", "trl_explore.credit.maxrl.maxrl"], "trl_explore.credit.maxrl.maxrl"),
        (["--advantage", '["grpo", "maxrl"]', "--advantage_weights", "0.5", "2"], ["grpo", "maxrl"]),
    ],
)
def test_the_field_on_the_command_line(tmp_path, flags, expected):
    (args,) = TrlParser([ExplorationConfig]).parse_args_and_config(
        ["--output_dir", str(tmp_path), "--use_cpu", "true", "--bf16", "false", *flags]
    )
    assert args.advantage == expected
    assert args.advantage_weights == ([0.5, 2.0] if isinstance(expected, list) else None)


# -------------------------------------------------------------------------------------------------------------- errors


def needs_two(rewards, scale):
    return rewards


ERRORS = {
    "no function": (dict(advantage=3), "`advantage`: 3 is neither a function nor a name"),
    "misspelt": (dict(advantage="maxlr"), "unknown value 'maxlr'; did you mean 'maxrl'?"),
    "no module": (dict(advantage="nowhere.mine"), "'nowhere.mine': importing 'nowhere' failed"),
    "no such function": (dict(advantage="trl_explore.credit.maxrl.maxlr"), "did you mean 'maxrl'"),
    "arguments": (dict(advantage=needs_two), "needs_two cannot be called with `rewards`, nor with"),
    "in C": (dict(advantage=torch.sigmoid), "cannot be called with `rewards`"),
    "empty list": (dict(advantage=[]), "`advantage=[]` names no advantage"),
    "weights without a list": (dict(advantage_weights=[1.0]), "`advantage_weights=[1.0]` weighs the entries of a li"),
    "wrong entry": (dict(advantage=["grpo", 2]), "`advantage`: 2 is neither"),
    "number of weights": (dict(advantage=["grpo", "maxrl"], advantage_weights=[1.0]), "must be a list of 2 numbers"),
    "a weight": (dict(advantage=["grpo", "maxrl"], advantage_weights=[1.0, nan]), "nan is no finite number"),
    "json": (dict(advantage='["grpo", '), "is no list of names in JSON"),
    "pass@k": (dict(advantage=["grpo", "passk"], passk_k=4), "`passk_k` must be smaller than `num_generations`"),
    "several objectives": (
        dict(advantage=centred, multi_objective_aggregation="normalize_then_sum"),
        "`advantage='test_advantage_functions:centred'` is formed from a row's total reward",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_a_wrong_value_is_one_clear_error_at_construction(tmp_path, case):
    options, message = ERRORS[case]
    with pytest.raises(ValueError, match=re.escape(message)):
        ExplorationConfig(str(tmp_path), use_cpu=True, bf16=False, num_generations=4, **options)


def per_row(rewards):
    return rewards.flatten()


def divides_by_zero(rewards):
    return rewards / 0


def nan_tokens(rewards, batch):
    return torch.full(batch.rows["completion_ids"].shape, nan)


def sparse(rewards):
    return rewards.to_sparse()


def text(rewards):
    return "all of it"


RESULTS = {
    per_row: r"per_row returned the shape \(8,\). It must return the shape \(2, 4\), one advantage for each reward",
    divides_by_zero: r"divides_by_zero returned (inf|nan) for prompt 0 and completion \d. All advantages must",
    nan_tokens: r"nan_tokens returned nan for row 0 and token 0 of this process",
    text: r"text returned str 'all of it'; it must return a dense tensor of real numbers",
    sparse: r"(?s)sparse returned Tensor .* it must return a dense tensor of real numbers",
}


@pytest.mark.parametrize("own", RESULTS, ids=lambda own: own.__name__)
def test_a_wrong_result_is_one_clear_error(tmp_path, own):
    with pytest.raises(ValueError, match=RESULTS[own]):
        one_batch(make(tmp_path, advantage=own))


def test_infinite_tokens_that_are_not_trained_do_not_matter(tmp_path):
    def own(rewards, batch):
        mask = batch.rows["completion_mask"]
        return torch.where(mask > 0, 1.0, inf)

    output = one_batch(make(tmp_path, advantage=own))
    assert (output["advantages"] == output["completion_mask"]).all()
