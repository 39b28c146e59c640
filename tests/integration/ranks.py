"""
What is done on two real processes, one thing after the other: starting interpreters takes longer than most of it.
Started by torchrun for the fixture `two_processes`; each rank leaves a JSON file.
"""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import auto_runs
import branpo_runs
import chosen_prompt_runs
import credit_runs
import every_method_runs
import group_two_process_runs
import kept_prefix_runs
import measuring_runs
import packed_runs
import torch
import two_process_runs
from quick import quicken
from trl import GRPOTrainer

from trl_explore.sampling.sampler import Sampler

RUNS = {
    "two_process": two_process_runs.main,
    "group_two_process": group_two_process_runs.main,
    "branpo": branpo_runs.main,
    "measuring": measuring_runs.main,
    "every_method": every_method_runs.main,
    "packed": packed_runs.main,
    "credit": credit_runs.main,
    "kept prefixes": kept_prefix_runs.main,
    "chosen prompts": chosen_prompt_runs.main,
    "auto": auto_runs.main,
    "sharded": every_method_runs.sharded,  # from here on every trainer is
    "packed sharded": packed_runs.sharded,
    "kept prefixes sharded": kept_prefix_runs.sharded,
}


def main(folder):
    torch.set_num_threads(1)
    quicken()
    own, results = (GRPOTrainer._generate_single_turn, Sampler.rollout), {}
    for name, run in RUNS.items():
        GRPOTrainer._generate_single_turn, Sampler.rollout = own
        (folder / name).mkdir(exist_ok=True)
        results[name] = run(str(folder / name))
    (folder / f"rank{torch.distributed.get_rank()}.json").write_text(json.dumps(results))
    # Tearing down dozens of DDP models in one interpreter can hang in the backend; nothing of it is under test.
    torch.distributed.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
