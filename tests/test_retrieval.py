"""Finding passages: corpora, BM25 and vectors against brute force, the cache, HTTP, and the tool of an agent."""

import asyncio
import copy
import inspect
import json
import math
import socket
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils import get_json_schema

from trl_explore.cli import _build_parser, main
from trl_explore.retrieval.client import (
    CachedRetriever,
    HTTPRetriever,
    RetrieverDown,
    RetrieverError,
    SearchTool,
    _num_bytes,
)
from trl_explore.retrieval.corpus import Passage, load_corpus, read_passage
from trl_explore.retrieval.index import BM25Retriever, DenseRetriever, has_index
from trl_explore.retrieval.server import LOCAL, _allowed_hosts, build_app

CORPUS = [
    {"id": "p", "title": "Paris", "text": "Paris is the capital of France."},
    {"id": "b", "title": "Berlin", "text": "Berlin is the capital of Germany."},
    {"id": "c", "title": "Cat", "text": "Cats sleep on sofas and chase mice."},
    {"id": "m", "title": "", "text": "Marie Curie was awarded two Nobel prizes."},
]


# Corpora


def test_a_corpus_is_read_from_either_kind_of_file(tmp_path):
    rows = [{"id": 7, "contents": '"Paris"\nA city.'}, {"id": 8, "contents": "no title"}]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Dataset.from_list(rows).to_parquet(tmp_path / "c.parquet")
    for name in ("c.jsonl", "c.parquet"):
        corpus = load_corpus(tmp_path / name)
        assert [read_passage(row, default_id="") for row in corpus] == [
            Passage("7", "Paris", "A city.", 0.0),
            Passage("8", "", "no title", 0.0),
        ]


@settings(max_examples=50, deadline=None)
@given(st.text(), st.text().filter(str.strip))
def test_titles_and_texts_survive_search_r1s_form(title, text):
    passage = read_passage({"title": title, "text": text}, default_id="3")
    assert read_passage({"contents": passage.contents}, default_id="3") == passage


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("c.txt", "a", r"c\.txt: a corpus is a file that ends with \.jsonl or \.parquet"),
        ("c.jsonl", None, "c.jsonl does not exist"),
        ("c.jsonl", "", "may have no rows"),
        ("c.jsonl", "\n", "may have no rows"),
        ("c.jsonl", '{"text": "a"}\n{"text": \n{"text": "c"}\n', "line 2 is not JSON"),
        ("c.jsonl", '["a"]\n["b"]\n', "line 1 is not an object"),
        ("c.jsonl", '{"text": "a"}\n{"text": null}\n', "row 2: no text"),
        ("c.jsonl", '{"text": "a"}\n{"text": " "}\n', "row 2: no text"),
        ("c.jsonl", '{"id": 1, "body": "a"}\n', "has id, body; rename the column"),
        ("c.parquet", "no parquet", "c.parquet cannot be read: "),
    ],
)
def test_unfit_corpora_are_refused_with_the_place_and_a_remedy(name, content, message, tmp_path):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        load_corpus(tmp_path / name)


def test_an_empty_corpus_is_refused(tmp_path):
    Dataset.from_dict({"text": []}).to_parquet(tmp_path / "c.parquet")
    with pytest.raises(ValueError, match="may have no rows"):
        load_corpus(tmp_path / "c.parquet")
    with pytest.raises(ValueError, match="corpus is empty"):
        BM25Retriever([])


# BM25


def ids(results):
    return [[passage.id for passage in passages] for passages in results]


def test_bm25_finds_what_shares_words():
    retriever = BM25Retriever(CORPUS)
    queries = ["capital of germany", "chasing mouse with a cat", "nobel prize", "what is the", "", "zebra", "\ud83d"]
    assert ids(retriever.search(queries, 1)) == [["b"], ["c"], ["m"], [], [], [], []]
    assert ids(retriever.search(["capital"], 10)) == [["p", "b"]]
    assert retriever.search([], 3) == []
    with pytest.raises(ValueError, match="top_k=0"):
        retriever.search(["a"], 0)
    with pytest.raises(ValueError, match="no passage has a word"):
        BM25Retriever([{"text": "the of"}, {"text": "!"}])


