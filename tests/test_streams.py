"""Streams: whatever TRL divides by in a micro-batch, a stream is the mean over its own rows or tokens."""

import pytest
import torch

from trl_explore.rows.advantages import combine_rewards, equal_rewards
from trl_explore.rows.streams import (
    LOSS_NORMALISERS,
    StreamTotals,
    check_loss_type,
    loss_mask,
    split_stream,
    stream_scale,
    trim_padding,
)


def make_rows(lengths, *, suffix_from=0, width=6):
    """Rows whose i-th completion has `lengths[i]` tokens, trained from `suffix_from` on."""
    count = len(lengths)
    positions = torch.arange(width).expand(count, width)
    mask = (positions < torch.tensor(lengths).unsqueeze(1)).long()
    return {
        "prompt_ids": torch.ones(count, 3, dtype=torch.long),
        "prompt_mask": torch.ones(count, 3, dtype=torch.long),
        "completion_ids": torch.arange(count).unsqueeze(1).expand(count, width).clone(),
        "completion_mask": mask,
        "tool_mask": (positions >= suffix_from).long(),
        "advantages": torch.arange(1.0, count + 1),
        "num_items_in_batch": torch.tensor(0),
    }


def trl_loss(loss_type, rows, per_token, *, max_length, window, num_items, processes, steps):
    """TRL's reduction of a per-token loss in one micro-batch, written out from its definition."""
    mask = loss_mask(rows).double()
    if loss_type in ("grpo", "sapo"):
        return ((per_token * mask).sum(1) / mask.sum(1).clamp(min=1)).mean() / window
    if loss_type == "bnpo":
        return (per_token * mask).sum() / mask.sum().clamp(min=1) / window
    if loss_type == "dr_grpo":
        return (per_token * mask).sum() / (len(mask) * max_length) / window
    if loss_type == "luspo":
        return (per_token * mask).sum(1).mean() / window
    return (per_token * mask).sum() / (max(num_items, 1) / processes * window / steps)


@pytest.mark.parametrize("loss_type", sorted(LOSS_NORMALISERS))
@pytest.mark.parametrize("steps,max_rows", [(1, 100), (2, 2), (3, 4)])
def test_a_stream_is_its_own_mean_however_it_is_cut_up(loss_type, steps, max_rows):
    lengths, max_length = [5, 2, 6, 3, 1, 4, 6], 6
    rows = make_rows(lengths, suffix_from=1)
    keep = torch.tensor([True, True, False, True, True, True, True])
    mask = loss_mask(rows).double() * keep.unsqueeze(1)
    totals = StreamTotals(num_rows=int(keep.sum()), num_tokens=int(mask.sum()))
    value = rows["completion_ids"].double() + 1  # a per-token loss that tells the rows apart

    if LOSS_NORMALISERS[loss_type] == "rows":
        per_row = (value * mask).sum(1)
        if loss_type in ("grpo", "sapo"):
            per_row = per_row / mask.sum(1).clamp(min=1)
        expected = per_row.sum() / totals.num_rows / (max_length if loss_type == "dr_grpo" else 1)
    else:
        expected = (value * mask).sum() / totals.num_tokens

    processes = 2  # the other process holds the same number of rows, all of them padding
    total = torch.zeros((), dtype=torch.float64)
    for parts in split_stream(rows, keep, num_rows=6, num_steps=steps, max_rows=max_rows):
        for part in parts:
            loss = trl_loss(
                loss_type,
                part,
                part["completion_ids"].double() + 1,
                max_length=max_length,
                window=steps,
                num_items=totals.num_tokens,
                processes=processes,
                steps=steps,
            )
            total += loss * stream_scale(loss_type, part, totals, num_slots=steps * processes)
    torch.testing.assert_close(total / processes, expected)  # processes average their gradients


def test_rows_are_dealt_out_evenly_and_missing_ones_are_masked_copies():
    rows = make_rows([3] * 5)
    steps = split_stream(rows, torch.ones(5, dtype=torch.bool), num_rows=7, num_steps=2, max_rows=3)
    assert [[len(part["advantages"]) for part in parts] for parts in steps] == [[3, 1], [3, 1]]
    trained = [int(loss_mask(part).any(1).sum()) for parts in steps for part in parts]
    assert sum(trained) == 5
    advantages = sorted(a for parts in steps for part in parts for a in part["advantages"].tolist())
    assert advantages == [1.0] * 4 + [2.0, 3.0, 4.0, 5.0]
    for parts in steps:
        for part in parts:
            assert part["completion_mask"].sum(1).min() >= 1  # an all-masked row would make attention NaN
    # A process without rows still gets its share of masked ones.
    [[part]] = split_stream(rows, torch.zeros(5, dtype=torch.bool), num_rows=3, num_steps=1, max_rows=8)
    assert len(part["advantages"]) == 3 and loss_mask(part).sum() == 0
    assert split_stream(rows, torch.zeros(5, dtype=torch.bool), num_rows=0, num_steps=2, max_rows=4) == [[], []]


