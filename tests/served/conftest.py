"""A real vLLM server on the CPU, with a tiny model that has learned to call tools.

Not `tests/vllm`: with `tests` on the path, that folder would be what `import vllm` finds where vLLM is not installed.
"""

import copy
import importlib.util
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch
from transformers import Qwen2ForCausalLM

# The small world lives one folder up.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from examples.benchmarks.tasks.lake_agent import LAKE_AGENT  # noqa: E402
from trl_explore.tasks.tiny_model import build_model, build_tokenizer  # noqa: E402
from trl_explore.tasks.warm_start import train  # noqa: E402

START_SECONDS = 300
SERVER_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "no_proxy": "127.0.0.1",
}


def pytest_collection_modifyitems(items):
    if importlib.util.find_spec("vllm") is None:
        for item in items:
            if item.get_closest_marker("vllm"):
                item.add_marker(pytest.mark.skip(reason="needs vLLM: `make test-vllm` builds its environment"))


class Server:
    """One vLLM server at a time, on one port."""

    def __init__(self, folder):
        self.folder, self.process, self.served = folder, None, None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.seconds = []

    def serve(self, model):
        """Serve a folder, if it is not the one that is served already."""
        if self.process is not None and self.process.poll() is None and self.served == model:
            return self
        self.kill()
        log = self.folder / f"server_{len(self.seconds)}.log"
        command = [str(Path(sys.executable).parent / "vllm"), "serve", str(model), "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--dtype", "float32", "--enforce-eager", "--max-model-len", "256"]
        command += ["--weight-transfer-config", '{"backend": "file"}']
        command += ["--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"]
        start = time.monotonic()
        with log.open("w") as output:
            self.process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env={**os.environ, **SERVER_ENVIRONMENT},
                start_new_session=True,
            )
        while not self.answers():
            assert self.process.poll() is None and time.monotonic() < start + START_SECONDS, log.read_text()[-4000:]
            time.sleep(0.2)
        self.seconds.append(time.monotonic() - start)
        print(f"the server was up after {self.seconds[-1]:.0f} s")
        self.served = model
        return self

    def answers(self):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                return True
        except OSError:
            return False

    def kill(self):
        """End the server and its workers as a machine that fails would."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(30)
            self.process = None


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Folders of a tiny model that calls tools, with a tied and with an untied head."""
    folder = tmp_path_factory.mktemp("models")
    torch.set_num_threads(1)
    tokenizer, config = build_tokenizer(tools=True), build_model(seed=0).config
    config.num_attention_heads = config.num_key_value_heads = 2  # vLLM has no heads narrower than 32 on CPUs
    with torch.random.fork_rng():
        torch.manual_seed(0)
        tied = Qwen2ForCausalLM(config)
        train(tied, tokenizer, LAKE_AGENT, rng=random.Random(0), steps=60, progress=False)
    config = copy.deepcopy(config)
    config.tie_word_embeddings = False
    untied = Qwen2ForCausalLM(config)
    untied.load_state_dict(tied.state_dict())
    for name, model in {"tied": tied, "untied": untied}.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return {name: folder / name for name in ("tied", "untied")}


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    os.environ["no_proxy"] = "127.0.0.1"
    server = Server(tmp_path_factory.mktemp("server"))
    yield server
    server.kill()
