"""TreeRL: reductions to GRPO, golden values, which tokens are forked, what is trained, resume, and its errors."""

import pytest
from trl import GRPOConfig, GRPOTrainer
from world import assert_same, differ, trained

from trl_explore.trainers import TreeRLConfig, TreeRLTrainer


def test_without_rounds_it_is_grpo_bit_for_bit(tmp_path):
    expected, _ = trained(GRPOTrainer, GRPOConfig, tmp_path)
    got, log = trained(TreeRLTrainer, TreeRLConfig, tmp_path, num_rounds=0)
    assert_same(got, expected)
    assert not any(key.startswith("branch") for entry in log for key in entry)


@pytest.mark.parametrize("rounds", [1, 2])
def test_it_trains(tmp_path, rounds):
    expected, _ = trained(GRPOTrainer, GRPOConfig, tmp_path)
    got, log = trained(TreeRLTrainer, TreeRLConfig, tmp_path, num_rounds=rounds)
    assert differ(got, expected)
    print(log[0])