def test_parts_keep_their_width_where_that_is_asked_for():
    rows = make_rows([2, 5])
    [parts] = split_stream(rows, torch.tensor([True, False]), num_rows=1, num_steps=1, max_rows=4, trim=False)
    assert parts[0]["completion_ids"].shape[1] == rows["completion_ids"].shape[1]


def test_rows_change_places_only_within_a_window():
    rows = make_rows([1, 1, 1, 1, 1, 1, 1, 1])
    rows["prompt_ids"] = torch.tensor([[place // 4] * 3 for place in range(8)])  # two prompts, four rows each
    options = dict(num_rows=8, num_steps=4, max_rows=4)
    keep = torch.ones(8, dtype=torch.bool)

    def steps(**more):
        found = split_stream(rows, keep, **options, **more)
        return [sorted(part["prompt_ids"][:, 0].tolist()) for [part] in found]

    assert steps() == steps(together=True, window=1) == [[0, 1]] * 4
    assert sorted(steps(together=True, window=2)) == [[0, 0], [0, 0], [1, 1], [1, 1]]
    assert sorted(steps(together=True)) == sorted(steps(together=True, window=4))


def test_siblings_stay_together_where_that_is_asked_for():
    rows = make_rows([3, 3, 3, 3, 3])
    rows["prompt_ids"][[2, 3]] = 2
    keep = torch.tensor([True, True, True, True, False])
    steps = split_stream(rows, keep, num_rows=4, num_steps=2, max_rows=4, together=True)
    assert [sorted(part["completion_ids"][:, 0].tolist()) for [part] in steps] == [[0, 1], [2, 3]]
    dealt = split_stream(rows, keep, num_rows=4, num_steps=2, max_rows=4)
    assert [part["completion_ids"][:, 0].tolist() for [part] in dealt] == [[0, 2], [1, 3]]


def test_trimming_removes_only_columns_without_tokens():
    rows = make_rows([2, 4], width=6)
    rows["prompt_mask"] = torch.tensor([[0, 0, 1], [0, 1, 1]])
    rows["ref_per_token_logps"] = torch.zeros(2, 6)
    trimmed = trim_padding(rows)
    assert trimmed["completion_ids"].shape == (2, 4) and trimmed["ref_per_token_logps"].shape == (2, 4)
    assert trimmed["prompt_ids"].shape == (2, 2)
    assert trimmed["prompt_mask"].tolist() == [[0, 1], [1, 1]]
    assert rows["completion_ids"].shape == (2, 6)  # the caller's rows are left alone


def test_an_unknown_loss_type_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="loss_type='ppo'.*dapo"):
        check_loss_type("ppo")


NAN = float("nan")


@pytest.mark.parametrize(
    "group, equal",
    [
        ([0.1] * 8, True),
        ([0.1] * 7 + [0.2], False),
        ([0.7, 0.7, NAN, 0.7, NAN, 0.7, 0.7, 0.7], True),  # what is not scored compares with nothing
        ([NAN] * 8, True),
        ([0.0] * 8, True),
        ([1e-5] * 7 + [2e-5], False),  # small is not equal
        ([1000.0] * 7 + [1000.01], False),
        ([float("-inf")] * 7 + [1.0], False),
    ],
)
def test_groups_of_equal_rewards_have_nothing_to_compare(group, equal):
    rewards = torch.tensor([[reward] for reward in [*group, *range(8)]])
    assert equal_rewards(rewards, torch.tensor([1.0]), group_size=8).tolist() == [equal] * 8 + [False] * 8


def test_totals_that_only_rounding_tells_apart_are_equal():
    weights = torch.tensor([0.15, 0.65, 0.2])
    rewards = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 1.0], [0.0, 1.0, 1.75], [0.0, 1.0, 1.75]])
    totals = combine_rewards(rewards, weights)
    assert totals.tolist() == [0.9999999403953552] * 2 + [1.0] * 2
    assert equal_rewards(rewards, weights, group_size=4).all()
    # Each function's rewards differ, and these are what is compared where they are normalised first.
    assert not equal_rewards(rewards, weights, group_size=4, per_function=True).any()


def test_a_penalty_that_cancels_a_reward_leaves_no_difference():
    rewards = torch.tensor([[0.3, 0.6, 0.9], [0.0, 0.0, 0.0]])
    weights = torch.tensor([1.0, 1.0, -1.0])
    assert combine_rewards(rewards, weights).tolist() != [0.0, 0.0]
    assert equal_rewards(rewards, weights, group_size=2).all()


def test_functions_are_compared_one_by_one_where_they_are_normalised_one_by_one():
    weights = torch.tensor([1.0, 0.0])
    rewards = torch.tensor([[0.7, 3.0], [0.7, 4.0], [NAN, 3.0], [0.7, 4.0]])
    assert equal_rewards(rewards, weights, group_size=4, per_function=True).all()  # the weight of the other is 0
    assert not equal_rewards(rewards, torch.tensor([1.0, 1e-3]), group_size=4, per_function=True).any()
