"""Shared prefixes on two real processes over gloo with sharded parameters: the same as row by row on one."""

from pathlib import Path

import pytest
import torch
from every_method_runs import SAMPLE, play
from ranks import results_of
from trl import GRPOTrainer

pytestmark = pytest.mark.slow


def test_packed_rows_on_two_processes_end_where_plain_ones_do(tmp_path, monkeypatch):
    results = results_of(Path(__file__).with_name("packed_runs.py"), tmp_path)
    first, second = results["rank0"], results["rank1"]
    assert first["parameters"] == second["parameters"] and min(first["ratios"] + second["ratios"]) > 1.2
    monkeypatch.setattr(GRPOTrainer, "_generate_single_turn", SAMPLE)
    expected, _, _ = play("deep_grpo", tmp_path, 1)
    for name, values in expected.items():
        torch.testing.assert_close(torch.tensor(first["parameters"][name]), torch.tensor(values), atol=1e-5, rtol=0)