WORDS = ["zebra", "lion", "tiger", "monkey"]  # their own stems
TEXTS = st.lists(st.lists(st.sampled_from(WORDS), min_size=1, max_size=4).map(" ".join), min_size=1, max_size=6)


@settings(max_examples=50, deadline=None)
@given(TEXTS, st.lists(st.sampled_from([*WORDS, "walrus"]), max_size=3), st.integers(1, 8))
def test_bm25_is_the_formula_and_ties_go_to_the_earlier_passage(texts, query, top_k):
    documents = [Counter(text.split()) for text in texts]
    mean = sum(document.total() for document in documents) / len(documents)

    def score(document):
        total = 0.0
        for word in query:
            holders = sum(word in other for other in documents)
            idf = math.log(1 + (len(documents) - holders + 0.5) / (holders + 0.5))
            norm = 1.5 * (0.25 + 0.75 * document.total() / mean)
            total += idf * document[word] / (document[word] + norm)
        return total

    scores = [score(document) for document in documents]
    found = BM25Retriever([{"text": text} for text in texts]).search([" ".join(query)], top_k)[0]
    assert len(found) == min(top_k, sum(value > 0 for value in scores))
    np.testing.assert_allclose([p.score for p in found], sorted(scores, reverse=True)[: len(found)], rtol=1e-5)
    np.testing.assert_allclose([p.score for p in found], [scores[int(p.id)] for p in found], rtol=1e-5)
    for first, second in zip(found, found[1:], strict=False):
        assert first.score > second.score or int(first.id) < int(second.id)
    if found:  # nothing as good as the last result stands before it and was left out
        rest = [i for i in range(int(found[-1].id)) if str(i) not in {p.id for p in found}]
        assert all(texts[i] != texts[int(found[-1].id)] for i in rest)


def test_a_saved_bm25_index_finds_the_same(tmp_path):
    built = BM25Retriever(CORPUS)
    built.save(tmp_path / "index")
    loaded = BM25Retriever(CORPUS, index=tmp_path / "index")
    queries = ["capital of germany", "cat", "", "zebra"]
    assert loaded.search(queries, 3) == built.search(queries, 3)
    with pytest.raises(ValueError, match="bm25 index of 4 passages and not a bm25 index of this corpus of 3"):
        BM25Retriever(CORPUS[:3], index=tmp_path / "index")
    with pytest.raises(ValueError, match="name another folder"):
        BM25Retriever([CORPUS[1], CORPUS[0], *CORPUS[2:]], index=tmp_path / "index")
    with pytest.raises(ValueError, match="not a dense index"):
        DenseRetriever(CORPUS, letters, index=tmp_path / "index")


def test_an_index_that_was_not_written_to_the_end_is_none(tmp_path, monkeypatch):
    retriever = BM25Retriever(CORPUS)
    retriever.save(tmp_path)

    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(retriever._index, "save", fail)
    with pytest.raises(OSError, match="disk full"):
        retriever.save(tmp_path)
    assert not has_index(tmp_path)
    with pytest.raises(ValueError, match="no complete index"):
        BM25Retriever(CORPUS, index=tmp_path)


# Vectors


