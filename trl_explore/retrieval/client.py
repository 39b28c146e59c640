"""Search for agents: a client of a retrieval server, a cache for any retriever, and the tool that TRL calls."""

import http.client
import json
import logging
import queue
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import OrderedDict
from typing import Any

from trl_explore.retrieval.corpus import Passage, read_passage
from trl_explore.retrieval.index import Retriever, Shared
from trl_explore.serving.agreement import url_opener

MAX_QUERIES = 512  # queries per request that the client sends, and that the server accepts by default
MAX_QUERY_CHARS = 10_000  # characters per query that the tool and the server accept by default

logger = logging.getLogger(__name__)


class RetrieverError(ConnectionError):
    """Raised if a search failed. The message names the retriever, the cause and the remedy."""


class RetrieverDown(RetrieverError):
    """Raised after too many failed searches in a row, because more would train the model on error messages."""


class HTTPRetriever:
    """
    Client of a retrieval server with Search-R1's protocol, as `trl-explore serve-retriever` starts one.

    It sends `{"queries": [...], "topk": k, "return_scores": true}` and reads `{"result": [[{"document": {...},
    "score": s}, ...], ...]}` with documents as in [`~trl_explore.retrieval.corpus.read_passage`]. Requests go through
    the proxy of the environment variables, except to `127.0.0.1`, `localhost` and `0.0.0.0`.

    Args:
        url (`str`):
            Address of the server, for example `"http://127.0.0.1:8000/retrieve"`.
        timeout (`float`, *optional*, defaults to `10.0`):
            Seconds to wait for the connection, and for each part of the answer. Positive.
        retries (`int`, *optional*, defaults to `3`):
            Number of retries after a temporary failure: no connection, no answer, or HTTP 408, 429 or 5xx.
        backoff (`float`, *optional*, defaults to `0.5`):
            Seconds before the first retry. They double with each retry.

    Raises:
        `ValueError`: If an argument is outside its range.
    """

    def __init__(self, url: str, *, timeout: float = 10.0, retries: int = 3, backoff: float = 0.5) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url={url!r} must start with http:// or https://, as in http://127.0.0.1:8000/retrieve.")
        if timeout <= 0 or retries < 0 or backoff < 0:
            raise ValueError(
                f"timeout must be positive, retries and backoff not negative; got {timeout=}, {retries=}, {backoff=}."
            )
        self.url, self.timeout, self.retries, self.backoff = url, timeout, retries, backoff

    def search(self, queries: list[str], top_k: int) -> list[list[Passage]]:
        """
        Search as in [`~trl_explore.retrieval.index.Retriever`].

        Raises:
            `RetrieverError`: If the last retry failed.
        """
        results = []
        for first in range(0, len(queries), MAX_QUERIES):
            results += self._ask(queries[first : first + MAX_QUERIES], top_k)
        return results

    def _ask(self, queries: list[str], top_k: int) -> list[list[Passage]]:
        body = json.dumps({"queries": queries, "topk": top_k, "return_scores": True}).encode()
        request = urllib.request.Request(self.url, body, {"Content-Type": "application/json"})
        open_url = url_opener(self.url)
        tries = 0
        while True:
            tries += 1
            try:
                with open_url(request, timeout=self.timeout) as answer:
                    return _read_answer(answer.read(), len(queries))
            except urllib.error.HTTPError as error:
                problem = _describe_refusal(error)
                is_temporary = error.code in (408, 429) or error.code >= 500
            except (OSError, http.client.HTTPException) as error:  # includes URLError and all timeouts
                problem, is_temporary = f"{type(error).__name__}: {error}", True
            except ValueError as error:
                problem, is_temporary = f"answer not understood: {error}", False
            if not is_temporary or tries > self.retries:
                raise RetrieverError(
                    f"{self.url} gave no result ({problem}; tries: {tries}, timeout: {self.timeout:g} s): check the "
                    "address (a search server's usually ends with /retrieve) and that the server runs; "
                    "`trl-explore serve-retriever --corpus FILE` starts one."
                )
            time.sleep(self.backoff * 2 ** (tries - 1))


def _describe_refusal(error: urllib.error.HTTPError) -> str:
    with error:
        try:
            detail = error.read(500).decode("utf-8", "replace")
        except (OSError, http.client.HTTPException):
            detail = ""
    return f"HTTP {error.code}: {detail or error.reason}"


