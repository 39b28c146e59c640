"""Pass@k and the filter of hard prompts share their prompts between processes."""

import pytest
from test_hard_prompts import hard_prompts

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("two processes")]


def test_pass_at_k_shares_the_prompts_and_ranks_agree_on_it(two_processes):
    first, second = (found["watched"] for found in two_processes[0]["measuring"].values())
    assert first["history"] == second["history"] and len(first["history"]) == 1
    assert set(first["seen"] + second["seen"]) == set(first["prompts"])
    assert len(first["seen"]) == len(second["seen"]) == 2 * (4 + 1)


def test_the_filter_measures_half_on_each_and_the_same_as_one(two_processes):
    first, second = (two_processes[0]["measuring"][rank]["filtered"] for rank in ("rank0", "rank1"))
    assert [first["seen"], second["seen"]] == [32 + 32 + 16, 32 + 32 + 32]  # of five batches the first comes twice
    assert first["hard"] == second["hard"] == hard_prompts(threshold=1.0).to_list()


@pytest.mark.parametrize("case", ["searcher", "grpo"])
def test_sampled_tokens_are_those_of_both_processes(two_processes, case):
    first, second = (two_processes[0]["measuring"][rank][case] for rank in ("rank0", "rank1"))
    total = first["own"] + second["own"]
    assert first["counted"] == [first["own"], total] and second["counted"] == [second["own"], total]
    if case == "searcher":
        assert first["logged"][-1] == total and second["own"] > first["own"]
