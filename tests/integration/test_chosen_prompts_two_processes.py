"""Prompts chosen on two real processes over gloo that have unequally many to explore, or to sample anew."""

import pytest
from chosen_prompt_runs import DRAWN, FIELDS, RUNS

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("two processes")]
CASES, DRAWN_CASES = ([f"{case} {into}" for case, into in runs] for runs in (RUNS, DRAWN))


@pytest.mark.parametrize("case", CASES)
def test_a_process_may_have_nothing_to_explore(two_processes, case):
    first, second = (rank[case] for rank in two_processes[0]["chosen prompts"].values())
    assert first["parameters"] == second["parameters"]
    assert first["shares"] == second["shares"] == [0.5] * 3


@pytest.mark.parametrize("case", DRAWN_CASES)
def test_processes_draw_the_same_prompts(two_processes, case):
    first, second = (rank[case] for rank in two_processes[0]["chosen prompts"].values())
    assert first["parameters"] == second["parameters"]
    assert first["shares"] == second["shares"] and first["shares"][0] == 1.0 > min(first["shares"])


@pytest.mark.parametrize("case", [*CASES, *DRAWN_CASES, *FIELDS])
def test_resume_is_exact_on_every_rank(two_processes, case):
    for rank in two_processes[0]["chosen prompts"].values():
        assert rank[case]["resumed"] == rank[case]["parameters"]


@pytest.mark.parametrize("name", FIELDS)
def test_processes_agree_on_prompts_and_parameters(two_processes, name):
    first, second = (rank[name] for rank in two_processes[0]["chosen prompts"].values())
    assert first["parameters"] == second["parameters"] and first["state"] == second["state"]
    assert first["logs"] == second["logs"]


def test_one_process_alone_needs_other_prompts(two_processes):
    logs = two_processes[0]["chosen prompts"]["rank0"]["refill"]["logs"]
    assert max(logs["selection/rounds"]) > 1 and min(logs["selection/missing_groups"]) == 0
