"""DEEP-GRPO whose shared prefixes are computed once, on two processes with sharded parameters; started by torchrun for
test_packed_two_processes.py."""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from every_method_runs import play
from sharding import shard_on_cpu

from trl_explore.trainers.packing import PackedTrainer


def main(folder):
    shard_on_cpu()
    PackedTrainer.min_saved = 1  # the prompts of the small world are short
    values, metrics, _ = play("deep_grpo", folder, 2, config=dict(shared_prefix_training="on"))
    out = {"parameters": values, "ratios": [log["packing/token_ratio"] for log in metrics]}
    (Path(folder) / f"rank{torch.distributed.get_rank()}.json").write_text(json.dumps(out))
    torch.distributed.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
