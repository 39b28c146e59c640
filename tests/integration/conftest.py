"""What the integration tests share: the folder of the small world, and a retrieval server."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

# The small world lives one folder up.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

ROWS = [
    {"id": 1, "title": "Paris", "text": "Paris is the capital of France."},
    {"id": 2, "contents": '"Berlin \\"capital\\""\nBerlin is the capital\nof Germany. é'},
    {"id": 3, "title": None, "text": "Cats sleep on sofas."},
]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until_healthy(process, address, log, seconds=60):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=1) as answer:
                return json.load(answer)
        except OSError:
            time.sleep(0.05)
    raise AssertionError(f"no answer in {seconds} s: {log.read_text()}")


@pytest.fixture
def served(tmp_path, monkeypatch):
    """A process of the command with its address, the file of the corpus and the folder of the index."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    corpus, index, log = tmp_path / "corpus.jsonl", tmp_path / "index", tmp_path / "log"
    corpus.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    port = free_port()
    command = [sys.executable, "-m", "trl_explore.cli", "serve-retriever", "--corpus", str(corpus)]
    command += ["--index", str(index), "--port", str(port), "--top_k", "2"]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=os.environ.copy())
    address = f"http://127.0.0.1:{port}"
    try:
        assert wait_until_healthy(process, address, log) == {"status": "ok"}
        yield process, address, corpus, index
    finally:
        process.kill()
        process.wait(10)
