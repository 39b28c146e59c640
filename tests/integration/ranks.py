"""Runs a script on two real processes over gloo; each rank leaves a JSON file."""

import json
import os
import subprocess
import sys
from pathlib import Path

from world import saved_model


def results_of(script, folder, *arguments):
    """What the ranks wrote, by `rank0` and `rank1`."""
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    folders = [str(Path(__file__).parent.parent), str(Path(__file__).parent), os.environ.get("PYTHONPATH")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    environment["SMALL_WORLD_MODEL"] = saved_model()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += [str(script), str(folder), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("rank*.json")}
