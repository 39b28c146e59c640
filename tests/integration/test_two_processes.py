"""Two real processes over gloo: groups that span ranks, unequal numbers of branches, state and files of each rank."""

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("two processes")]


@pytest.fixture(scope="module")
def results(two_processes):
    return two_processes[0]["two_process"]


def test_it_really_ran_on_two_processes(results):
    assert results["rank0"]["num_processes"] == results["rank1"]["num_processes"] == 2


@pytest.mark.parametrize("case", ["base", "weight zero", "no failures", "no novelty", "no branches"])
def test_reductions_hold_across_ranks(results, case):
    assert results["rank0"][case] == results["rank1"][case] == "same"


def test_scores_of_a_group_on_two_ranks_are_shuffled_alike(results):
    scores = results["rank0"]["shuffled novelty"]
    assert results["rank1"]["shuffled novelty"] == scores and len(set(scores)) > 4


@pytest.mark.parametrize("case", ["dapo", "grpo", "bnpo", "dr_grpo", "luspo", "accumulation", "beta", "lora"])
def test_a_stream_with_rows_on_one_rank_only_equals_the_sum_over_both(results, case):
    assert results["rank0"][f"uneven {case}"] == "same", results["rank0"][f"uneven {case}"]


def test_ranks_agree_on_parameters_and_estimator_after_training(results):
    for key in ("parameters", "estimator"):
        assert results["rank0"][key] == results["rank1"][key]


def test_a_rank_without_failures_takes_part(results):
    assert results["rank0"]["lonely"] == results["rank1"]["lonely"]
    assert max(results["rank0"]["lonely tried"]) > 0


def test_the_cap_holds_over_all_ranks(results):
    assert set(results["rank0"]["tried"]) <= {0.0, 1.0, 2.0, 3.0}
    assert max(results["rank0"]["tried"]) == 3.0
    assert any(a != b for a, b in zip(results["rank0"]["local"], results["rank1"]["local"], strict=True))


def test_padding_rows_never_reach_a_reward_function(results):
    tried = sum(results["rank0"]["local"]) + sum(results["rank1"]["local"])
    scored = results["rank0"]["scored extra rows"] + results["rank1"]["scored extra rows"]
    assert scored == 3 * tried


@pytest.mark.parametrize("case", ["filler rows", "known rows"])
def test_ranks_call_a_reward_model_equally_often(results, case):
    first, second = (results[rank]["reward models"][case] for rank in ("rank0", "rank1"))
    assert first["calls"] == second["calls"] == 2 * 2  # in each step for the main rows and for the echo
    assert set(first["rewards"]) <= {0.0, 1.0} and set(second["rewards"]) <= {5.0, 6.0}
    assert second["rewards"] and bool(first["rewards"]) == (case == "known rows")


def test_metrics_count_real_rows_only(results):
    assert results["rank0"]["metrics"] == results["rank1"]["metrics"] == "consistent"


def test_resume_is_exact_on_every_rank(results):
    assert results["rank0"]["resume"] == results["rank1"]["resume"] == "same"


def test_hard_states_of_all_ranks_are_in_one_file(results):
    assert results["rank0"]["hard states"] == results["rank0"]["unrecovered"] > 0


def test_every_rank_stops_where_none_has_a_reward_and_none_where_one_has(results):
    for found in results.values():
        assert found["no rank scores"].startswith("None of the completions of 9 prompt(s) in a row has a reward")
        assert found["one rank scores"] == "trained"
