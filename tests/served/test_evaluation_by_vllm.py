"""Evaluation by a real vLLM: greedy completions are those of transformers, samples are as many as asked for."""

import json
import os
import subprocess
import sys

import pytest

from trl_explore.cli import main

pytestmark = pytest.mark.vllm


def flags(model, folder, *more):
    settings = {"model_name_or_path": model, "dataset": "chain", "limit": 8, "dtype": "float32", "output_dir": folder}
    return ["eval", *(text for name, value in settings.items() for text in (f"--{name}", str(value))), *more]


def completions(folder):
    lines = (folder / "chain" / "completions.jsonl").read_text().splitlines()[1:]
    return {record["index"]: (record["completion_ids"], record["truncated"]) for record in map(json.loads, lines)}


@pytest.fixture(scope="module")
def greedy(models, tmp_path_factory):
    """What transformers decodes greedily."""
    folder = tmp_path_factory.mktemp("transformers")
    assert main(flags(models["tied"], folder, "--temperature", "0")) == 0
    return completions(folder)


@pytest.mark.xdist_group("first")
def test_by_a_server(server, models, greedy, tmp_path):
    server.kill()  # a server that trained has other weights than the folder
    server.serve(models["tied"])
    url = f"http://127.0.0.1:{server.port}"
    assert main(flags(models["tied"], tmp_path / "greedy", "--temperature", "0", "--vllm_server_base_url", url)) == 0
    assert completions(tmp_path / "greedy") == greedy
    assert main(flags(models["tied"], tmp_path / "sampled", "--vllm_server_base_url", f"{url}/v1")) == 0
    assert {len(ids) for ids, _ in completions(tmp_path / "sampled").values()} == {8}


@pytest.mark.xdist_group("second")
def test_in_one_process(models, greedy, tmp_path):
    options = flags(models["tied"], tmp_path, "--temperature", "0", "--use_vllm", "--vllm_max_model_length", "128")
    command = [sys.executable, "-m", "trl_explore.cli", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert completions(tmp_path) == greedy
