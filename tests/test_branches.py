"""Where trajectories branch, which branches are kept, and what prefixes and suffixes are worth."""

import math
from collections import Counter
from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trl.trainer.utils import nanstd

from trl_explore.branches.choice import (
    branch_advantages,
    branch_count,
    credit,
    first_contrastive,
    first_shorter,
    fork_depths,
    group_accuracy,
    is_contrastive,
    is_success,
    recursion_depth,
    seeks_shorter,
)
from trl_explore.forks.trajectories import suffix_mask, turns
from trl_explore.rows.advantages import relative_rewards

NAN = math.nan
masks = st.lists(st.integers(0, 1), max_size=20)
# Sums and means of few of these are exact in float32, so equal rewards have a standard deviation of 0.
exact = st.sampled_from([-0.5, 0.0, 0.25, 0.75, 1.0])
prompts = st.lists(st.lists(exact | st.just(NAN), min_size=1, max_size=2), min_size=1, max_size=6)
options = dict(group=st.sampled_from(["prompt", "trajectory"]), scale=st.sampled_from(["group", "none"]))


def by_numpy(rewards, scale):
    """Rewards relative to their group in float64; 0 where there is none."""
    rewards = np.array(rewards, dtype=np.float64)
    scored = rewards[~np.isnan(rewards)]
    if not len(scored):
        return np.zeros(len(rewards))
    std = scored.std(ddof=1) if len(scored) > 1 else 0.0
    return np.nan_to_num((rewards - scored.mean()) / (std + 1e-4 if scale == "group" else 1.0))


def by_trl(rewards, scale):
    """GRPO's advantages as `GRPOTrainer` makes them, from rewards of shape `(P, G)`."""
    advantages = rewards - torch.nanmean(rewards, dim=1, keepdim=True)
    if scale == "group":
        advantages = advantages / (nanstd(rewards, dim=1, keepdim=True) + 1e-4)
    return torch.nan_to_num(advantages, nan=0.0)


# Turns


@given(masks)
def test_turns_cover_the_models_tokens_and_do_not_touch(mask):
    found = turns(mask)
    assert all(start < end for start, end in found)
    assert [token for start, end in found for token in range(start, end)] == [t for t, m in enumerate(mask) if m]
    assert all(before[1] < after[0] for before, after in zip(found, found[1:], strict=False))


# Schedule


@pytest.mark.parametrize("accuracy, expected", [(0.0, 2), (0.99, 2), (1.0, 1), (1.5, 1), (-0.5, 2)])
def test_solved_groups_sample_one_branch(accuracy, expected):
    assert branch_count(accuracy) == expected
    assert branch_count(accuracy, num_branches=7, num_branches_solved=5) == {2: 7, 1: 5}[expected]


@pytest.mark.parametrize(
    "accuracy, failure, success",
    [(-0.5, 3, 2), (0.0, 3, 2), (0.49, 3, 2), (0.5, 2, 2), (0.75, 2, 2), (0.99, 2, 2), (1.0, 2, 1)],
)
def test_depths_are_those_of_the_paper(accuracy, failure, success):
    for reward in [-0.5, 0.0, 0.79]:
        assert recursion_depth(reward, accuracy, threshold=0.8) == failure
    for reward in [0.8, 1.0]:
        assert recursion_depth(reward, accuracy, threshold=0.8) == success
    depths = dict(depth_hard=9, depth=6, depth_solved=4)
    names = {3: 9, 2: 6, 1: 4}
    assert recursion_depth(0.3, accuracy, threshold=0.5, **depths) == names[failure]
    assert recursion_depth(0.5, accuracy, threshold=0.5, **depths) == names[success]


@pytest.mark.parametrize(
    "num_turns, number, nearest, expected",
    [(5, 3, 1, [1, 2, 3]), (2, 3, 1, [1, 2]), (5, 1, 2, [2]), (5, 0, 1, []), (1, 1, 1, [1])],
)
def test_the_tail_is_left_from_the_end(num_turns, number, nearest, expected):
    assert fork_depths(num_turns, number, nearest=nearest) == expected
    drawn = fork_depths(num_turns, number, nearest=nearest, selection="random")
    assert len(set(drawn)) == len(expected) and all(nearest <= depth <= num_turns for depth in drawn)


