"""Every method on two ranks, one of which solves half of its prompts; started by torchrun, writes a file per rank."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from test_served import KINDS, NAME, make, watch

torch.set_num_threads(1)
folder, model, port = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
SPANNING = dict(per_device_train_batch_size=6)  # the second group of four has rows on both


def by_process(completions, **columns):
    """Rank 1 succeeds at every second prompt."""
    successes = float(torch.distributed.get_rank())
    return [successes if i % 2 else 0.0 for i in range(len(completions))]


found = {}
for kind in KINDS:
    own = SPANNING if kind in ("deep_grpo", "g2rl") else {}
    trainer = make(kind, SimpleNamespace(port=port, served=model), folder / kind, reward_funcs=by_process, **own)
    seen = watch(trainer)
    trainer.train()
    rows = [row for row in trainer.state.log_history if NAME in row][1:]
    found[kind] = {
        "samples": seen["samples"],
        "largest": seen["largest"],
        "differences": [value for row in rows for key, value in row.items() if key.endswith(NAME)],
        "parameters": [p.double().sum().item() for p in trainer.model.parameters()],
    }
found["processes"] = trainer.accelerator.num_processes
(folder / f"rank{trainer.accelerator.process_index}.json").write_text(json.dumps(found))
# The models' gloo threads outlive `end_training` and may abort a process that ends beside them; not under test.
torch.distributed.barrier()
os._exit(0)
