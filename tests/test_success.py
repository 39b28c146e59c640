"""Success is decided in one way: with a tolerance for float32's sums, and by the reward function that is named."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_branpo import kept_branches
from world import make_dataset, make_model, make_tokenizer, make_trainer, one_batch, text_of, tiny_methods

from trl_explore.branches.choice import branch_count, group_accuracy, recursion_depth, seeks_shorter
from trl_explore.evaluation.callbacks import PassAtKCallback
from trl_explore.evaluation.evaluate import evaluate
from trl_explore.evaluation.hard_prompts import filter_hard_prompts, read_pass_rates
from trl_explore.evaluation.samplers import Sampling
from trl_explore.gradients.novelty import mixed_enough
from trl_explore.pivots.choice import rows_to_branch_from
from trl_explore.rewards.success import check_success_reward, failed, is_success, succeeded
from trl_explore.rows.advantages import combine_rewards, success_rewards
from trl_explore.trainers import BranPOConfig, BranPOTrainer

NAN = math.nan
WEIGHTS = [0.15, 0.65, 0.2]


def perfect(number):
    def reward(completions, **columns):
        return [1.0] * len(completions)

    reward.__name__ = f"perfect_{number}"
    return reward


def accuracy(completions, **columns):
    return [0.0] * len(completions)


def form(completions, **columns):
    return [1.0] * len(completions)


def starts_odd(completion_ids, **columns):
    return [float(ids[0] % 2) for ids in completion_ids]


def unknown(completions, **columns):
    return [None] * len(completions)


PERFECT = dict(reward_funcs=[perfect(1), perfect(2), perfect(3)], reward_weights=WEIGHTS)
WRONG = dict(reward_funcs=[accuracy, form], success_reward="accuracy")
# Those whose rules ask what succeeded; others do so with `explore_prompts="unsolved"` alone.
ASKING = dict(
    deep_grpo=dict(num_branches=2),
    tree_grpo={},
    sesa=dict(num_sketches=2, max_trajectories=2),
    g2rl=dict(novelty_weight=0.0),
    branpo=dict(success_threshold=1.0),
)
METHODS = {name: row for name, row in tiny_methods(**ASKING).items() if name in ASKING}
methods = pytest.mark.parametrize("method", METHODS)


def batch(folder, method, **options):
    """One batch of a method: the trainer, its rows, and what it logged."""
    cls, config, own = METHODS[method]
    trainer = make_trainer(cls, config, folder, **{**own, **options})
    return trainer, one_batch(trainer), trainer._metrics["train"]


def success_fraction(folder, method, **options):
    """Share of the completions of one batch that the method takes for right, and what it logged."""
    trainer, output, metrics = batch(folder, method, **options)
    if method == "deep_grpo":
        return 1 - metrics["pivots/failure_fraction"][0], metrics
    if method == "tree_grpo":
        return metrics["tree/success_fraction"][0], metrics
    if method == "sesa":
        assert metrics["sketch/success"] == metrics["sketch/plain_success"]
        return metrics["sketch/success"][0], metrics
    if method == "g2rl":
        return (trainer.shaped_rewards.nansum(dim=1) > 0).float().mean().item(), metrics
    plans = trainer.branch_explorer._plans.values()
    # Eq. 16: solved groups are left one response back, once; failures are tried twice.
    return sum(plan.tries == 1 for plan in plans) / len(plans), metrics


def test_three_perfect_rewards_add_up_to_less_than_one_and_succeed():
    total = combine_rewards(torch.ones(1, 3), torch.tensor(WEIGHTS))
    assert total.item() < 1.0
    assert is_success(total.item(), threshold=1.0)
    assert succeeded(total, threshold=1.0).tolist() == [True] and failed(total, threshold=1.0).tolist() == [False]


@given(
    st.floats(-1e3, 1e3, width=32).filter(lambda x: x == 0 or abs(x) > 1e-3), st.sampled_from([1e-3, 1e-5, 3e-6, NAN])
)
def test_tensors_and_numbers_are_judged_alike_and_what_is_clearly_less_fails(threshold, short):
    reward = threshold - short * (abs(threshold) or 1.0)
    assert is_success(threshold, threshold=threshold) and not is_success(reward, threshold=threshold)
    rewards = torch.tensor([threshold, reward], dtype=torch.float64)
    assert succeeded(rewards, threshold=threshold).tolist() == [True, False]
    assert failed(rewards, threshold=threshold).tolist() == [False, not math.isnan(short)]


def test_anything_above_zero_can_be_what_succeeds():
    assert not is_success(0.0, threshold=1e-9) and is_success(1e-9, threshold=1e-9)
    cancelled = torch.tensor([0.5, -0.3, -0.2]).sum().item()
    assert cancelled < 0 and is_success(cancelled, threshold=0.0)


def test_what_is_not_known_is_neither_success_nor_failure():
    assert not is_success(None, threshold=0.5) and not is_success(NAN, threshold=0.5)
    assert not succeeded(torch.tensor([NAN]), threshold=-1.0).item()
    assert not failed(torch.tensor([NAN]), threshold=1.0).item()


def test_every_rule_takes_a_rounded_total_for_a_success():
    total = combine_rewards(torch.ones(4, 3), torch.tensor(WEIGHTS))
    assert not rows_to_branch_from(total, threshold=1.0, group_size=4, branch_from="failed_groups").any()
    assert mixed_enough(total, 4, min_correct=4, min_wrong=0, threshold=1.0).all()
    assert not mixed_enough(total, 4, min_correct=0, min_wrong=1, threshold=1.0).any()


def test_a_group_of_rounded_totals_is_solved_and_half_of_one_is_half():
    short = combine_rewards(torch.ones(1, 3), torch.tensor(WEIGHTS)).item()
    solved = group_accuracy([short] * 4, definition="mean", threshold=1.0)
    assert solved == 1.0 and branch_count(solved) == 1
    assert recursion_depth(short, solved, threshold=1.0) == 1
    half = group_accuracy([short, short, 0.0, 0.0], definition="mean", threshold=1.0)
    assert recursion_depth(0.0, half, threshold=1.0) == 2
    more = group_accuracy([1.0000001, 0.0], definition="mean", threshold=1.0)
    assert seeks_shorter([1.0, 0.0], [3, 2], accuracy=more, threshold=1.0) == [False, False]


def test_the_sum_decides_or_the_column_that_is_named():
    rewards = torch.tensor([[1.0, 1.0], [0.0, NAN], [NAN, 1.0], [NAN, NAN]])
    weights, names = torch.tensor([0.5, 2.0]), ["accuracy", "form"]
    total = success_rewards(rewards, weights, names, None)
    torch.testing.assert_close(total, torch.tensor([2.5, 0.0, 2.0, NAN]), equal_nan=True)
    named = success_rewards(rewards, weights, names, "accuracy")
    torch.testing.assert_close(named, torch.tensor([1.0, 0.0, NAN, NAN]), equal_nan=True)


def test_a_name_must_be_there_once():
    check_success_reward(None, [])
    check_success_reward("form", ["accuracy", "form"])
    message = "`success_reward='forms'` is none of the reward functions: .* accuracy, form,"
    with pytest.raises(ValueError, match=message):
        check_success_reward("forms", ["accuracy", "form"])
    message = "`success_reward='form'` names 2 reward functions: give them different names"
    with pytest.raises(ValueError, match=message):
        check_success_reward("form", ["form", "form"])


@methods
def test_rounded_sums_of_perfect_rewards_are_successes(tmp_path, method):
    assert success_fraction(tmp_path, method, **PERFECT)[0] == 1.0


@methods
def test_a_well_formed_wrong_answer_fails_where_accuracy_decides(tmp_path, method):
    assert success_fraction(tmp_path, method, reward_funcs=[accuracy, form])[0] == 1.0
    share, metrics = success_fraction(tmp_path, method, **WRONG, reward_weights=[1.0, 0.25])
    assert share == 0.0
    assert metrics["reward"] == [0.25] and metrics["rewards/form/mean"] == [1.0]  # the sum is what is trained


def test_branches_recover_by_the_reward_that_decides(tmp_path):
    _, _, metrics = batch(tmp_path, "deep_grpo", **WRONG)
    assert metrics["pivots/tried"] == [8] and metrics["pivots/recovered_fraction"] == [0]
    _, _, metrics = batch(tmp_path, "deep_grpo", **PERFECT, branch_from="all")
    assert metrics["pivots/tried"] == [8] and metrics["pivots/recovered_fraction"] == [1.0]


@pytest.mark.parametrize("branch_from", ["failures", "failed_groups", "all"])
def test_completions_that_the_deciding_function_does_not_score_are_not_branched(tmp_path, branch_from):
    options = dict(reward_funcs=[unknown, form], success_reward="unknown", branch_from=branch_from)
    _, _, metrics = batch(tmp_path, "deep_grpo", **options)
    assert metrics["pivots/tried"] == [0] and metrics["pivots/failure_fraction"] == [0]


def test_a_tree_has_the_outcome_of_the_reward_that_decides(tmp_path):
    trainer, _, _ = batch(tmp_path, "tree_grpo", reward_funcs=[unknown, form], success_reward="unknown")
    assert {tree.nodes[row].outcome for tree in trainer.explorer.trees for row in tree.rows} == {None}


def test_g2rl_maps_the_reward_that_decides_and_keeps_sums_where_it_maps_nothing(tmp_path):
    trainer, _, _ = batch(tmp_path, "g2rl", reward_funcs=[starts_odd, form], success_reward="starts_odd")
    odd = trainer.scorer.rewards_per_func[:, 0]
    assert 0 < odd.mean() < 1
    torch.testing.assert_close(trainer.shaped_rewards.sum(dim=1), 2 * odd - 1)
    options = dict(reward_mapping="none", novelty_weight=1.0, min_correct=5)  # no group is shaped
    trainer, _, _ = batch(tmp_path, "g2rl", reward_funcs=[starts_odd, form], success_reward="starts_odd", **options)
    torch.testing.assert_close(trainer.shaped_rewards.sum(dim=1), trainer.scorer.rewards_per_func.sum(dim=1))


def test_branpo_contrasts_by_the_reward_that_decides_and_credits_the_sum(tmp_path, monkeypatch):
    """Sums are 1 or more throughout: by them no branch would contrast."""
    options = dict(reward_funcs=[starts_odd, form], reward_weights=[0.5, 1.0], max_completion_length=16)
    trainer = make_trainer(BranPOTrainer, BranPOConfig, tmp_path, **options)
    assert not kept_branches(trainer, monkeypatch)[2]
    trainer = make_trainer(BranPOTrainer, BranPOConfig, tmp_path, **options, success_reward="starts_odd")
    _, _, kept = kept_branches(trainer, monkeypatch)
    assert kept
    for row, branch in kept.items():
        assert branch.rewards[0] != trainer.scorer.rewards_per_func[row, 0]
    assert {trainer.branch_explorer.total_reward(branch) for branch in kept.values()} <= {1.0, 1.5}


def has_one(completions, **columns):
    return [float("1" in text_of(completion)) for completion in completions]


def test_the_callback_asks_the_function_that_decides_and_logs_the_sum(tmp_path):
    trainer = make_trainer(output_dir=tmp_path, reward_funcs=[accuracy, form], reward_weights=[1.0, 0.25])
    rows = make_dataset().select(range(4))
    callback = PassAtKCallback(trainer, rows, num_samples=2, k=(1,), success_reward="accuracy")
    assert callback.evaluate() == {"eval/pass_at_1": 0.0, "eval/greedy_accuracy": 0.0, "eval/reward": 0.25}
    callback = PassAtKCallback(trainer, rows, num_samples=2, k=(1,), success_reward="form")
    assert callback.evaluate() == {"eval/pass_at_1": 1.0, "eval/greedy_accuracy": 1.0, "eval/reward": 0.25}
    assert callback.successes == {"correct": [2] * 4, "greedy_correct": [1] * 4}
    with pytest.raises(ValueError, match="`success_reward='from'` is none of the reward functions"):
        PassAtKCallback(trainer, rows, success_reward="from")
    with pytest.raises(ValueError, match="success_threshold must be given, .* name the one .* as success_reward"):
        PassAtKCallback(trainer, rows)
    # Rounded sums are successes.
    trainer = make_trainer(output_dir=tmp_path, **PERFECT)
    callback = PassAtKCallback(trainer, rows, num_samples=2, k=(1,), success_threshold=1.0)
    assert callback.evaluate()["eval/pass_at_1"] == 1.0


@pytest.mark.parametrize("success_reward, expected", [(None, [1.0] * 4), ("accuracy", [0.0] * 4), ("form", [1.0] * 4)])
def test_hard_prompts_are_those_of_the_function_that_decides(tmp_path, success_reward, expected):
    scores = tmp_path / "scores.jsonl"
    filter_hard_prompts(
        make_model(),
        make_dataset().select(range(4)),
        reward_funcs=[accuracy, form],
        processing_class=make_tokenizer(),
        k=2,
        max_completion_length=4,
        success_reward=success_reward,
        scores_file=scores,
        progress=False,
    )
    header, rates = read_pass_rates(scores)
    assert list(rates.values()) == expected and header["success_reward"] == success_reward


@pytest.mark.parametrize("success_reward, expected", [(None, 1.0), ("accuracy", 0.0)])
def test_an_evaluation_grades_by_the_function_that_decides(success_reward, expected):
    result = evaluate(
        make_model(),
        make_dataset().select(range(4)),
        processing_class=make_tokenizer(),
        reward_funcs=[accuracy, form],
        sampling=Sampling(max_new_tokens=4),
        success_reward=success_reward,
        progress=False,
    )
    assert result["metrics"]["pass@1"]["value"] == expected
    assert result["settings"]["success_reward"] == success_reward
