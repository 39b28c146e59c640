"""Every method, and a sixth, on two real processes over gloo, also with sharded parameters: the same as on one."""

import pandas as pd
import pytest
import torch
from every_method_runs import CASES, SAMPLE, play
from test_sixth_method import SIXTH
from world import says

from trl_explore.methods import METHODS

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("two processes")]


@pytest.fixture(scope="module")
def folder(two_processes):
    return two_processes[1] / "every_method"


@pytest.fixture(scope="module")
def results(two_processes):
    return two_processes[0]["every_method"]


@pytest.fixture(autouse=True)
def sampling_of_trl_and_a_sixth_method(monkeypatch):
    monkeypatch.setitem(METHODS, SIXTH.name, SIXTH)
    says(SAMPLE, monkeypatch.setattr)


def assert_close(found, expected, tolerance):
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(torch.tensor(found[name]), torch.tensor(values), atol=tolerance, rtol=0)


@pytest.mark.parametrize("method", CASES)
def test_two_processes_end_and_log_as_one_does_on_the_same_rows(results, folder, tmp_path, method):
    assert results["rank0"][method] == results["rank1"][method]
    expected, metrics, rows = play(method, tmp_path, 1)
    assert rows == sum(rank[f"{method} rows"] for rank in results.values())
    assert_close(results["rank0"][method], expected, 1e-5)
    assert len(metrics) >= 2
    for found, of_one in zip(results["rank0"][f"{method} metrics"], metrics, strict=True):
        assert found == pytest.approx(of_one, abs=1e-4)
    tables = list((tmp_path / method / "completions").iterdir())
    assert tables
    for table in tables:
        found = pd.read_parquet(folder / method / "completions" / table.name)
        pd.testing.assert_frame_equal(found, pd.read_parquet(table), rtol=0, atol=1e-4)


@pytest.mark.parametrize("method", ["deep_grpo", "tree_grpo", "branpo"])
def test_the_processes_had_unequally_many_branches(results, method):
    assert results["rank0"][f"{method} rows"] != results["rank1"][f"{method} rows"]


@pytest.mark.parametrize("method", CASES)
def test_sharded_parameters_end_where_whole_ones_do(results, two_processes, method):
    assert_close(two_processes[0]["sharded"]["rank0"][method], results["rank0"][method], 1e-5)


@pytest.mark.parametrize("method", CASES)
def test_resume_is_exact_on_every_rank(results, method):
    for rank in results.values():
        assert rank[f"{method} resumed"] == rank[method]


@pytest.mark.parametrize("method", CASES)
def test_one_process_refuses_the_checkpoint_of_two(results, folder, tmp_path, method):
    with pytest.raises(ValueError, match="written by 2 process"):
        play(method, tmp_path, 1, resume_from_checkpoint=str(folder / method / "checkpoint-2"))