def letters(texts):
    """How often each letter occurs: as crude as an encoder can be."""
    return [[text.lower().count(letter) for letter in "abcdefghijklmnopqrstuvwxyz"] for text in texts]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=6),
    st.lists(st.text("abc", min_size=1, max_size=5), max_size=3),
    st.integers(1, 8),
)
def test_dense_search_is_the_nearest_by_cosine(texts, queries, top_k):
    results = DenseRetriever([{"text": text} for text in texts], letters, batch_size=2).search(queries, top_k)
    vectors = np.array(letters(texts), dtype=float)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    for query, found in zip(queries, results, strict=True):
        point = np.array(letters([query])[0], dtype=float)
        cosines = vectors @ point / np.linalg.norm(point)
        assert len(found) == min(top_k, len(texts))
        np.testing.assert_allclose([p.score for p in found], np.sort(cosines)[::-1][: len(found)], atol=1e-6)
        np.testing.assert_allclose([p.score for p in found], [cosines[int(p.id)] for p in found], atol=1e-6)


def test_dense_search_gives_prefixes_to_the_encoder_and_nothing_for_blank_queries():
    seen = []

    def encode(texts):
        seen.extend(texts)
        return letters(texts)

    retriever = DenseRetriever(CORPUS[:2], encode, query_prefix="query: ", passage_prefix="passage: ")
    assert seen[-2] == "passage: Paris\nParis is the capital of France."
    assert ids(retriever.search([" ", "Berlin Germany", ""], 5)) == [[], ["b", "p"], []]
    assert seen[-1] == "query: Berlin Germany"
    assert retriever.search([], 1) == retriever.search(["", ""], 1)[2:] == []


@pytest.mark.parametrize("encoder", [lambda texts: [1.0], lambda texts: [[float("nan")]] * len(texts)])
def test_encoders_without_vectors_are_refused(encoder):
    with pytest.raises(ValueError, match=r"must return an array of shape \(1, dimensions\)"):
        DenseRetriever(CORPUS, encoder)


def test_a_saved_dense_index_finds_the_same_and_only_with_its_encoder(tmp_path):
    built = DenseRetriever(CORPUS, letters)
    built.save(tmp_path)
    assert DenseRetriever(CORPUS, letters, index=tmp_path).search(["mice"], 4) == built.search(["mice"], 4)
    for encoder, prefix in (
        (lambda texts: np.eye(26)[: len(texts)], ""),
        (lambda texts: [[1.0]] * len(texts), ""),
        (letters, "zzzzz"),
    ):
        with pytest.raises(ValueError, match="another encoder or prefix"):
            DenseRetriever(CORPUS, encoder, passage_prefix=prefix, index=tmp_path)


def test_real_embeddings_find_what_is_meant():
    """WordLlama's wheel holds its weights, so nothing is downloaded."""
    import wordllama

    model = wordllama.WordLlama.load(cache_dir=Path(wordllama.__file__).parent, disable_download=True)
    retriever = DenseRetriever(CORPUS, model.embed)
    queries = ["Which city governs the French?", "a pet that hunts rodents", "famous scientist"]
    assert ids(retriever.search(queries, 1)) == [["p"], ["c"], ["m"]]


def test_a_saved_sentence_transformer_is_loaded_and_used(sentence_model, tmp_path):
    from sentence_transformers import SentenceTransformer

    retriever = DenseRetriever.from_model(sentence_model, CORPUS, device="cpu")
    model = SentenceTransformer(sentence_model, device="cpu")
    passages = model.encode(["passage: " + f"{row['title']}\n{row['text']}".strip() for row in CORPUS])
    query = model.encode(["query: mice"])[0]
    cosines = passages @ query / np.linalg.norm(passages, axis=1) / np.linalg.norm(query)
    found = retriever.search(["mice"], 4)[0]
    by_id = dict(zip("pbcm", cosines, strict=True))
    assert len(found) == 4
    np.testing.assert_allclose([p.score for p in found], sorted((by_id[p.id] for p in found), reverse=True), atol=1e-5)

    retriever.save(tmp_path)
    loaded = DenseRetriever.from_model(sentence_model, CORPUS, device="cpu", index=tmp_path)
    assert loaded.search(["mice"], 4) == retriever.search(["mice"], 4)