def test_random_depths_are_different_ones_in_any_order_equally_often():
    generator = torch.Generator().manual_seed(0)
    random = dict(nearest=2, selection="random", generator=generator)
    counts = Counter(tuple(fork_depths(5, 2, **random)) for _ in range(6000))
    assert set(counts) == set(permutations(range(2, 6), 2))
    assert sum((count - 500) ** 2 / 500 for count in counts.values()) < 31.3  # chi-squared, one in a thousand


def test_what_could_not_be_scored_does_not_branch():
    assert recursion_depth(NAN, 0.0, threshold=0.8) == recursion_depth(NAN, 1.0, threshold=0.8) == 0
    assert recursion_depth(NAN, group_accuracy([NAN, NAN], definition="mean", threshold=0.8), threshold=0.8) == 0


def test_accuracies_by_both_definitions():
    rewards = [1.0, 0.8, 0.6, -0.5, NAN]
    assert group_accuracy(rewards, definition="mean", threshold=0.8) == pytest.approx(1.9 / 4)
    assert group_accuracy(rewards, definition="share", threshold=0.8) == 0.5
    assert group_accuracy([1.0] * 4, definition="mean", threshold=0.8) == 1.0
    for definition in ["mean", "share"]:
        assert math.isnan(group_accuracy([NAN, NAN], definition=definition, threshold=0.8))


# Branches that are kept


@pytest.mark.parametrize("threshold", [0.7, 0.8, 0.9, 1 / 3, 1.0])
def test_a_reward_of_the_threshold_is_a_success(threshold):
    in_float32 = torch.tensor(threshold).item()  # on either side of the threshold
    assert is_success(threshold, threshold=threshold) and is_success(in_float32, threshold=threshold)
    assert not is_success(threshold - 1e-4, threshold=threshold)
    assert not is_success(NAN, threshold=threshold) and not is_success(None, threshold=threshold)


@pytest.mark.parametrize(
    "reward, original, expected",
    [
        (0.8, 0.79, True),
        (0.79, 0.8, True),
        (1.0, 0.8, False),  # the rewards differ, the outcome does not
        (0.0, 0.79, False),
        (NAN, 1.0, False),
        (NAN, 0.0, False),
        (None, 1.0, False),
        (1.0, NAN, False),
    ],
)
def test_branches_are_contrastive_if_success_differs(reward, original, expected):
    assert is_contrastive(reward, original, threshold=0.8) is expected


def test_the_first_contrastive_continuation_is_kept():
    assert first_contrastive([0.2, None, NAN, 0.9, 1.0], 0.0, threshold=0.8) == 3
    assert first_contrastive([1.0, None, NAN, 0.79, 0.0], 1.0, threshold=0.8) == 3
    assert first_contrastive([None, NAN, 1.0], 0.8, threshold=0.8) is None
    assert first_contrastive([], 0.0, threshold=0.8) is None


# Redundant steps


def test_long_successes_of_easy_groups_seek_a_shorter_one():
    rewards, num_turns = [1.0, 0.8, 0.0, 1.0, NAN], [2, 3, 9, 4, 9]  # the successes take 3 turns on average

    def chosen(accuracy):
        return seeks_shorter(rewards, num_turns, accuracy=accuracy, threshold=0.8)

    assert chosen(0.7) == chosen(1.0) == [False, False, False, True, False]
    assert chosen(0.5) == chosen(0.2) == chosen(NAN) == [False] * 5


def test_rows_without_a_penultimate_response_or_a_longer_one_do_not_seek():
    assert seeks_shorter([1.0, 1.0], [2, 2], accuracy=1.0, threshold=0.8) == [False, False]
    assert seeks_shorter([1.0, 1.0], [0, 1], accuracy=1.0, threshold=0.8) == [False, False]
    assert seeks_shorter([1.0, 1.0], [1, 2], accuracy=1.0, threshold=0.8) == [False, True]
    # A mean reward above 0.5 without one success.
    assert seeks_shorter([0.7, 0.7], [1, 2], accuracy=0.7, threshold=0.8) == [False, False]


def test_the_first_shorter_success_is_kept():
    assert first_shorter([0.0, 1.0, None, NAN, 0.8, 1.0], [2, 3, 1, 1, 2, 1], 3, threshold=0.8) == 4
    assert first_shorter([1.0, 0.79, None], [3, 2, 2], 3, threshold=0.8) is None


# Advantages


