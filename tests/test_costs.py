"""Reading learning curves at equal cost."""

import pytest

from trl_explore.compare.costs import comparison_table, mean_with_interval, value_at
from trl_explore.compare.ends import summarize_ends

CURVE = [{"tokens": 0, "acc": 0.2}, {"tokens": 100, "acc": 0.4}, {"tokens": 300, "acc": 0.8}]


@pytest.mark.parametrize("reading, expected", [(0, 0.2), (50, 0.3), (100, 0.4), (200, 0.6), (300, 0.8), (301, None)])
def test_a_curve_is_read_between_its_points(reading, expected):
    got = value_at(CURVE, "tokens", reading, "acc")
    assert got == (None if expected is None else pytest.approx(expected))
    assert value_at([{"t": 5, "acc": 0.1}, {"t": 5, "acc": 0.9}], "t", 5, "acc") == pytest.approx(0.1)


def test_arms_are_compared_where_the_slowest_stopped_and_paired_by_seed():
    def run(arm, seed, end, cost):
        return {"arm": arm, "seed": seed, "points": [{"t": 0, "acc": 0.0}, {"t": cost, "acc": end}]}

    runs = [run("A", 0, 0.8, 200), run("B", 0, 0.5, 100), run("A", 1, 0.4, 200), run("B", 1, 0.3, 100)]
    table = comparison_table(runs, "t", {"accuracy": "acc"})
    assert table.splitlines()[0].startswith("at equal t: 100 ")
    # At 100, A has 0.4 and 0.2, B 0.5 and 0.3: B is ahead by 10 points on both seeds.
    assert "accuracy  30.0" in table.splitlines()[1] and "(40/20)" in table.splitlines()[1]
    assert "(50/30)" in table.splitlines()[2] and "[vs A  10.0]" in table.splitlines()[2]
    assert "an interval needs 3 seeds" in table and "±" not in table
    three = comparison_table([*runs, run("A", 2, 0.6, 200), run("B", 2, 0.4, 100)], "t", {"accuracy": "acc"})
    assert "[vs A  10.0 ±  0.0]" in three and "95 % interval over 3 seeds" in three
    assert mean_with_interval([0.4, 0.5, 0.6]) == " 50.0 ± 24.8"


def test_many_samples_at_the_start_are_found_in_any_order_of_the_arms():
    first = {"arm": "GRPO", "seed": 0, "points": [{"end_correct": [0, 4]}, {"end_correct": [4, 4]}]}
    second = {"arm": "auto", "seed": 0, "points": [{}, {"end_correct": [0, 0]}]}
    for arms in (["GRPO", "auto"], ["auto", "GRPO"]):
        before, *after = summarize_ends([first, second], arms, 4)
        assert before.pass_at[1][0] == pytest.approx(0.5) and [entry.arm for entry in after] == arms
        assert {entry.arm: entry.pass_at[1][0] for entry in after} == {"GRPO": pytest.approx(1.0), "auto": 0.0}


def test_seeds_without_many_samples_at_the_start_are_left_out():
    def run(arm, seed, start, end):
        first = {} if start is None else {"end_correct": start}
        return {"arm": arm, "seed": seed, "points": [first, {"end_correct": end}]}

    known = [run("GRPO", 0, [0, 4], [4, 4]), run("auto", 0, None, [0, 0])]
    unknown = [run("GRPO", 1, None, [0, 0]), run("auto", 1, None, [4, 4])]
    arms = ["GRPO", "auto"]
    assert summarize_ends([*known, *unknown], arms, 4) == summarize_ends(known, arms, 4)
    assert summarize_ends(unknown, arms, 4) == []
