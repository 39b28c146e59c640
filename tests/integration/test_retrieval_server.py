"""The retrieval server as a process of its own, over a real socket."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from trl_explore.corpus import load_corpus
from trl_explore.retrieval import BM25Retriever
from trl_explore.retrieval_client import HTTPRetriever, RetrieverError

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


def post(address, body):
    request = urllib.request.Request(
        f"{address}/retrieve", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)


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


def test_served_passages_are_the_local_ones_until_the_server_dies(served):
    process, address, corpus, index = served
    local = BM25Retriever(load_corpus(corpus), index=index)  # the server has saved it
    remote = HTTPRetriever(f"{address}/retrieve", timeout=5, retries=2, backoff=0.05)
    queries = ["capital of Germany", "cat", "", "zebra", "the", "é " * 3000]
    for _ in range(2):  # the second time from the server's cache
        assert remote.search(queries, 3) == local.search(queries, 3)
    scored = post(address, {"queries": ["capital"], "return_scores": True})["result"][0]
    assert [hit["document"]["id"] for hit in scored] == ["2", "1"]
    plain = {"id": "1", "contents": '"Paris"\nParis is the capital of France.'}
    assert post(address, {"queries": ["france"]}) == {"result": [[plain]]}

    for body, message in [
        ({}, "queries: Field required"),
        ({"queries": "one"}, "queries: "),
        ({"queries": ["q"], "topk": 101}, "topk: Input should be less than or equal to 100"),
        ({"queries": ["q"], "topk": 0}, "topk: "),
        ({"queries": ["q"] * 513}, "queries: "),
    ]:
        with pytest.raises(urllib.error.HTTPError) as refused:
            post(address, body)
        with refused.value as error:
            assert error.code == 422 and message in json.load(error)["detail"]
    with pytest.raises(RetrieverError, match="HTTP 422: .*less than or equal to 100"):
        remote.search(["q"], 101)

    process.kill()
    process.wait(10)
    start = time.monotonic()
    with pytest.raises(RetrieverError, match="tries: 3, timeout: 5 s"):
        remote.search(["q"], 1)
    assert 0.15 <= time.monotonic() - start < 15


def test_ctrl_c_stops_the_server(served):
    process, *_ = served
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 0
