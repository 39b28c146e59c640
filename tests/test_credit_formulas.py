"""What rewards are worth: each formula against numbers worked out by hand, and against all groups there are."""

import itertools
from math import comb, inf, nan, prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from world import always, contains_answer, make_trainer, never, one_batch, some_letter

from trl_explore.credit.bonus import centred, novelty, repetition
from trl_explore.credit.covariance import covariances, num_largest, share_of
from trl_explore.credit.maxrl import maxrl
from trl_explore.credit.normalised import normalised
from trl_explore.credit.reinforce import reinforce
from trl_explore.credit.subsets import outcomes, pass_at_k_advantages, pkpo, solve_rate
from trl_explore.credit.unlikeliness import discounted
from trl_explore.rewards.checks import RewardError
from trl_explore.trainers import ExplorationConfig, ExplorationTrainer


def close(found, expected, tolerance=1e-4):
    expected = torch.tensor(expected, dtype=found.dtype)
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("reward", [contains_answer, some_letter, always, never], ids=lambda f: f.__name__)
def test_what_is_normalised_here_is_what_trl_makes_of_the_same_rewards(tmp_path, scale, reward):
    options = dict(scale_rewards=scale, reward_funcs=[reward, contains_answer], reward_weights=[1.0, 0.3])
    trainer = make_trainer(ExplorationTrainer, ExplorationConfig, tmp_path, **options)
    output = one_batch(trainer)
    found = normalised(trainer.scorer.totals().view(-1, 4), scale=scale)
    assert torch.equal(found.flatten(), output["advantages"])


def test_rows_without_a_reward_count_nowhere():
    close(normalised(torch.tensor([[1.0, nan, 0.0, nan]]), scale="none"), [[0.5, 0.0, -0.5, 0.0]])
    close(normalised(torch.tensor([[1.0, nan, nan], [nan, nan, nan]]), scale="group"), [[0.0] * 3] * 2)


@pytest.mark.parametrize(
    "rewards, expected",
    [
        ([1.0, 0, 0, 0], [3.0, -1, -1, -1]),
        ([1.0, 1, 1, 0], [1 / 3, 1 / 3, 1 / 3, -1]),
        ([0.0, 0, 0, 0], [0.0, 0, 0, 0]),
        ([1.0, nan, 0, nan], [1.0, 0, -1, 0]),
        ([nan, nan, nan, nan], [0.0, 0, 0, 0]),
        ([1.0, nan, nan, nan], [0.0, 0, 0, 0]),
    ],
)
def test_maxrl_divides_by_the_mean(rewards, expected):
    close(maxrl(torch.tensor([rewards])), [expected])
    assert maxrl(torch.full((1, 7), 0.1)).abs().max() == 0  # exactly, without spread


def test_reinforce_weighs_successes_and_has_no_baseline():
    rewards = torch.tensor([[1.0, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1], [1, nan, 0, nan]])
    expected = [[0.1, -1, -1, -1], [-1, -1, -1, -1], [0.1, 0.1, 0.1, 0.1], [0.1, 0, -1, 0]]
    close(reinforce(rewards, success_weight=0.1), expected)
    close(reinforce(rewards[:1], success_weight=1.0), [[1, -1, -1, -1]])


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
@pytest.mark.parametrize("n", [2, 4, 6])
def test_maxrl_follows_log_p_up_to_order_n_minus_one(n, p):
    """Its mean over all groups of n rows is the gradient of the first n - 1 terms of log p's series."""
    groups = torch.tensor([*itertools.product([0.0, 1.0], repeat=n)], dtype=torch.float64)
    weights = (groups * p + (1 - groups) * (1 - p)).prod(dim=1)
    scores = groups / p - (1 - groups) / (1 - p)
    found = (weights * (maxrl(groups) * scores).sum(dim=1)).sum().item() / n
    assert found == pytest.approx(sum((1 - p) ** (k - 1) for k in range(1, n)), rel=1e-5)


def test_a_negative_reward_is_refused_where_a_mean_would_turn_signs():
    with pytest.raises(RewardError, match=r"row 5 of the batch has -0.5: add a constant .* set `advantage='grpo'`"):
        maxrl(torch.tensor([[1.0, 0, 0, 0], [0.0, -0.5, 1, nan]]))


