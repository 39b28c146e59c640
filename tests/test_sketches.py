"""Prompts with sketches, lists of candidates, and how diverse a group is."""

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_explore.sketches.drafts import (
    fill_prompt,
    fill_template,
    mean_similarity,
    newest_that_fit,
    other_prompts,
    split_candidates,
    split_thoughts,
)


def test_slots_are_filled_once():
    slots = {"problem": "{sketch} {x}", "sketch": "{problem}"}
    assert fill_template("a {problem} b {sketch} {other} {}", slots) == "a {sketch} {x} b {problem} {other} {}"
    assert fill_template("{num_candidates}", {}) == "{num_candidates}"


def test_prompts_of_both_kinds_are_wrapped():
    assert fill_prompt("1+1", "{problem}? {sketch}", {"sketch": "add"}) == "1+1? add"
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "1+1"}]
    wrapped = fill_prompt(chat, "{problem}?", {})
    assert wrapped == [{"role": "system", "content": "s"}, {"role": "user", "content": "1+1?"}]
    assert chat[-1]["content"] == "1+1"
    with pytest.raises(ValueError, match="end with a text message"):
        fill_prompt([{"role": "user", "content": [{"type": "text", "text": "1"}]}], "{problem}", {})


@given(st.lists(st.integers(0, 9)), st.integers(0, 30))
def test_the_newest_that_fit_are_kept(lengths, budget):
    kept = newest_that_fit([str(n) for n in lengths], lambda some: sum(map(int, some)) <= budget)
    assert kept == [str(n) for n in lengths[len(lengths) - len(kept) :]]
    assert sum(map(int, kept)) <= budget
    longer = lengths[len(lengths) - len(kept) - 1 :]
    assert len(kept) == len(lengths) or sum(longer) > budget


@pytest.mark.parametrize(
    "text, separator, expected",
    [
        (" 1. a\n2)  b \n\n- c\n(4) d", "\n", ["a", "b", "c", "d"]),
        ("x,y,,z", ",", ["x", "y", "z"]),
        ("a\na\n", "\n", ["a", "a"]),
        ("3 apples\n-5\n1.5\n", "\n", ["3 apples", "-5", "1.5"]),  # numbers and signs of the answer stay
        ("", "\n", []),
    ],
)
def test_lists_are_taken_apart(text, separator, expected):
    found = split_candidates(text, separator=separator)
    assert [candidate for _, candidate in found] == expected
    assert [text[start : start + len(candidate)] for start, candidate in found] == expected


@pytest.mark.parametrize(
    "text, opened, thought, said",
    [
        ("a\nb", False, "", "a\nb"),
        ("<think>\nhm\n</think>\n\na\nb", False, "<think>\nhm\n</think>\n\n", "a\nb"),
        ("hm\n</think>\n\na\nb", True, "hm\n</think>\n\n", "a\nb"),  # the prompt has the start
        ("hm\n</think>\n\na\nb", False, "hm\n</think>\n\n", "a\nb"),
        ("<think>\nhm\nhm", False, "", ""),  # no end
        ("hm\nhm", True, "", ""),
        ("<think>hm</think>a\n<think>hm</think>b", False, "<think>hm</think>a\n<think>hm</think>", "a\nb"),
        ("<think>hm</think>a\n<think>hm", False, "<think>hm</think>", "a"),
        ("<think>1<think>2</think>3</think>a", False, "<think>1<think>2</think>3</think>", "a"),
        ("", True, "", ""),
    ],
)
def test_what_is_thought_is_not_said(text, opened, thought, said):
    found = split_thoughts(text, opened=opened)
    assert (found[0], found[1].strip()) == (thought, said)


def test_similarity():
    assert mean_similarity(["abc"]) == 0.0 and mean_similarity(["abc"] * 3) == 1.0
    assert mean_similarity(["aaaa", "bbbb"]) == 0.0
    assert mean_similarity(["ab", "ab", "cd"]) == pytest.approx(1 / 3)


@given(
    st.lists(st.integers(0, 3), max_size=9).flatmap(lambda p: st.tuples(st.just(p), st.permutations(range(len(p)))))
)
def test_every_prompt_is_given_another_one(drawn):
    prompts, order = drawn
    sources = other_prompts(prompts, order)
    if len(set(prompts)) < 2:
        assert sources == list(range(len(prompts)))
        return
    assert all(prompts[source] != own for source, own in zip(sources, prompts, strict=True))
    # More than half of the prompts equal: the few others are shown several times.
    if 2 * max(map(prompts.count, prompts)) <= len(prompts):
        assert sorted(sources) == list(range(len(prompts)))


def test_who_gets_whom_depends_on_the_order():
    assert {tuple(other_prompts("abc", order)) for order in permutations(range(3))} == {(1, 2, 0), (2, 0, 1)}
