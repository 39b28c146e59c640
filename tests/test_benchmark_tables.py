"""Tables of the scripts in examples/benchmarks, made from logs in which some values are missing."""

import importlib
import json
import signal
import subprocess
import sys

import pytest
from commands import EXAMPLES


@pytest.fixture
def script(monkeypatch):
    """Import a script by its name."""
    monkeypatch.syspath_prepend(str(EXAMPLES / "benchmarks"))
    return importlib.import_module


def test_a_third_without_a_measurement_keeps_its_column(script, tmp_path, monkeypatch, capsys):
    contrast = script("contrast")
    plain, tree = f"{contrast.METRIC}plain", f"{contrast.METRIC}tree"
    history = [{plain: 0.001}, {plain: 0.002}, {tree: 0.003}]
    checkpoint = tmp_path / "own" / "runs" / "arm-seed80" / "checkpoint-3"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    assert contrast.rates(tmp_path / "own" / "runs") == {"plain": [1.0, 2.0, None], "tree": [None, None, 3.0]}
    (tmp_path / "own.yaml").write_text("arms: []")
    monkeypatch.setattr(contrast.subprocess, "run", lambda *args, **options: None)  # nothing is trained
    flags = ["--config", str(tmp_path / "own.yaml"), "--output_dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["contrast.py", *flags])
    contrast.main()
    rows = capsys.readouterr().out.splitlines()[2:]
    assert rows == ["| own | plain | 1.00 | 2.00 | - |", "| own | tree | - | - | 3.00 |"]


def test_medians_use_the_steps_that_have_the_metric(script):
    steps = [{"tree/nodes": 4.0, "loss": 1.0}, {"loss": 2.0}, {"tree/nodes": 6.0, "tree/trajectory_entropy": 0.5}]
    assert script("tree_search").tree_medians(steps) == {"tree/nodes": 5.0, "tree/trajectory_entropy": 0.5}


@pytest.mark.parametrize(
    ("code", "stderr", "reason"),
    [
        (1, "Traceback\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9 GiB\n", "out of memory"),
        (1, "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried 9 bytes\n", "out of memory"),
        (1, "Traceback\nAttributeError: module 'torch' has no attribute 'float12'\n", "AttributeError: module"),
        (-signal.SIGKILL, "", "killed, probably"),
        (3, "", "exit code 3"),
    ],
)
def test_only_a_lack_of_memory_is_called_out_of_memory(script, code, stderr, reason):
    done = subprocess.CompletedProcess([], code, stdout="", stderr=stderr)
    assert script("gradient_features").failure(done).startswith(reason)
