"""Shared prefixes on two real processes over gloo with sharded parameters: the same as row by row with whole ones."""

import pytest
import torch

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("two processes")]


def test_packed_rows_end_where_plain_ones_do(two_processes):
    first, second = two_processes[0]["packed"]["rank0"], two_processes[0]["packed"]["rank1"]
    assert first["parameters"] == second["parameters"] and min(first["ratios"] + second["ratios"]) > 1.2
    plain = two_processes[0]["every_method"]["rank0"]["deep_grpo"]  # which one process reaches too
    for name, values in plain.items():
        torch.testing.assert_close(torch.tensor(first["parameters"][name]), torch.tensor(values), atol=1e-5, rtol=0)
