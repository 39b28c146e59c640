"""DEEP-GRPO with vLLM in the same process, with weight updates and then without; writes a JSON file."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from test_served import make


def keep_weights() -> None:
    """
    Have vLLM multiply by weights as they are. On CPUs with AVX-512 it packs them and throws the originals away, and
    TRL, which writes into the originals of a colocated engine, finds nothing to write into.
    """
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils

    vars(_custom_ops)["_supports_onednn"] = False
    vars(utils)["check_cpu_sgl_kernel"] = lambda *_: False


if __name__ == "__main__":  # vLLM may start processes
    torch.set_num_threads(1)
    keep_weights()
    folder, model = Path(sys.argv[1]), sys.argv[2]
    options = dict(vllm_mode="colocate", vllm_gpu_memory_utilization=0.05, vllm_max_model_length=256)
    name, found = "sampling/sampling_logp_difference/mean", {}
    trainer = make("deep_grpo", SimpleNamespace(port=1, served=model), folder, learning_rate=1e-2, **options)
    sync = trainer.vllm_generation.sync_weights
    for what in ("updated", "stale"):
        if what == "stale":
            trainer.vllm_generation.sync_weights = lambda: None
        trainer.train()
        rows = [row for row in trainer.state.log_history if name in row]
        found[what] = [value for row in rows[1:] for key, value in row.items() if key.endswith(name)]
    (folder / "found.json").write_text(json.dumps(found))