@pytest.mark.parametrize("leave_one_out", [False, True])
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_pkpo_has_the_gradient_of_the_best_of_k_for_any_rewards(leave_one_out, k):
    values, n = torch.tensor([-1.0, 0.25, 2.0], dtype=torch.float64), 4
    logits = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64, requires_grad=True)
    p = logits.softmax(0)
    best = sum(prod(p[i] for i in rows) * values[list(rows)].max() for rows in itertools.product(range(3), repeat=k))
    (expected,) = torch.autograd.grad(best, logits, retain_graph=True)
    rows = torch.tensor([*itertools.product(range(3), repeat=n)])
    credit = pkpo(values[rows], k=k, leave_one_out=leave_one_out)
    surrogate = (p[rows].prod(dim=1).detach() * (credit * p.log()[rows]).sum(dim=1)).sum()
    (found,) = torch.autograd.grad(surrogate, logits)
    torch.testing.assert_close(found, expected)


def test_pkpo_of_two_right_rows_of_eight():
    successes = torch.tensor([[1.0, 0, 0, 1, 0, 0, 0, 0]])
    found = pkpo(successes, k=4)
    close(found[successes == 1], [0.5] * 2)
    close(found[successes == 0], [0.357143] * 6)
    assert found.sum() == pytest.approx(3.142857, abs=1e-5)
    assert solve_rate(8, 2, 4) == pytest.approx(0.785714, abs=1e-6)
    # Without the others' success.
    close(pkpo(successes, k=4, leave_one_out=True), [[4 / 8 * comb(6, 3) / comb(7, 3) * s for s in successes[0]]])
    for equal in (torch.zeros(1, 8), torch.ones(1, 8)):
        assert pkpo(equal, k=4, leave_one_out=True).abs().max() == 0


REWARDS = st.lists(st.sampled_from([-1.0, 0.0, 0.1, 0.5, 2.0, nan]), min_size=2, max_size=7)


@settings(max_examples=60, deadline=None)
@given(REWARDS, st.integers(1, 7), st.booleans())
def test_rows_without_a_reward_are_in_no_subset(rewards, k, leave_one_out):
    known = [reward for reward in rewards if reward == reward]
    found = pkpo(torch.tensor([rewards]), k=k, leave_one_out=leave_one_out)[0]
    assert all(found[i] == 0 for i, reward in enumerate(rewards) if reward != reward)
    alone = pkpo(torch.tensor([known]), k=k, leave_one_out=leave_one_out)[0] if len(known) > 1 else [0.0] * len(known)
    assert [value for value, r in zip(found, rewards, strict=True) if r == r] == [*alone]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([-1.0, 0.0, 1.0, 2.5]), min_size=2, max_size=6), st.data())
def test_pkpo_is_the_mean_over_all_subsets(rewards, data):
    n = len(rewards)
    k = data.draw(st.integers(2, n))
    subsets = [*itertools.combinations(range(n), k)]
    plain = [sum(max(rewards[j] for j in s) for s in subsets if i in s) / len(subsets) for i in range(n)]
    others = [
        sum(max(rewards[j] for j in s) - max(rewards[j] for j in s if j != i) for s in subsets if i in s)
        / len(subsets)
        for i in range(n)
    ]
    group = torch.tensor([rewards], dtype=torch.float64)
    close(pkpo(group, k=k), [plain], 1e-9)
    close(pkpo(group, k=k, leave_one_out=True), [others], 1e-9)


def test_pass_at_k_of_two_right_rows_of_eight():
    found = pass_at_k_advantages(torch.tensor([[1.0, 0, 0, 1, 0, 0, 0, 0]]), k=4)
    close(found, [[0.5222, -0.1741, -0.1741, 0.5222] + [-0.1741] * 4])


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("right", [1, 2, 4])
def test_pass_at_k_training_is_centred_pkpo_with_another_weight_between_prompts(k, right):
    successes = torch.tensor([[1.0] * right + [0.0] * (8 - right)], dtype=torch.float64)
    plain, rate = pkpo(successes, k=k), solve_rate(8, right, k)
    expected = (plain - plain.mean()) * 8 / k / ((rate * (1 - rate)) ** 0.5 + 1e-6)
    torch.testing.assert_close(pass_at_k_advantages(successes, k=k), expected)


@pytest.mark.parametrize(("n", "right"), [(8, 0), (8, 5), (8, 6), (8, 8), (4, 0), (4, 1), (4, 4)])
def test_groups_with_fewer_than_k_wrong_rows_or_no_right_one_have_no_pass_at_k_advantage(n, right):
    assert pass_at_k_advantages(torch.tensor([[1.0] * right + [0.0] * (n - right)]), k=4).abs().max() == 0


