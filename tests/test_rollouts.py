"""Rows, and numbers per request."""

import math

import pytest

from trl_explore.rows.rollouts import Rows, per_request


def make_rows(**changes):
    fields = dict(
        examples=[{"answer": "1"}] * 4,
        prompt_ids=[[5, 6]] * 4,
        completion_ids=[[7, 1], [7, 8, 1], [9], [9, 1]],
        loss_mask=[[0, 1], [0, 1, 1], [1], [1, 1]],
        group_size=2,
    )
    return Rows(**{**fields, **changes})


def test_padding_rows_train_nothing_and_count_as_unscorable():
    padded = make_rows().padded(8, example={"answer": "2"}, token_id=1, num_rewards=3)
    assert len(padded) == 8
    assert padded.loss_mask[4:] == [[0]] * 4 and padded.completion_ids[4:] == [[1]] * 4
    assert padded.known_rewards[:4] == [None] * 4
    assert all(len(r) == 3 and all(math.isnan(x) for x in r) for r in padded.known_rewards[4:])
    assert padded.examples[4] == {"answer": "2"} and padded.examples[4] is not padded.examples[5]


def test_rows_that_disagree_in_number_are_refused():
    with pytest.raises(ValueError, match="prompt_ids"):
        make_rows(prompt_ids=[[5]])
    with pytest.raises(ValueError, match="whole groups of 3"):
        make_rows(group_size=3)


def test_a_number_per_call_or_per_request():
    assert per_request(4, 2, name="n") == [4, 4]
    assert per_request([1, 2], 2, name="n") == [1, 2]
    with pytest.raises(ValueError, match="`n` has 1 entries for 2"):
        per_request([1], 2, name="n")
    with pytest.raises(ValueError, match="at least 1"):
        per_request([1, 0], 2, name="n")
