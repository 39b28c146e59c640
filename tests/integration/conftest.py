"""What the integration tests share: the small world's folder, what two processes did, and a retrieval server."""

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

from launching import on_two_processes

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


@pytest.fixture(scope="session")
def two_processes(tmp_path_factory):
    """What the ranks of `ranks.py` found, by run and then by `rank0` and `rank1`; and the folder they worked in."""
    folder = tmp_path_factory.mktemp("ranks")
    on_two_processes(Path(__file__).with_name("ranks.py"), folder)
    ranks = {path.stem: json.loads(path.read_text()) for path in folder.glob("rank*.json")}
    return {run: {rank: found[run] for rank, found in ranks.items()} for run in ranks["rank0"]}, folder
