"""The choice between explorers on two real processes over gloo: the same choices, sums over processes, resume."""

import pytest
from auto_runs import AGENTS, CASES

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("two processes")]


@pytest.fixture(scope="module")
def ranks(two_processes):
    found = two_processes[0]["auto"]
    return found["rank0"], found["rank1"]


@pytest.mark.parametrize("case", [*CASES, *AGENTS])
def test_processes_choose_the_same_and_end_with_the_same_parameters(ranks, case):
    first, second = (rank[case] for rank in ranks)
    assert first["choices"] == second["choices"] and any(first["choices"])
    assert first["estimates"] == second["estimates"]
    assert first["parameters"] == second["parameters"]
    assert first["logs"] == second["logs"] and first["stored"] == second["stored"]


@pytest.mark.parametrize("case", [*CASES, *AGENTS])
def test_estimates_are_sums_over_processes(ranks, case):
    """The discount is 1, so that the sums are of the whole run."""
    first, second = (rank[case] for rank in ranks)
    sums = first["estimates"]["sums"]
    streams = {*first["own"], *second["own"]}
    assert streams
    for stream in streams:
        tokens = first["own"].get(stream, 0) + second["own"].get(stream, 0)
        assert sums[stream.removeprefix("explored_")][1] == tokens


@pytest.mark.parametrize("case", [*CASES, *AGENTS])
def test_resume_is_exact_on_every_rank(ranks, case):
    for rank in ranks:
        whole, again = rank[case], rank[f"{case} resumed"]
        assert again["parameters"] == whole["parameters"]
        assert again["estimates"] == whole["estimates"] and again["stored"] == whole["stored"]
        assert again["choices"] == whole["choices"][-len(again["choices"]) :] and len(again["choices"]) > 0
        assert again["logs"] == whole["logs"]


def test_a_process_may_have_nothing_to_explore(ranks):
    for case in [*(case for case in CASES if case.startswith("one process")), "hints of one process"]:
        first, second = (rank[case] for rank in ranks)
        assert sum(first["own"].values()) == 0 < sum(second["own"].values())
    learned = ranks[0]["one process learns"]["estimates"]["sums"]
    assert learned["pivots"][0] > 0
    assert ranks[0]["hints of one process"]["estimates"]["sums"]["hints"][0] > 0


def test_successes_of_all_processes_are_replayed(ranks):
    for case in ("replay", "hints and replay"):
        assert ranks[0][case]["stored"]
    assert any(log.get("explore/share/replay") for log in ranks[0]["replay"]["logs"])


@pytest.mark.parametrize("run", ["no explorers", "nothing explored"])
def test_without_exploration_it_is_grpo_bit_for_bit(ranks, run):
    for rank in ranks:
        assert rank[run] == rank["grpo"]