def _read_answer(body: bytes, num_queries: int) -> list[list[Passage]]:
    passages = []
    try:
        for hits in json.loads(body)["result"]:
            passages.append([read_passage(hit["document"], default_id="", score=float(hit["score"])) for hit in hits])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f'expected {{"result": [[{{"document": ..., "score": ...}}]]}}, got {body[:200]!r} ({error!r})'
        ) from error
    if len(passages) != num_queries:
        raise ValueError(f"{len(passages)} results for {num_queries} queries")
    return passages


class CachedRetriever(Shared):
    """
    Caches the results of a retriever, because rollouts of a group often have the same queries. It is safe to use from
    many threads.

    The attribute `hits` counts queries that the cache or an equal query of the same call answered. `misses` counts
    queries that the retriever answered.

    Args:
        retriever ([`~trl_explore.retrieval.index.Retriever`]):
            Retriever that answers queries that are not in the cache. Each call of `search` sends it all of these
            queries at once. Its errors are not cached.
        max_size (`int`, *optional*, defaults to `10000`):
            Maximum number of results in the cache, which removes the least recently used first. Positive.
        max_bytes (`int`, *optional*, defaults to `268435456`):
            Maximum number of bytes of all texts in the cache, including the queries. Positive.

    Raises:
        `ValueError`: If an argument is outside its range.
    """

    def __init__(self, retriever: Retriever, max_size: int = 10_000, *, max_bytes: int = 256 * 2**20) -> None:
        if min(max_size, max_bytes) < 1:
            raise ValueError(f"max_size={max_size} and max_bytes={max_bytes} must be at least 1.")
        self.retriever = retriever
        self.max_size, self.max_bytes = max_size, max_bytes
        self.hits = 0
        self.misses = 0
        self._known: OrderedDict[tuple[str, int], tuple[Passage, ...]] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def search(self, queries: list[str], top_k: int) -> list[list[Passage]]:
        """Search as in [`~trl_explore.retrieval.index.Retriever`]."""
        with self._lock:
            found = {query: self._known[query, top_k] for query in queries if (query, top_k) in self._known}
        missing = list(dict.fromkeys(query for query in queries if query not in found))
        if missing:
            # Search without the lock, because a slow search must not delay cached queries of other threads.
            for query, results in zip(missing, self.retriever.search(missing, top_k), strict=True):
                found[query] = tuple(results)
        with self._lock:
            self.hits += len(queries) - len(missing)
            self.misses += len(missing)
            for query, passages in found.items():
                if (query, top_k) in self._known:  # another thread may have found other passages
                    self._num_bytes -= _num_bytes(query, self._known[query, top_k])
                self._num_bytes += _num_bytes(query, passages)
                self._known[query, top_k] = passages
                self._known.move_to_end((query, top_k))
            while len(self._known) > self.max_size or self._num_bytes > self.max_bytes:
                (query, _), passages = self._known.popitem(last=False)
                self._num_bytes -= _num_bytes(query, passages)
        return [list(found[query]) for query in queries]


def _num_bytes(query: str, passages: tuple[Passage, ...]) -> int:
    size = sys.getsizeof(query)
    for passage in passages:
        size += sys.getsizeof(passage.id) + sys.getsizeof(passage.title) + sys.getsizeof(passage.text)
    return size