@pytest.mark.parametrize(
    ("missing", "make", "extra"),
    [
        ("bm25s", lambda: BM25Retriever(CORPUS), "retrieval"),
        ("Stemmer", lambda: BM25Retriever(CORPUS), "retrieval"),
        ("faiss", lambda: DenseRetriever(CORPUS, letters), "dense"),
        ("sentence_transformers", lambda: DenseRetriever.from_model("x", CORPUS), "dense"),
    ],
)
def test_missing_packages_are_named_with_their_extra(missing, make, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=rf"trl-explore\[{extra}\]"):
        make()


# The cache


class Echo:
    """Finds a passage for each query, and remembers what it was asked."""

    def __init__(self, fail=()):
        self.asked = []
        self.fail = list(fail)  # exceptions to raise, `None` for none

    def search(self, queries, top_k):
        self.asked.append(list(queries))
        error = self.fail.pop(0) if self.fail else None
        if error:
            raise error
        return [[Passage(query, "", f"about {query}", 1.0)] * top_k for query in queries]


def test_only_misses_go_on_and_in_one_call():
    inner = Echo()
    cached = CachedRetriever(inner, max_size=10)
    assert ids(cached.search(["a", "b", "a"], 1)) == [["a"], ["b"], ["a"]]
    assert ids(cached.search(["c", "b", "d"], 1)) == [["c"], ["b"], ["d"]]
    assert ids(cached.search(["a"], 2)) == [["a", "a"]]
    assert inner.asked == [["a", "b"], ["c", "d"], ["a"]]
    assert (cached.hits, cached.misses) == (2, 5)
    cached.search(["a"], 1)[0].clear()
    assert ids(cached.search(["a"], 1)) == [["a"]]
    assert cached.search([], 1) == [] and len(inner.asked) == 3


def test_the_cache_forgets_what_was_not_asked_for_longest():
    inner = Echo()
    cached = CachedRetriever(inner, max_size=2)
    for query in "abaca":
        cached.search([query], 1)
    cached.search(["b"], 1)
    assert inner.asked == [["a"], ["b"], ["c"], ["b"]]
    assert ids(cached.search(["x", "y", "z"], 1)) == [["x"], ["y"], ["z"]]
    with pytest.raises(ValueError, match="max_size=0"):
        CachedRetriever(inner, max_size=0)


def test_errors_are_not_cached():
    cached = CachedRetriever(Echo([RetrieverError("down")]))
    with pytest.raises(RetrieverError):
        cached.search(["a"], 1)
    assert ids(cached.search(["a"], 1)) == [["a"]]
    assert (cached.hits, cached.misses) == (0, 1)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.sampled_from("abcd"), max_size=4), max_size=8), st.integers(1, 5))
def test_a_cache_never_changes_results(calls, max_size):
    cached = CachedRetriever(Echo(), max_size=max_size)
    for queries in calls:
        assert cached.search(queries, 2) == Echo().search(queries, 2)
    assert cached.hits + cached.misses == sum(map(len, calls))


@pytest.mark.parametrize("ending", ["", "é", "東"])  # one, two and more bytes per character
def test_the_cache_is_bounded_by_bytes(ending):
    inner = Echo()
    one = _num_bytes("a" * 1000 + ending, tuple(Echo().search(["a" * 1000 + ending], 1)[0]))
    cached = CachedRetriever(inner, max_bytes=3 * one)
    for letter in "abcdbxa":
        cached.search([letter * 1000 + ending], 1)
    assert [queries[0][0] for queries in inner.asked] == ["a", "b", "c", "d", "x", "a"]
    assert one > 3000 and cached._num_bytes == 3 * one and len(cached._known) == 3
    assert ids(cached.search(["z" * 10**5], 1)) == [["z" * 10**5]] and cached._num_bytes == 0  # too large to be kept
    with pytest.raises(ValueError, match="max_bytes=0 must be at least 1"):
        CachedRetriever(inner, max_bytes=0)


