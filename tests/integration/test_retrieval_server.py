"""The retrieval server as a process of its own, over a real socket."""

import json
import signal
import time
import urllib.error
import urllib.request

import pytest

from trl_explore.retrieval.client import HTTPRetriever, RetrieverError
from trl_explore.retrieval.corpus import load_corpus
from trl_explore.retrieval.index import BM25Retriever


def post(address, body):
    request = urllib.request.Request(
        f"{address}/retrieve", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)


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
