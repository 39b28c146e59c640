"""DEEP-GRPO on two ranks, one of which branches more often; started by torchrun, writes one JSON file per rank."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from test_served import make, watch

torch.set_num_threads(1)
folder, model, port = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])


def by_process(completions, **columns):
    """Rank 1 succeeds at every second prompt."""
    successes = float(torch.distributed.get_rank())
    return [successes if i % 2 else 0.0 for i in range(len(completions))]


trainer = make(
    "deep_grpo",
    SimpleNamespace(port=port, served=model),
    folder / "out",
    per_device_train_batch_size=6,
    num_branches=2,
)
trainer.reward_funcs = [by_process]
seen = watch(trainer)
complete, requests = trainer.vllm_generation.complete, []
trainer.vllm_generation.complete = lambda asked: requests.append(len(asked)) or complete(asked)
trainer.train()
name = "sampling/sampling_logp_difference/mean"
rows = [row for row in trainer.state.log_history if name in row][1:]
result = {
    "processes": trainer.accelerator.num_processes,
    "requests": requests,
    "largest": seen["largest"],
    "differences": [value for row in rows for key, value in row.items() if key.endswith(name)] or [0.0],
}
(folder / f"rank{trainer.accelerator.process_index}.json").write_text(json.dumps(result))
trainer.accelerator.end_training()
