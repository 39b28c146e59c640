"""Kept prefixes on two real processes over gloo, whole and with sharded parameters: the same search as without."""

import pytest
import torch

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("two processes")]


@pytest.mark.parametrize("bound", ["kept", "bounded"])
def test_a_search_on_two_processes_is_the_one_without_kept_prefixes(two_processes, bound):
    for rank in two_processes[0]["kept prefixes"].values():
        assert rank[bound]["parameters"] == rank["plain"]["parameters"]
        for found, expected in zip(rank[bound]["metrics"], rank["plain"]["metrics"], strict=True):
            assert found == pytest.approx(expected, abs=1e-5)
        assert rank["kept"]["encoded"] < 0.75 * rank["plain"]["encoded"]


def test_the_bound_is_exceeded_on_one_process_before_the_other(two_processes):
    first, second = two_processes[0]["kept prefixes"].values()
    assert [first[name]["kept"] for name in ("kept", "plain")] == [True, False]
    assert {first["bounded"]["kept"], second["bounded"]["kept"]} == {True, False}


def test_a_bound_is_said_once_on_each_process(two_processes):
    for rank in two_processes[0]["kept prefixes"].values():
        assert [len(rank[name]["warnings"]) for name in ("kept", "bounded", "plain")] == [0, 1, 0]


def test_with_sharded_parameters_nothing_is_kept_and_nothing_said(two_processes):
    whole = two_processes[0]["kept prefixes"]["rank0"]["plain"]["parameters"]
    for rank in two_processes[0]["kept prefixes sharded"].values():
        assert not rank["kept"]["kept"] and rank["kept"]["warnings"] == []
        assert rank["kept"]["parameters"] == rank["plain"]["parameters"]
        for name, values in whole.items():
            torch.testing.assert_close(
                torch.tensor(rank["kept"]["parameters"][name]), torch.tensor(values), atol=1e-5, rtol=0
            )
