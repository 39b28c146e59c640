"""Methods that sample groups themselves, on two real processes: unequal trees, whole groups, shared solutions."""

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("two processes")]


@pytest.fixture(scope="module")
def results(two_processes):
    return two_processes[0]["group_two_process"]


def test_depth_one_is_grpo_across_ranks(results):
    assert results["rank0"]["depth one"] == results["rank1"]["depth one"] == "same"


def test_ranks_with_unequal_trees_end_with_the_same_parameters(results):
    assert max(results["rank0"]["iterations"]) <= 4 < max(results["rank1"]["iterations"])
    assert results["rank0"]["unequal"] == results["rank1"]["unequal"]
    assert results["rank0"]["logged"] == results["rank1"]["logged"]


@pytest.mark.parametrize("case", ["beta", "lora", "accumulation", "iterations", "two_stage", "sequential", "agent"])
def test_ranks_agree_with(results, case):
    assert results["rank0"][f"fingerprint {case}"] == results["rank1"][f"fingerprint {case}"]


def test_every_rank_scores_its_own_completions_once(results):
    for rank in results.values():
        scored, terminal = rank["scored"]
        assert scored == terminal > 0


def test_every_rank_writes_its_own_trees(results):
    assert results["rank0"]["dumped"] == [10, 10]


def test_solutions_are_shared(results):
    assert results["rank0"]["solutions"] == results["rank1"]["solutions"] != []
    assert results["rank0"]["solutions held"] <= results["rank0"]["solutions in file"]


def test_resume_is_exact_on_every_rank(results):
    for rank in results.values():
        assert rank["resume"] == "same" and rank["resumed solutions"] is True


def test_hidden_sketches_are_grpo_across_ranks(results):
    for rank in results.values():
        assert rank["hidden sketches"] == "same" and rank["hidden sketches drafted"] > 0


def test_ranks_with_unequal_turns_and_failures_end_with_the_same_parameters(results):
    assert results["rank0"]["agent calls"] > results["rank1"]["agent calls"]
    assert (
        results["rank0"]["agent errors"] == results["rank1"]["agent errors"]
        and max(results["rank0"]["agent errors"]) > 0
    )


def test_agents_without_branches_are_grpo_across_ranks(results):
    for rank in results.values():
        assert rank["no branches"] == "same"


def test_sketches_are_followed_where_one_rank_has_no_path_cache(results):
    first, second = (results[rank]["uneven caches"] for rank in ("rank0", "rank1"))
    assert first["has cache"] == [False] * 3 and second["has cache"] == [True] * 3
    assert first["fingerprint"] == second["fingerprint"]


@pytest.mark.parametrize("method", ["tree", "sesa"])
def test_groups_that_would_span_ranks_are_refused(results, method):
    for rank in results.values():
        assert "`per_device_train_batch_size=6` times `steps_per_generation=1`" in rank[f"split groups {method}"]