def test_unknown_outcomes_are_in_no_subset():
    found = pass_at_k_advantages(torch.tensor([[1.0, nan, 0, 0, 0], [nan, nan, 1.0, nan, nan]]), k=2)
    alone = pass_at_k_advantages(torch.tensor([[1.0, 0, 0, 0]]), k=2)
    close(found, [[alone[0, 0], 0, *alone[0, 1:]], [0.0] * 5])


def test_successes_are_what_reaches_the_threshold():
    rewards = torch.tensor([[0.99999994, 0.5, 0.4, nan]])
    close(outcomes(rewards, threshold=1.0)[:, :3], [[1.0, 0, 0]])
    close(outcomes(rewards, threshold=0.5)[:, :3], [[1.0, 1, 0]])
    assert outcomes(rewards, threshold=0.5)[0, 3].isnan()


def test_without_a_threshold_rewards_must_be_zero_or_one():
    close(outcomes(torch.tensor([[0.99999994, 0.0]]), threshold=None), [[1.0, 0.0]])
    message = r"rewards must be 0 or 1 .*no `success_threshold`.*row 2 of the batch has 0.5: .*`advantage='pkpo'`"
    with pytest.raises(RewardError, match=message):
        outcomes(torch.tensor([[1.0, nan], [0.5, 0.0]]), threshold=None)


@pytest.mark.parametrize(
    ("rewards", "logprobs", "beta", "expected"),
    [
        ([1.0, 1, 0, 0], [-0.2, -1, -0.5, -2], 0.25, [0.8125, 0.9375, 0, 0]),
        ([1.0, 1, 1, 1], [-1.0, -3, -1, -1], 0.4, [0.8, 1.0, 0.8, 0.8]),  # ranks 2, 0, 2, 2
        ([-1.0, 0, 2, -0.5], [-1.0, -2, -3, -4], 0.5, [-1.0, 0, 1.75, -0.5]),
    ],
    ids=["likelier rows", "equally likely rows", "rewards that are not positive"],
)
def test_likelier_rows_lose_more_of_their_positive_reward(rewards, logprobs, beta, expected):
    close(discounted(torch.tensor([rewards]), torch.tensor([logprobs]), beta=beta), [expected])


def test_discounted_rewards_are_divided_by_their_deviation_alone():
    """TRL adds 1e-4 to it."""
    worth = torch.tensor([[0.8125, 0.9375, 0, 0]])
    close(normalised(worth, scale="group"), [[0.7385, 0.9847, -0.8616, -0.8616]], 2e-4)


def test_rows_without_reward_or_own_tokens_have_no_rank():
    rewards, logprobs = torch.tensor([[1.0, nan, 1, 1]]), torch.tensor([[-1.0, -9, nan, -2]])
    found = discounted(rewards, logprobs, beta=0.5)
    close(found[:, [0, 2, 3]], [[0.75, 1.0, 1.0]])
    assert found[0, 1].isnan()


def test_answers_that_others_give_cost_their_share():
    assert repetition(["7", "7", "7", "3"]) == [-0.5, -0.5, -0.5, 0.0]
    assert repetition(["7", None, "7", None]) == [-0.5, None, -0.5, None]


def test_answers_are_worth_less_the_more_often_they_were_seen():
    values = novelty(["7", "3", "5", None], {"7": 4, "3": 1})
    assert values == [0.5, 1.0, 1.0, None]
    assert centred(values) == pytest.approx([-1 / 3, 1 / 6, 1 / 6, 0.0])


def test_a_group_without_answers_has_no_bonus():
    assert centred(novelty([None, None], {})) == [0.0, 0.0] and repetition([None, None]) == [None, None]


def test_the_covariance_of_four_tokens():
    advantages, logprobs = torch.tensor([3.0, -1, -1, -1]), torch.tensor([-0.1, -0.1, -3, -0.8])
    close(covariances(advantages, logprobs, mean_advantage=0.0, mean_logprob=-1.0), [2.7, -0.9, 2, -0.2])


def test_a_share_is_at_least_one_token():
    assert (share_of(2e-4, 100), share_of(0.5, 5), share_of(1.0, 7)) == (1, 2, 7)


@settings(deadline=None)
@given(
    st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0, -inf]), max_size=5), min_size=1, max_size=3), st.integers(1, 9)
)
def test_processes_agree_on_the_largest_values_of_all(values, number):
    values = [sorted(own, reverse=True) for own in values]
    kept = [num_largest(values, number, process=i) for i in range(len(values))]
    assert sum(kept) == min(number, sum(map(len, values)))
    chosen = [value for own, n in zip(values, kept, strict=True) for value in own[:n]]
    left = [value for own, n in zip(values, kept, strict=True) for value in own[n:]]
    assert not chosen or not left or min(chosen) >= max(left)
