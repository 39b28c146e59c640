"""FSDP2 on CPUs: accelerate honours it on accelerators only; on gloo it works just as well."""

import os

from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor
from world import parameters

SETTINGS = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "Qwen2DecoderLayer",
}


def shard_on_cpu():
    """Let every trainer that is made from now on shard its parameters."""
    os.environ |= SETTINGS
    initialise = AcceleratorState.__init__

    def sharded(self, *args, fsdp_plugin=None, **kwargs):
        initialise(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        self.fsdp_plugin = fsdp_plugin or self.fsdp_plugin
        if self.fsdp_plugin is not None:
            self.distributed_type = DistributedType.FSDP

    AcceleratorState.__init__ = sharded


def whole(trainer):
    """Values of all parameters by name, of sharded ones too."""
    tensors = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in parameters(trainer).items()}
    return {name: values.flatten().tolist() for name, values in tensors.items()}
