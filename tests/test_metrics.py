"""pass@k, majority vote and coverage against brute force over all subsets."""

import itertools
import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_explore.evaluation.metrics import coverage_at_k, maj_at_k, pass_at_k, sample_metrics


def brute_force_pass(flags, k):
    subsets = list(itertools.combinations(flags, k))
    return sum(any(subset) for subset in subsets) / len(subsets)


def brute_force_majority(answers, correct, k):
    """Plays out every subset: the mean flag of each winner's voters, averaged over the tied winners."""
    total = 0.0
    subsets = list(itertools.combinations(range(len(answers)), k))
    for subset in subsets:
        votes = Counter(answers[i] for i in subset if answers[i] is not None)
        if votes:
            most = max(votes.values())
            winners = [answer for answer, count in votes.items() if count == most]
            for winner in winners:
                flags = [correct[i] for i in subset if answers[i] == winner]
                total += sum(flags) / len(flags) / len(winners)
    return total / len(subsets)


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_success(flags, data):
    k = data.draw(st.integers(1, len(flags)))
    assert pass_at_k(len(flags), sum(flags), k) == pytest.approx(brute_force_pass(flags, k))


def test_pass_at_k_is_accurate_where_binomials_overflow_floats():
    exact = 1 - math.comb(4999, 1000) / math.comb(5000, 1000)
    assert pass_at_k(5000, 1, 1000) == pytest.approx(exact, rel=1e-12)
    assert pass_at_k(5000, 1, 1000) == pytest.approx(0.2)


@pytest.mark.parametrize("arguments", [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0), (-1, 0, 1), (0, 0, 1)])
def test_pass_at_k_names_the_values_it_refuses(arguments):
    with pytest.raises(ValueError, match=r"=-?\d"):
        pass_at_k(*arguments)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["a", "b", "c", None]), st.booleans()), min_size=1, max_size=8),
    st.data(),
)
def test_majority_is_the_expectation_over_all_subsets_whatever_the_flags(samples, data):
    answers, correct = zip(*samples, strict=True)
    k = data.draw(st.integers(1, len(answers)))
    assert maj_at_k(answers, correct, k) == pytest.approx(brute_force_majority(answers, correct, k))


def test_majority_of_many_samples_is_exact_and_fast():
    # 1 of 2 answers with 60 : 40 samples; the vote of 31 is a hypergeometric tail.
    answers = ["a"] * 60 + ["b"] * 40
    tail = sum(math.comb(60, x) * math.comb(40, 31 - x) for x in range(16, 32)) / math.comb(100, 31)
    assert maj_at_k(answers, [answer == "a" for answer in answers], 31) == pytest.approx(tail)
    assert maj_at_k(range(64), [i == 0 for i in range(64)], 32) == pytest.approx(1 / 64)


def test_majority_refuses_unequal_lengths_and_k_out_of_range():
    with pytest.raises(ValueError, match="got 1 for 2"):
        maj_at_k(["a", "b"], [True], 1)
    with pytest.raises(ValueError, match="k=3 for 2 samples"):
        maj_at_k(["a", "b"], [True, False], 3)


@given(st.lists(st.integers(0, 5)), st.sets(st.integers(0, 5), min_size=1), st.integers(1, 12))
def test_coverage_is_the_share_of_targets_found(candidates, targets, k):
    found = sum(any(candidate == target for candidate in candidates[:k]) for target in targets)
    assert coverage_at_k(candidates, targets, k) == found / len(targets)


def test_coverage_counts_repeated_targets_once_and_refuses_none():
    assert coverage_at_k(["a", "x"], ["a", "a", "b"], 5) == 0.5
    with pytest.raises(ValueError, match="targets is empty"):
        coverage_at_k(["a"], [], 1)
    with pytest.raises(ValueError, match="k=0"):
        coverage_at_k(["a"], ["a"], 0)


def test_sample_metrics_average_over_prompts():
    metrics = sample_metrics(
        [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.5]],
        [["a", "b", "b", None], ["c", "c", "c", "d"]],
        [0.0, 1.0],
        threshold=1.0,
        k=(1, 2),
        maj_k=(4,),
    )
    assert metrics == {
        "pass_at_1": pytest.approx((0.25 + 0.75) / 2),
        "pass_at_2": pytest.approx((0.5 + 1.0) / 2),
        "maj_at_4": pytest.approx((0.0 + 1.0) / 2),
        "greedy_accuracy": 0.5,
        "reward": pytest.approx(4.5 / 8),
    }


def test_sample_metrics_leave_out_prompts_without_rewards_and_fail_single_missing_ones():
    metrics = sample_metrics([[None, None], [1.0, None]], [[], []], [1.0, None], threshold=1.0, k=(1,))
    assert metrics == {"pass_at_1": 0.5, "greedy_accuracy": 0.0, "reward": 1.0}
    with pytest.raises(ValueError, match="gold"):
        sample_metrics([[None, None]], [[]], threshold=1.0, k=(1,))