def test_the_size_of_the_cache_is_right_if_two_threads_find_different_passages():
    class Slow(Echo):
        def search(self, queries, top_k):
            found = super().search(queries, top_k)
            if len(self.asked) == 1:  # another thread asks the same, and its answer is there first
                cached.search(queries, top_k)
                found = [[Passage(query, "", "x" * 1000, 1.0)] for query in queries]
            return found

    cached = CachedRetriever(Slow())
    cached.search(["a"], 1)
    assert cached._num_bytes == _num_bytes("a", (Passage("a", "", "x" * 1000, 1.0),))


# The server


def ask_server(body, *, chunks=None, host="127.0.0.1:8000", length=True, path="/retrieve", **limits):
    """Status and answer of the application, asked as a web server asks it."""
    chunks = chunks or [body if isinstance(body, bytes) else json.dumps(body).encode()]
    headers = [(b"host", host.encode()), (b"content-type", b"application/json")]
    headers += [(b"content-length", str(sum(map(len, chunks))).encode())] if length else []
    parts, sent = list(chunks), []

    async def receive():
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    async def send(message):
        sent.append(message)

    app = build_app(Echo(), **limits)
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": path}
    asyncio.run(app({**scope, "scheme": "http", "query_string": b"", "headers": headers}, receive, send))
    text = b"".join(message.get("body", b"") for message in sent).decode()
    return sent[0]["status"], text, len(chunks) - len(parts)


def test_requests_within_the_limits_are_answered():
    status, text, _ = ask_server({"queries": ["a", "b" * 10_000], "topk": 2})
    assert status == 200 and [len(found) for found in json.loads(text)["result"]] == [2, 2]
    assert ask_server({"queries": ["a"] * 512})[0] == 200
    assert ask_server({"queries": ["a"]}, path="/nothing")[0] == 404  # other errors keep their status


@pytest.mark.parametrize(
    ("body", "limits", "message"),
    [
        ({"queries": ["a" * 10_001]}, {}, "body.queries.0: String should have at most 10000 characters"),
        ({"queries": ["ab"] * 3}, {"max_query_chars": 1}, "at most 1 character (and 2 more)"),
        ({"queries": ["a"] * 513}, {}, "body.queries: List should have at most 512 items"),
        ({"queries": ["a"] * 3}, {"max_queries": 2}, "at most 2 items"),
        ({"queries": ["a"], "topk": 101}, {}, "body.topk: Input should be less than or equal to 100"),
        ({"queries": ["a"], "topk": 3}, {"max_top_k": 2}, "less than or equal to 2"),
        (b'{"queries": ["\xff"]}', {}, "body: must be JSON in UTF-8"),
        (b"[" * 100_000, {}, "body: must be JSON in UTF-8"),
        (b'{"queries":', {}, "JSON decode error"),
        (b"[]", {}, "body: "),
    ],
)
def test_what_the_server_does_not_take_is_422_and_one_sentence(body, limits, message):
    status, text, _ = ask_server(body, **limits)
    assert status == 422 and message in json.loads(text)["detail"] and "\n" not in text


def test_large_bodies_are_refused_before_they_are_read():
    body = json.dumps({"queries": ["a" * 50]}).encode()
    assert ask_server(body, max_body_bytes=len(body))[0] == 200
    limit = len(body) - 1
    status, text, read = ask_server(body, max_body_bytes=limit)
    assert (status, read) == (413, 0) and json.loads(text)["detail"].startswith(f"the body has more than {limit}")
    chunks = [body[:20], body[20:40], body[40:50], body[50:]]  # of a length that is not declared
    status, text, read = ask_server(None, chunks=chunks, length=False, max_body_bytes=30)
    assert (status, read) == (413, 2) and "send fewer or shorter queries" in text
    assert ask_server(None, chunks=chunks, length=False)[0] == 200


