"""Two real processes over gloo."""

import os
import subprocess
import sys
from pathlib import Path

from world import saved_model


def on_two_processes(script, folder):
    """Run a script of this folder by torchrun; it gets the folder to work in as its argument."""
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    tests = Path(__file__).parent.parent
    # The tasks of the benchmarks are imported from the root.
    folders = [str(tests), str(tests / "integration"), str(tests.parent), os.environ.get("PYTHONPATH")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    environment["SMALL_WORLD_MODEL"] = saved_model()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += [str(script), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
