"""BranPO on two real processes over gloo, with more branches on one than on the other: the same as on one."""

import pytest
import torch
from branpo_runs import play
from trl import GRPOTrainer
from world import says

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("two processes")]


def test_two_processes_end_where_one_does_on_the_same_rows(two_processes, tmp_path, monkeypatch):
    first, second = two_processes[0]["branpo"]["rank0"], two_processes[0]["branpo"]["rank1"]
    assert (first["parameters"], first["logged"]) == (second["parameters"], second["logged"])
    says(GRPOTrainer._generate_single_turn, monkeypatch.setattr)  # what `play` puts there ends with the test
    expected, logged = play(tmp_path, 8)
    assert sum(log["branch/contrastive_fraction"] for log in logged) > 0
    for name, values in expected.items():
        torch.testing.assert_close(torch.tensor(first["parameters"][name]), torch.tensor(values), atol=1e-5, rtol=0)
    for ours, theirs in zip(first["logged"], logged, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)


@pytest.mark.parametrize("method", ["BranPO", "DeepGRPO"])
def test_rows_fill_up_a_process_also_if_the_data_have_no_prompt(two_processes, method):
    ranks = [rank["without prompts"][method] for rank in two_processes[0]["branpo"].values()]
    assert ranks[0]["parameters"] == ranks[1]["parameters"]
    assert sum(rank["padded"] for rank in ranks) > 0