@pytest.mark.parametrize(
    ("host", "allowed", "status"),
    [
        ("localhost:8000", {}, 200),
        ("[::1]:8000", {}, 200),
        ("evil.example", {}, 400),
        ("www.localhost", {}, 400),
        ("", {}, 400),
        ("gpu7:8000", {"allowed_hosts": ["gpu7"]}, 200),
        ("a.example.com", {"allowed_hosts": ["*.example.com"]}, 200),
        ("localhost", {"allowed_hosts": ["gpu7"]}, 400),
        ("evil.example", {"allowed_hosts": ["*"]}, 200),
    ],
)
def test_the_server_answers_to_its_own_names(host, allowed, status):
    assert ask_server({"queries": ["a"]}, host=host, **allowed)[0] == status


def test_the_commands_limits_are_the_servers():
    args = _build_parser().parse_args(["serve-retriever", "--corpus", "c.jsonl"])
    limits = {name: parameter.default for name, parameter in inspect.signature(build_app).parameters.items()}
    names = ("top_k", "max_queries", "max_query_chars", "max_top_k")
    assert {name: vars(args)[name] for name in names} == {name: limits[name] for name in names}
    assert args.max_body_mb * 2**20 == limits["max_body_bytes"] and SearchTool(Echo()).max_query_chars == 10_000
    assert _allowed_hosts("127.0.0.1", []) == list(LOCAL)
    assert _allowed_hosts("10.0.0.5", ["gpu7"]) == [*LOCAL, "10.0.0.5", "gpu7"]
    assert _allowed_hosts("0.0.0.0", []) == [*LOCAL, socket.gethostname()]


# HTTP, against a scripted server


@contextmanager
def scripted_server(*answers):
    """A server that gives these `(status, body)` in turn, the last one for ever."""
    requests = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            status, body = answers[min(len(requests), len(answers)) - 1]
            if status is None:
                time.sleep(body)
                return
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/retrieve", requests
    finally:
        server.shutdown()
        server.server_close()


HIT = {"document": {"id": 3, "contents": '"Paris"\nA city.'}, "score": 0.5}
OK = (200, json.dumps({"result": [[HIT]]}).encode())


def test_the_protocol_is_search_r1s():
    with scripted_server(OK) as (url, requests):
        assert HTTPRetriever(url).search(["capital"], 2) == [[Passage("3", "Paris", "A city.", 0.5)]]
    assert requests == [{"queries": ["capital"], "topk": 2, "return_scores": True}]