class SearchTool(Shared):
    """
    A search tool for agents: pass its method to a trainer, `tools=[SearchTool(retriever).search]`.

    If a search fails, the tool raises an error. TRL passes the error to the model, which may search again or answer.
    For an empty query or a search without results, the tool returns a sentence. It is safe to use from many threads.

    The attributes `calls` and `failures` count searches that reached the retriever. After `max_failures` failures in a
    row, `down` is the error that every search raises, until [`~SearchTool.reset`].

    Args:
        retriever ([`~trl_explore.retrieval.index.Retriever`]):
            Retriever to search with.
        top_k (`int`, *optional*, defaults to `3`):
            Number of passages per search. The default is BranPO's. Positive.
        max_passage_chars (`int`, *optional*, defaults to `2000`):
            Number of characters after which a passage is cut off. Positive.
        max_query_chars (`int`, *optional*, defaults to `10000`):
            Maximum number of characters of a query. For a longer query, the tool returns a sentence and does not
            search. Positive.
        timeout (`float`, *optional*):
            Seconds after which a search counts as failed, including retries. Its thread continues. `None` waits for
            the retriever.
        max_failures (`int`, *optional*, defaults to `32`):
            Number of failures in a row after which the tool stops searching. Positive.

    Raises:
        `ValueError`: If an argument is outside its range.
    """

    def __init__(
        self,
        retriever: Retriever,
        *,
        top_k: int = 3,
        max_passage_chars: int = 2000,
        max_query_chars: int = MAX_QUERY_CHARS,
        timeout: float | None = None,
        max_failures: int = 32,
    ) -> None:
        if min(top_k, max_passage_chars, max_query_chars, max_failures) < 1 or (timeout is not None and timeout <= 0):
            raise ValueError(
                "top_k, max_passage_chars, max_query_chars, max_failures and timeout must be positive; got "
                f"{top_k=}, {max_passage_chars=}, {max_query_chars=}, {max_failures=}, {timeout=}."
            )
        self.retriever = retriever
        self.top_k, self.max_passage_chars, self.max_query_chars = top_k, max_passage_chars, max_query_chars
        self.timeout, self.max_failures = timeout, max_failures
        self.calls = 0
        self.failures = 0
        self.down: RetrieverDown | None = None
        self._failures_in_a_row = 0
        self._lock = threading.Lock()

    # The model reads this docstring, because transformers makes the tool's schema from it. So a change of the text
    # changes training.
    def search(self, query: str) -> str:
        """
        Search a collection of documents for facts.

        Args:
            query: What to look for, in a few words.

        Returns:
            The documents that fit best, numbered.
        """
        if not isinstance(query, str):
            return "The query must be a string."
        # The JSON of a model can contain half a surrogate pair, which neither UTF-8 nor tokenizers accept.
        query = " ".join(query.encode("utf-8", "replace").decode().split())
        if not query:
            return "The query is empty. No results."
        if len(query) > self.max_query_chars:
            return f"The query has more than {self.max_query_chars} characters; use a few words."
        if self.down:
            raise RetrieverDown(str(self.down)) from self.down
        try:
            passages = self._ask(query)
        except Exception as error:  # a retriever may raise anything; TRL shows the error to the model and continues
            self._record_failure(error)
            message = "The search engine did not answer; try again, or answer from what you know."
            raise RetrieverError(message) from error
        with self._lock:
            self.calls += 1
            self._failures_in_a_row = 0
        return self._render(passages)

    def reset(self) -> None:
        """Search again after the tool was down. The counts are kept."""
        with self._lock:
            self.down = None
            self._failures_in_a_row = 0

    def _ask(self, query: str) -> list[Passage]:
        if self.timeout is None:
            return self.retriever.search([query], self.top_k)[0]
        outcome: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def work() -> None:
            try:
                outcome.put((self.retriever.search([query], self.top_k)[0], None))
            except Exception as error:
                outcome.put(([], error))

        # Do not use a thread pool: if a search hangs, its threads keep Python from exiting.
        threading.Thread(target=work, daemon=True).start()
        try:
            passages, error = outcome.get(timeout=self.timeout)
        except queue.Empty:
            raise RetrieverError(
                f"no result within timeout={self.timeout:g} s: raise it, or find out why the retriever is slow."
            ) from None
        if error is not None:
            raise error
        return passages

    def _record_failure(self, error: Exception) -> None:
        """Count a failed search. Raise [`RetrieverDown`] after `max_failures` failures in a row."""
        with self._lock:
            self.calls += 1
            self.failures += 1
            self._failures_in_a_row += 1
            if self._failures_in_a_row == 1:
                logger.warning("search failed, and the model sees an error: %s: %s", type(error).__name__, error)
            if self._failures_in_a_row < self.max_failures:
                return
            self.down = RetrieverDown(
                f"{self._failures_in_a_row} searches in a row failed, the last one with {type(error).__name__}: "
                f"{error} Bring the search engine back, then resume the run or call the tool's `reset()`."
            )
        raise RetrieverDown(str(self.down)) from error

    def _render(self, passages: list[Passage]) -> str:
        lines = []
        for number, passage in enumerate(passages, 1):
            text = " ".join(passage.text.split())
            if len(text) > self.max_passage_chars:
                text = text[: self.max_passage_chars] + "..."
            if passage.title:
                text = f"(Title: {passage.title}) {text}"
            lines.append(f"Doc {number} {text}")
        return "\n".join(lines) or "No results."
