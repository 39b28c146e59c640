"""G2RL on two processes with sharded parameters; started by torchrun for test_fsdp.py."""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}
os.environ |= {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_TRANSFORMER_CLS_TO_WRAP": "Qwen2DecoderLayer"}

import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from g2rl_runs import SPANNING, fixed

initialise = AcceleratorState.__init__


def sharded_on_cpu(self, *args, fsdp_plugin=None, **kwargs):
    """accelerate honours FSDP on accelerators only; on gloo it works just as well."""
    initialise(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    self.fsdp_plugin = fsdp_plugin or self.fsdp_plugin
    if self.fsdp_plugin is not None:
        self.distributed_type = DistributedType.FSDP


def main(folder):
    AcceleratorState.__init__ = sharded_on_cpu
    out = {}
    for name, options in (("own pass", {}), ("with old log-probabilities", dict(num_iterations=2, max_steps=4))):
        out[name], out[f"{name} logged"] = fixed(folder, **{**SPANNING, **options})
    rank = torch.distributed.get_rank()
    (Path(folder) / f"rank{rank}.json").write_text(json.dumps(out))
    torch.distributed.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