def test_a_server_on_this_machine_is_reached_without_the_proxy(monkeypatch):
    for name in ("no_proxy", "NO_PROXY", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setattr("urllib.request._opener", None)  # urllib keeps the proxies of its first request
    with scripted_server(OK) as (url, _):
        assert len(HTTPRetriever(url, retries=0).search(["capital"], 1)) == 1


def test_failures_that_may_pass_are_tried_again():
    with scripted_server((503, b"busy"), (429, b""), OK) as (url, requests):
        assert len(HTTPRetriever(url, backoff=0.001).search(["q"], 1)) == 1
    assert len(requests) == 3


@pytest.mark.parametrize(
    ("answer", "tries", "message"),
    [
        ((500, b"oops"), 3, "HTTP 500: oops; tries: 3, timeout: 0.2 s"),
        ((404, b""), 1, "HTTP 404: Not Found; tries: 1,"),
        ((422, b'{"detail": "topk: too large"}'), 1, "topk: too large"),
        ((200, b"<html>"), 1, "answer not understood"),
        ((200, b"\xff"), 1, "answer not understood"),
        ((200, b'{"result": [["no scores"]]}'), 1, "expected"),
        ((200, b'{"result": []}'), 1, "0 results for 1 queries"),
        ((200, json.dumps({"result": [[{"document": {"id": 1}, "score": 1}]]}).encode()), 1, "no text"),
        ((None, 0.4), 3, "(?i)time"),
    ],
)
def test_the_last_failure_is_one_clear_error(answer, tries, message):
    with scripted_server(answer) as (url, requests):
        with pytest.raises(RetrieverError, match=message) as caught:
            HTTPRetriever(url, timeout=0.2, retries=2, backoff=0.001).search(["q"], 1)
    assert len(requests) == tries
    assert url in str(caught.value) and "serve-retriever" in str(caught.value)


def test_many_queries_go_in_several_requests(monkeypatch):
    monkeypatch.setattr("trl_explore.retrieval.client.MAX_QUERIES", 2)
    two = (200, json.dumps({"result": [[HIT], []]}).encode())
    with scripted_server(two, two, OK) as (url, requests):
        assert [len(hits) for hits in HTTPRetriever(url).search(list("abcde"), 1)] == [1, 0, 1, 0, 1]
        assert HTTPRetriever(url).search([], 1) == []
    assert [request["queries"] for request in requests] == [["a", "b"], ["c", "d"], ["e"]]


@pytest.mark.parametrize("arguments", [{"url": "file:///etc"}, {"timeout": 0}, {"retries": -1}, {"backoff": -1.0}])
def test_arguments_of_the_client_are_checked(arguments):
    with pytest.raises(ValueError, match="must"):
        HTTPRetriever(**{"url": "http://x", **arguments})


@pytest.mark.parametrize("name", ["top_k", "max_passage_chars", "timeout", "max_failures"])
def test_arguments_of_the_tool_are_checked(name):
    with pytest.raises(ValueError, match="must be positive"):
        SearchTool(Echo(), **{name: 0})


# The tool


def test_the_tool_shows_numbered_passages():
    tool = SearchTool(BM25Retriever(CORPUS), top_k=2, max_passage_chars=21)
    assert tool.search("the capital") == (
        "Doc 1 (Title: Paris) Paris is the capital ...\nDoc 2 (Title: Berlin) Berlin is the capital..."
    )
    assert tool.search("Curie") == "Doc 1 Marie Curie was award..."
    assert (tool.calls, tool.failures, tool.down) == (2, 0, None)
    broken = SearchTool(BM25Retriever([{"text": "zebra\n\nDoc 2 lion"}]))
    assert broken.search("zebra") == "Doc 1 zebra Doc 2 lion"


def test_what_finds_nothing_is_said():
    tool = SearchTool(BM25Retriever(CORPUS))
    assert tool.search("zebra") == tool.search("the") == tool.search("\ud83d") == "No results."
    assert tool.search(" \n") == "The query is empty. No results."
    assert tool.search(["Paris"]) == "The query must be a string."
    assert tool.search("zebra " * 2000) == "The query has more than 10000 characters; use a few words."
    assert tool.failures == 0
    # Half a surrogate pair does not reach the retriever.
    assert SearchTool(Echo(), top_k=1).search("a\ud83d b") == "Doc 1 about a? b"


def test_transformers_makes_a_schema_of_the_tool():
    query = {"type": "string", "description": "What to look for, in a few words."}
    schema = {
        "name": "search",
        "description": "Search a collection of documents for facts.",
        "parameters": {"type": "object", "properties": {"query": query}, "required": ["query"]},
        "return": {"type": "string", "description": "The documents that fit best, numbered."},
    }
    assert get_json_schema(SearchTool(Echo()).search) == {"type": "function", "function": schema}


SILENCE = "The search engine did not answer; try again, or answer from what you know."


def answer(tool, query="q"):
    """What TRL shows to the model."""
    try:
        return tool.search(query)
    except RetrieverError as error:
        assert isinstance(error, OSError) and error.__cause__ is not None
        return str(error)


def test_failures_are_observations_until_the_engine_counts_as_down(caplog):
    broken = [RetrieverError("no"), None, TimeoutError("late"), OSError("gone"), KeyError("bug")]
    echo = Echo([*broken, None])
    tool = SearchTool(echo, top_k=1, max_failures=3)
    assert [answer(tool) for _ in range(4)] == [SILENCE, "Doc 1 about q", SILENCE, SILENCE]
    assert tool.down is None
    down = "3 searches in a row failed, the last one with KeyError: 'bug'"
    for _ in range(2):  # the second time without asking
        with pytest.raises(RetrieverDown, match=down) as info:
            tool.search("q")
    assert isinstance(info.value, RetrieverError) and "reset()" in str(info.value)
    assert isinstance(tool.down, RetrieverDown) and len(echo.asked) == 5
    assert (tool.calls, tool.failures) == (5, 4)
    assert [record.message.split(":")[1].strip() for record in caplog.records] == ["RetrieverError", "TimeoutError"]
    tool.reset()
    assert tool.down is None
    assert tool.search("q") == "Doc 1 about q"


def test_a_search_that_takes_too_long_fails():
    release = threading.Event()

    class Slow(Echo):
        def search(self, queries, top_k):
            release.wait(10)
            return super().search(queries, top_k)

    tool = SearchTool(Slow(), timeout=0.05, max_failures=2)
    assert answer(tool) == SILENCE
    with pytest.raises(RetrieverDown, match=r"timeout=0\.05 s"):
        tool.search("q")
    release.set()
    quick = SearchTool(Echo([ValueError("bad")]), timeout=10, top_k=1)
    assert [answer(quick), answer(quick)] == [SILENCE, "Doc 1 about q"]


def test_counts_of_many_threads_add_up():
    tool = SearchTool(CachedRetriever(BM25Retriever(CORPUS), max_size=2), top_k=1)
    queries = ["germany", "cat", "nobel", "zebra"] * 25
    answers = {}

    def work(name):
        answers[name] = [tool.search(query)[:14] for query in queries]

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(map(tuple, answers.values())) == {
        ("Doc 1 (Title: ", "Doc 1 (Title: ", "Doc 1 Marie Cu", "No results.") * 25
    }
    assert (tool.calls, tool.failures) == (400, 0)
    assert tool.retriever.hits + tool.retriever.misses == 400


def test_copies_of_an_environment_share_its_search_engine():
    tool = SearchTool(CachedRetriever(BM25Retriever(CORPUS)))
    environment = {"tool": tool, "index": tool.retriever.retriever}
    assert copy.deepcopy(environment) == environment


# The command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--corpus", "missing.jsonl"], "missing.jsonl does not exist"),
        (["--corpus", "empty.jsonl"], "may have no rows"),
        (["--corpus", "c.jsonl", "--top_k", "101"], "--top_k 101 must be between 1 and 100"),
        (["--corpus", "c.jsonl", "--max_body_mb", "0"], "--max_body_mb 0 must be at least 1"),
        (["--corpus", "c.jsonl", "--allowed_hosts", "a.*"], "--allowed_hosts a.* must be a name"),
        (["--corpus", "c.jsonl", "--index", "other"], "of 9 passages"),
        (["--corpus", "c.jsonl", "--retriever", "dense", "--model", "./nowhere"], "nowhere"),
    ],
)
def test_mistakes_are_explained_in_one_line(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in CORPUS))
    Path("empty.jsonl").touch()
    Path("other").mkdir()
    Path("other/index.json").write_text(json.dumps({"retriever": "bm25", "passages": 9, "fingerprint": ""}))
    assert main(["serve-retriever", *arguments]) == 2
    error = capsys.readouterr().err.split("trl-explore: error: ")[1]
    assert message in error and error.count("\n") == 1


def test_a_missing_extra_is_explained(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "trl_explore.retrieval.server", raising=False)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    assert main(["serve-retriever", "--corpus", "c.jsonl"]) == 2
    assert "trl-explore[serve]" in capsys.readouterr().err
