"""Actions: when two are equal, which rows decide together, who takes which."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_explore.sketches.actions import action_of, decision_blocks, share_out


def call(name, arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"content": "I go.", "tool_calls": [call("move", {"direction": " left"})]}, "move(direction=left)"),
        ({"tool_calls": [call("put", {"y": 2, "x": [1, {"b": 0, "a": 1}]})]}, 'put(x=[1, {"a": 1, "b": 0}], y=2)'),
        ({"tool_calls": [call("a", {}), call("b", "text")]}, "a(); b(text)"),
        ({"content": " The answer is 3. ", "tool_calls": []}, "The answer is 3."),
        ({"content": None}, ""),
        ({}, ""),
    ],
)
def test_actions_as_text(message, expected):
    assert action_of(message) == expected


def test_thoughts_and_the_order_of_arguments_do_not_make_an_action():
    first = {"content": "left seems good", "tool_calls": [call("put", {"x": 1, "y": 2})]}
    second = {"content": "why not", "tool_calls": [call("put", {"y": 2, "x": 1})]}
    assert action_of(first) == action_of(second)


def test_blocks_are_rows_of_one_group_with_one_context():
    contexts = [[1], [1], [2], [1], [1], [1], [1]]
    groups = [0, 0, 0, 0, 1, 1, 1]
    assert decision_blocks(groups, contexts, [True] * 7) == [[0, 1, 3], [4, 5, 6]]
    assert decision_blocks(groups, contexts, [True, False, True, True, True, False, False]) == [[0, 3]]
    assert decision_blocks([], [], []) == []


@given(st.integers(1, 12).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.booleans(), min_size=1, max_size=n))))
def test_every_action_is_taken_and_rows_that_can_part_are_even(case):
    num_rows, goes_on = case
    shares = share_out(num_rows, goes_on)
    taken = Counter(shares)
    assert len(shares) == num_rows and set(taken) == set(range(len(goes_on)))
    if any(goes_on):
        assert all(taken[action] == 1 for action, on in enumerate(goes_on) if not on)
    open_ones = [taken[action] for action, on in enumerate(goes_on) if on or not any(goes_on)]
    assert max(open_ones) - min(open_ones) <= 1
