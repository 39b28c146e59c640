"""`explore_prompts` on two real processes over gloo that have unequally many prompts to explore."""

import pytest
from test_explore_prompts import ALL

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("two processes")]
CASES = [f"{case} {into}" for case in ALL for into in ("replace", "add")]


@pytest.mark.parametrize("case", CASES)
def test_a_process_may_have_nothing_to_explore(two_processes, case):
    first, second = (rank[case] for rank in two_processes[0]["chosen prompts"].values())
    assert first["parameters"] == second["parameters"]
    assert first["shares"] == second["shares"] == [0.5] * 3


@pytest.mark.parametrize("case", CASES)
def test_resume_is_exact_on_every_rank(two_processes, case):
    for rank in two_processes[0]["chosen prompts"].values():
        assert rank[case]["resumed"] == rank[case]["parameters"]
