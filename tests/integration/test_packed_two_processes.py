"""Shared prefixes on two real processes over gloo, whole and with sharded parameters: the same as row by row."""

import pytest
import torch
from packed_runs import CONFIGS

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("two processes")]


@pytest.mark.parametrize("run, name", [("packed", "on, budget"), *(("packed sharded", name) for name in CONFIGS)])
def test_packed_rows_end_where_plain_ones_do(two_processes, run, name):
    first, second = two_processes[0][run]["rank0"][name], two_processes[0][run]["rank1"][name]
    assert first["parameters"] == second["parameters"]
    plain = two_processes[0]["every_method"]["rank0"]["deep_grpo"]  # which one process reaches too
    for parameter, values in plain.items():
        torch.testing.assert_close(
            torch.tensor(first["parameters"][parameter]), torch.tensor(values), atol=1e-5, rtol=0
        )


def test_processes_pack_differently(two_processes):
    """Otherwise the test above says little: a process that makes fewer passes than the other leaves it waiting."""
    first, second = (two_processes[0]["packed sharded"][rank] for rank in ("rank0", "rank1"))
    assert min(first["on"]["token_ratio"] + second["on"]["token_ratio"]) > 1.2
    assert first["auto"]["packed"][0] == 0 and second["auto"]["packed"][0] == 1
    for name in ("on, budget", "auto, budget"):
        assert first[name]["sequences"] != second[name]["sequences"], name
        # Who shares little, and would fit into one sequence, packs where the other process needs two.
        assert set(first[name]["packed"] + second[name]["packed"]) == {1.0}
    assert second["auto, budget"]["sequences"][1] == 1 and second["auto, budget"]["token_ratio"][1] < 1.55


def test_reentrant_checkpointing_is_refused_where_gradients_are_reduced(two_processes):
    for rank in ("rank0", "rank1"):
        assert (
            "set `gradient_checkpointing_kwargs={'use_reentrant': False}`"
            in two_processes[0]["packed"][rank]["refused"]
        )
