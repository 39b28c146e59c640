"""BranPO on two real processes over gloo, with more branches on one than on the other: the same as on one."""

from pathlib import Path

import pytest
import torch
from branpo_runs import play
from ranks import results_of
from trl import GRPOTrainer

pytestmark = pytest.mark.slow


def test_two_processes_end_where_one_does_on_the_same_rows(tmp_path_factory, monkeypatch):
    results = results_of(Path(__file__).with_name("branpo_runs.py"), tmp_path_factory.mktemp("ranks"))
    first, second = results["rank0"], results["rank1"]
    assert first == second
    monkeypatch.setattr(GRPOTrainer, "_generate_single_turn", GRPOTrainer._generate_single_turn)
    expected, logged = play(tmp_path_factory.mktemp("one"), 8)
    assert sum(log["branch/contrastive_fraction"] for log in logged) > 0
    for name, values in expected.items():
        torch.testing.assert_close(torch.tensor(first["parameters"][name]), torch.tensor(values), atol=1e-5, rtol=0)
    for ours, theirs in zip(first["logged"], logged, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)
