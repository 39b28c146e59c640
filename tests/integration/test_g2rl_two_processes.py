"""G2RL on two real processes over gloo, with groups that span ranks: the same as on one."""

from pathlib import Path

import pytest
import torch
from g2rl_runs import SPANNING, fixed
from ranks import results_of

SCRIPT = Path(__file__).with_name("g2rl_runs.py")
CASES = {"own pass": {}, "with old log-probabilities": dict(num_iterations=2, max_steps=4)}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return results_of(SCRIPT, tmp_path_factory.mktemp("ranks"))


def test_without_novelty_it_is_grpo_across_ranks(results):
    assert results["rank0"]["without novelty"] is results["rank1"]["without novelty"] is True


@pytest.fixture(scope="module")
def sharded_results(tmp_path_factory):
    return results_of(SCRIPT.with_name("fsdp_runs.py"), tmp_path_factory.mktemp("sharded"))


def check_same_as_one_process(results, folder, case):
    assert results["rank0"][case] == results["rank1"][case]
    expected, logged = fixed(folder, **{**SPANNING, **CASES[case], "per_device_train_batch_size": 12})
    for name, values in expected.items():
        torch.testing.assert_close(torch.tensor(results["rank0"][case][name]), torch.tensor(values), atol=1e-5, rtol=0)
    for ours, theirs in zip(results["rank0"][f"{case} logged"], logged, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_two_processes_end_where_one_does_on_the_same_rows(results, tmp_path, case):
    check_same_as_one_process(results, tmp_path, case)


@pytest.mark.parametrize("case", CASES)
def test_sharded_parameters_give_the_same_features(sharded_results, tmp_path, case):
    # FSDP2: the head is whole only inside the model's forward pass, where the features are taken.
    check_same_as_one_process(sharded_results, tmp_path, case)
