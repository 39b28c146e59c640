"""Credit on two real processes over gloo: groups that span both, and one choice of tokens for both."""

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("two processes")]


@pytest.fixture(scope="module")
def results(two_processes):
    return two_processes[0]["credit"]


@pytest.mark.parametrize("tokens, share", {"clipped": 0.3, "marked": 0.2}.items())
def test_both_processes_together_take_the_share_of_all_tokens(results, tokens, share):
    number = {name: sum(rank[name] for rank in results.values()) for name in ("tokens", tokens)}
    assert number[tokens] == int(share * number["tokens"]) and all(rank[tokens] for rank in results.values())


@pytest.mark.parametrize("what", ["metrics", "counts", "rewards", "refused"])
def test_both_processes_find_the_same(results, what):
    assert results["rank0"][what] == results["rank1"][what]
    assert results["rank0"][what]


def test_a_metric_is_what_was_done(results):
    found = results["rank0"]
    total = sum(rank["tokens"] for rank in results.values())
    assert found["metrics"]["credit/kl_cov_fraction"] == [pytest.approx(int(0.2 * total) / total)]


def test_answers_of_both_processes_are_counted_once(results):
    found = results["rank0"]
    answered = found["metrics"]["credit/answered_fraction"][0] * len(found["rewards"])
    counted = sum(sum(answers.values()) for answers in found["counts"].values())
    assert counted == pytest.approx(answered) and counted > 0


def test_functions_of_both_processes_train_one_model(results):
    found = [results[rank]["functions"] for rank in ("rank0", "rank1")]
    assert found[0] == found[1] and found[0]["shape"] and found[0]["prompts"]
    assert len(found[0]["metrics"]) == 3


def test_both_processes_train_the_same_share_of_their_groups(results):
    found = [results[rank]["selection"] for rank in ("rank0", "rank1")]
    assert [one.pop("own") for one in found] == [0, 1]
    assert found[0] == found[1] and found[0]["rows"] == 4 and found[0]["items"]
    assert found[0]["log"]["selection/untrained_tokens"] > 0