@settings(deadline=None)
@given(prompts, options["group"], options["scale"])
def test_advantages_are_those_of_the_definition(rewards, group, scale):
    base, branch = branch_advantages(rewards, group=group, scale=scale)
    means = [np.mean(scored) if (scored := [r for r in row if r == r]) else NAN for row in rewards]
    assert base == pytest.approx(by_numpy(means, scale), abs=1e-5)
    everyone, first = by_numpy(sum(rewards, []), scale), 0
    for row, found, own in zip(rewards, branch, base, strict=True):
        expected = everyone[first : first + len(row)]
        if group == "trajectory":
            expected = by_numpy(row, scale) if len(row) > 1 else [own]
        assert found == pytest.approx(expected, abs=1e-5)
        first += len(row)


@settings(deadline=None)
@given(st.data(), st.integers(1, 40), options["group"], options["scale"])
def test_without_a_branch_advantages_are_those_of_grpo_bit_for_bit(data, group_size, group, scale):
    reward = st.floats(-10, 10, width=32) | st.just(NAN) | st.sampled_from([0.0, 1.0, torch.tensor(0.1).item()])
    row = st.lists(reward, min_size=group_size, max_size=group_size)
    rewards = data.draw(st.lists(row, min_size=1, max_size=3))
    expected = by_trl(torch.tensor(rewards), scale)
    for found, theirs in zip(rewards, expected.tolist(), strict=True):
        base, branch = branch_advantages([[r] for r in found], group=group, scale=scale)
        assert base == theirs and branch == [[advantage] for advantage in theirs]
        assert relative_rewards(found, scale=scale) == theirs


# Tokens


def test_tokens_get_the_credit_of_their_part():
    assert credit(0.5, -1.0, 2, num_tokens=5) == [0.5, 0.5, -1.0, -1.0, -1.0]
    assert credit(0.5, -1.0, 2, num_tokens=5, redundant=True) == [0.5, 0.5, 0.0, 0.0, 0.0]
    assert credit(0.5, -1.0, 0, num_tokens=2) == [-1.0, -1.0]  # from the prompt: no prefix
    assert credit(0.5, -1.0, 2, num_tokens=2) == [0.5, 0.5]


@given(masks)
def test_suffix_masks_take_the_loss_apart_turn_by_turn(mask):
    starts = [start for start, _ in turns(mask)] + [len(mask)]
    parts = [np.array(suffix_mask(mask, start)) for start in starts]
    assert parts[0].tolist() == mask and not parts[-1].any()
    for (start, end), part, rest in zip(turns(mask), parts, parts[1:], strict=False):
        assert (part - rest).tolist() == [int(start <= token < end) for token in range(len(mask))]


@pytest.mark.parametrize("group, others", [("trajectory", [[1.0], [1.0]]), ("prompt", [[1.0], [0.0], [1.0], [0.0]])])
@pytest.mark.parametrize("original", [0.0, 1.0])
def test_suffixes_are_pushed_apart_and_the_prefix_is_trained_once(group, others, original):
    """Eq. 13: the gradient is a positive multiple of `grad log pi(C+ | B) - grad log pi(C- | B)`."""
    torch.manual_seed(0)
    prefix, suffix = torch.randn(4, requires_grad=True), torch.randn(2, 4, requires_grad=True)
    loss_mask, rows = [1, 0, 1, 1], torch.tensor([[1, 0, 2, 3], [1, 0, 3, 0]])  # a tool's token between B and C
    start = turns(loss_mask)[-1][0]

    def log_probs(row):
        logits = torch.stack([prefix, torch.full_like(prefix, 7.0), *suffix])
        return logits.log_softmax(-1).gather(-1, row[:, None]).squeeze(-1)

    def gradients(objective):
        return torch.autograd.grad(objective, [prefix, suffix])

    base, branch = branch_advantages([[original, 1 - original], *others], group=group)
    advantages = torch.tensor([credit(base[0], own, start, num_tokens=4) for own in branch[0]])
    mask = torch.tensor([loss_mask, suffix_mask(loss_mask, start)])
    found = gradients((advantages * mask * torch.stack([log_probs(row) for row in rows])).sum())

    good, bad = (rows[0], rows[1]) if original else (rows[1], rows[0])
    direction = gradients((log_probs(good) - log_probs(bad))[start:].sum())[1]
    factor = abs(branch[0][0])
    assert factor > 0.1 and direction.abs().max() > 0.1
    torch.testing.assert_close(found[1], factor * direction)
    torch.testing.assert_close(found[0], base[0] * gradients(log_probs(rows[0])[0] + 0 * suffix.sum())[0])
    assert group == "prompt" or abs(base[0]) > 0.1
