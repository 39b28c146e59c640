"""The device check: the code that runs on a GPU runs here, in parts, and its table holds all of them."""

import importlib.util
import json
import sys

import pytest
import torch
from commands import EXAMPLES

spec = importlib.util.spec_from_file_location("gpu_check", EXAMPLES / "benchmarks" / "gpu_check.py")
gpu_check = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gpu_check)


def run(monkeypatch, folder, *flags):
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--device", "cpu", "--output", str(folder), *flags])
    gpu_check.main()


@pytest.mark.slow
def test_all_methods_run_in_parts_and_end_in_one_table(tmp_path, monkeypatch, capsys):
    run(monkeypatch, tmp_path, "--tiny", "--steps", "3", "--only", "branpo")
    first = json.loads((tmp_path / "found.json").read_text())["found"]
    assert list(first) == ["branpo"] and "| branpo | " in capsys.readouterr().out
    run(monkeypatch, tmp_path, "--tiny", "--steps", "3")
    found = json.loads((tmp_path / "found.json").read_text())["found"]
    assert found["branpo"] == first["branpo"]  # it is not trained again
    assert found.keys() == gpu_check.BASELINES.keys()
    assert all(result["finite"] and result["tokens"] > 0 for result in found.values())
    assert (
        found["branpo"]["failed_calls"] == found["grpo_agent"]["failed_calls"] == 0
    )  # the tool was there, and called
    assert found["grpo"]["failed_calls"] is None  # it has no tool
    assert found["deep_grpo"]["tokens"] > found["grpo"]["tokens"]  # it samples branches, too
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[0] for row in rows[2:]] == [f"| {name}" for name in gpu_check.BASELINES]


def test_what_another_setting_left_is_not_mixed_in(tmp_path, monkeypatch):
    (tmp_path / "found.json").write_text(json.dumps({"setting": {"tiny": False}, "found": {}}))
    with pytest.raises(SystemExit, match="has results of other settings.*choose another --output"):
        run(monkeypatch, tmp_path, "--tiny")


def test_the_model_for_a_gpu_has_the_size_that_is_said():
    with torch.device("meta"):
        model = gpu_check.build_model(type("", (), dict(tiny=False, seed=0)))
    assert 50e6 < sum(p.numel() for p in model.parameters()) < 100e6


@pytest.mark.gpu
def test_a_method_runs_on_the_device(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--output", str(tmp_path), "--tiny", "--only", "deep_grpo"])
    gpu_check.main()
    found = json.loads((tmp_path / "found.json").read_text())["found"]["deep_grpo"]
    assert found["finite"] and found["memory"] > 0
