"""The notebook of first steps, run cell by cell, with fewer steps and a hub of our own."""

import ast
import json
import os
import subprocess
import sys

import pytest
from commands import EXAMPLES, ROOT
from hub_standin import TOKEN, StandIn

NOTEBOOK = EXAMPLES / "first_steps.ipynb"
SMALLER = {
    "STEPS = 60": "STEPS = 2",
    "PUBLISH_AS = None": 'PUBLISH_AS = "me/first-steps"',
    "warm_start(task, seed=0)": "warm_start(task, seed=0, steps=20)",
    "evaluation_set(64)": "evaluation_set(4)",
    "per_device_train_batch_size=128": "per_device_train_batch_size=16",
}


def cells():
    notebook = json.loads(NOTEBOOK.read_text())
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_is_stored_with_its_results_and_a_picture_but_without_warnings():
    outputs = []
    for cell in cells():
        ast.parse("".join(cell["source"]))
        outputs += cell["outputs"]
    assert {output["name"] for output in outputs if output["output_type"] == "stream"} == {"stdout"}
    kinds = [kind for output in outputs for kind in output.get("data", {})]
    assert "image/png" in kinds and kinds.count("text/html") == 2
    printed = "".join("".join(output.get("text", "")) for output in outputs)
    assert "s per step, groups without contrast" in printed and "'loss'" not in printed


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(tmp_path):
    script = "\n".join("".join(cell["source"]) for cell in cells())
    for written, smaller in SMALLER.items():
        assert written in script
        script = script.replace(written, smaller)
    hub = StandIn()
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.url,
        "HF_TOKEN": TOKEN,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
        "OMP_NUM_THREADS": "1",
        "TRL_EXPLORE_CACHE": str(tmp_path / "cache"),
        "PYTHONPATH": str(ROOT),
        "MPLBACKEND": "agg",
    }
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "s per step, groups without contrast" in done.stdout
    assert (tmp_path / "first_steps" / "curves.png").stat().st_size > 0
    assert "<html" in (tmp_path / "first_steps" / "tree.html").read_text()
    assert {"model.safetensors", "README.md"} <= hub.files("me/first-steps").keys()
