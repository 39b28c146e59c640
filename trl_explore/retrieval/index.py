"""Local search in a corpus of passages: BM25 (extra `retrieval`) and dense vectors (extra `dense`)."""

import hashlib
import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from trl_explore.retrieval.corpus import Corpus, Passage, load_corpus, read_passage

MANIFEST = "index.json"
SAME_VECTOR = 0.999  # minimum cosine of two vectors of one text, computed on different devices or in other precisions
FINGERPRINT_ROWS = 1000  # minimum number of evenly spaced rows to hash; hashing all of Wikipedia would take minutes

Encoder = Callable[[list[str]], Any]


class Retriever(Protocol):
    """Object that searches for passages."""

    def search(self, queries: list[str], top_k: int) -> list[list[Passage]]:
        """
        Search for passages.

        Args:
            queries (`list[str]`):
                Queries, `[Q]`.
            top_k (`int`):
                Maximum number of passages per query.

        Returns:
            `list[list[Passage]]`: Passages for each query, `[Q]`, the best first. Empty if no passage matches.
        """
        ...


def _indexed_text(row: Mapping[str, Any]) -> str:
    passage = read_passage(row, default_id="")
    return f"{passage.title}\n{passage.text}".strip()


def _found(corpus: Corpus, positions: np.ndarray, scores: np.ndarray) -> list[Passage]:
    return [
        read_passage(corpus[int(position)], default_id=str(position), score=float(score))
        for position, score in zip(positions, scores, strict=True)
    ]


def _limited_top_k(corpus: Corpus, top_k: int) -> int:
    if top_k < 1:
        raise ValueError(f"top_k={top_k} must be at least 1.")
    return min(top_k, len(corpus))


def _check_corpus(corpus: Corpus) -> Corpus:
    if not len(corpus):
        raise ValueError("the corpus is empty: a retriever needs at least one passage.")
    return corpus


def _describe(kind: str, corpus: Corpus) -> dict[str, Any]:
    digest = hashlib.sha256()
    for position in range(0, len(corpus), max(1, len(corpus) // FINGERPRINT_ROWS)):
        digest.update(_indexed_text(corpus[position]).encode("utf-8", "replace") + b"\0")
    return {"retriever": kind, "passages": len(corpus), "fingerprint": digest.hexdigest()}


def _check_index(folder: Path, kind: str, corpus: Corpus) -> None:
    if not has_index(folder):
        raise ValueError(f"{folder} has no complete index: build it again.")
    saved, expected = json.loads((folder / MANIFEST).read_text()), _describe(kind, corpus)
    if saved != expected:
        raise ValueError(
            f"{folder} is a {saved['retriever']} index of {saved['passages']} passages and not a {kind} index of this "
            f"corpus of {len(corpus)}: name another folder, or delete it to build it again."
        )


def has_index(folder: str | Path) -> bool:
    """Return whether a folder has a complete index."""
    return (Path(folder) / MANIFEST).is_file()


def _save_index(folder: Path, description: dict[str, Any], write: Callable[[Path], None]) -> None:
    """Write an index. The manifest is written last, so that its existence shows that the index is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)
    write(folder)
    (folder / MANIFEST).write_text(json.dumps(description))


class Shared:
    """Base class of services. A deep copy of an object, such as an environment, shares the service with the object."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


class BM25Retriever(Shared):
    """
    BM25 over English words (Lucene's variant by bm25s: stemmed, without stop words).

    Args:
        corpus ([`Corpus`]):
            Passages.
        index (`str` or `Path`, *optional*):
            Folder that [`~BM25Retriever.save`] wrote for this corpus. `None` builds an index.

    Raises:
        `ImportError`: If the extra `retrieval` is not installed.
        `ValueError`: If the corpus has no passages or no words, or if the index belongs to another corpus.
    """

    def __init__(self, corpus: Corpus, *, index: str | Path | None = None) -> None:
        try:
            import bm25s
            import Stemmer  # noqa: F401  (so that it does not fail at the first query)
        except ImportError as error:
            raise ImportError("BM25Retriever needs bm25s: pip install 'trl-explore[retrieval]'") from error
        self.corpus = _check_corpus(corpus)
        if index is not None:
            _check_index(Path(index), "bm25", corpus)
            self._index = bm25s.BM25.load(index)
            return
        tokens = _words([_indexed_text(row) for row in corpus])
        if not any(tokens):
            raise ValueError("no passage has a word that BM25 can index (two letters or more, no stop word).")
        self._index = bm25s.BM25()
        self._index.index(tokens, show_progress=False)

    def search(self, queries: list[str], top_k: int) -> list[list[Passage]]:
        """
        Search as in [`Retriever`].

        A passage without any word of the query is not a result. With equal scores, the earlier passage comes first.
        """
        top_k = _limited_top_k(self.corpus, top_k)
        results: list[list[Passage]] = []
        for words in _words(queries):
            if not words:
                results.append([])
                continue
            scores = self._index.get_scores(words)
            best = _best(scores, top_k)
            results.append(_found(self.corpus, best, scores[best]))
        return results

    def save(self, folder: str | Path) -> None:
        """Save the index, without the corpus."""
        _save_index(Path(folder), _describe("bm25", self.corpus), self._index.save)


def _words(texts: list[str]) -> list[list[str]]:
    import bm25s
    import Stemmer

    # Create a stemmer in every call, because two threads must not share one.
    stemmer = Stemmer.Stemmer("english")
    return bm25s.tokenize(texts, stopwords="english", stemmer=stemmer, return_ids=False, show_progress=False)


def _best(scores: np.ndarray, top_k: int) -> np.ndarray:
    """Return positions of the highest positive scores. bm25s itself would break ties at random."""
    threshold = np.partition(scores, -top_k)[-top_k]
    candidates = np.flatnonzero((scores >= threshold) & (scores > 0))
    return candidates[np.argsort(-scores[candidates], kind="stable")][:top_k]


class DenseRetriever(Shared):
    """
    Exact search for the vectors with the highest cosine (FAISS, inner products of normalized vectors).

    Args:
        corpus ([`Corpus`]):
            Passages.
        encoder (`Callable[[list[str]], array]`):
            Maps texts `[N]` to vectors `(N, D)`. Calls do not overlap.
        query_prefix (`str`, *optional*, defaults to `""`):
            Text before every query.
        passage_prefix (`str`, *optional*, defaults to `""`):
            Text before every passage.
        batch_size (`int`, *optional*, defaults to `1024`):
            Number of passages per call of the encoder while the index is built.
        index (`str` or `Path`, *optional*):
            Folder that [`~DenseRetriever.save`] wrote for this corpus and encoder. `None` builds an index.

    Raises:
        `ImportError`: If the extra `dense` is not installed.
        `ValueError`: If the corpus is empty, or if the index belongs to another corpus, encoder or passage prefix.
    """

    def __init__(
        self,
        corpus: Corpus,
        encoder: Encoder,
        *,
        query_prefix: str = "",
        passage_prefix: str = "",
        batch_size: int = 1024,
        index: str | Path | None = None,
    ) -> None:
        try:
            import faiss
        except ImportError as error:
            raise ImportError("DenseRetriever needs faiss: pip install 'trl-explore[dense]'") from error
        self.corpus = _check_corpus(corpus)
        self._encoder = encoder
        self._lock = threading.Lock()  # a tokenizer fails if two threads use it at the same time
        self._query_prefix = query_prefix
        first = self._encode([passage_prefix + _indexed_text(corpus[0])])
        if index is not None:
            _check_index(Path(index), "dense", corpus)
            self._index = faiss.read_index(str(Path(index) / "vectors.faiss"))
            self._check_encoder(first, Path(index))
            return
        self._index = faiss.IndexFlatIP(first.shape[1])
        texts: list[str] = []
        for number, row in enumerate(corpus, 1):
            texts.append(passage_prefix + _indexed_text(row))
            if len(texts) == batch_size or number == len(corpus):
                self._index.add(self._encode(texts))
                texts = []

    @classmethod
    def from_model(
        cls,
        name: str,
        corpus: Corpus,
        *,
        device: str | None = None,
        query_prefix: str = "query: ",
        passage_prefix: str = "passage: ",
        batch_size: int = 64,
        index: str | Path | None = None,
    ) -> "DenseRetriever":
        """
        Create a retriever with a model of sentence-transformers as its encoder.

        Args:
            name (`str`):
                Hub name or folder, such as `"intfloat/e5-base-v2"`.
            corpus ([`Corpus`]):
                Passages.
            device (`str`, *optional*):
                Device of the model. `None` lets the library choose, which prefers a GPU.
            query_prefix (`str`, *optional*, defaults to `"query: "`):
                Text before every query. The default is the one of E5 models.
            passage_prefix (`str`, *optional*, defaults to `"passage: "`):
                Text before every passage. The default is the one of E5 models.
            batch_size (`int`, *optional*, defaults to `64`):
                Batch size of the model.
            index (`str` or `Path`, *optional*):
                Folder that [`~DenseRetriever.save`] wrote for this corpus and model. `None` builds an index.

        Returns:
            `DenseRetriever`: The retriever.

        Raises:
            `ImportError`: If the extra `dense` is not installed.
        """
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError as error:
            raise ImportError("from_model needs sentence-transformers: pip install 'trl-explore[dense]'") from error
        model = SentenceTransformer(name, device=device)

        def encode(texts: list[str]) -> Any:
            return model.encode(texts, batch_size=batch_size, show_progress_bar=False)

        return cls(corpus, encode, query_prefix=query_prefix, passage_prefix=passage_prefix, index=index)

    def _encode(self, texts: list[str]) -> np.ndarray:
        with self._lock:
            vectors = np.array(self._encoder(texts), dtype=np.float32, order="C")
        if vectors.ndim != 2 or len(vectors) != len(texts) or not np.isfinite(vectors).all():
            raise ValueError(
                f"the encoder must return an array of shape ({len(texts)}, dimensions) of finite numbers for "
                f"{len(texts)} texts, but returned one of shape {vectors.shape}."
            )
        return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)

    def _check_encoder(self, first: np.ndarray, folder: Path) -> None:
        """Check the encoder, because another model or prefix would silently return unrelated passages."""
        if first.shape[1] != self._index.d or first[0] @ self._index.reconstruct(0) < SAME_VECTOR:
            raise ValueError(
                f"{folder} was built with another encoder or prefix: its vectors of the first passage differ. Use the "
                "same ones, or build it again in another folder."
            )

    def search(self, queries: list[str], top_k: int) -> list[list[Passage]]:
        """Search as in [`Retriever`]. Scores are cosines. A blank query has no results."""
        top_k = _limited_top_k(self.corpus, top_k)
        results: list[list[Passage]] = [[] for _ in queries]
        places = [place for place, query in enumerate(queries) if query.strip()]
        if not places:
            return results
        vectors = self._encode([self._query_prefix + queries[place] for place in places])
        for place, scores, positions in zip(places, *self._index.search(vectors, top_k), strict=True):
            order = np.lexsort((positions, -scores))  # with equal scores, the earlier passage comes first
            results[place] = _found(self.corpus, positions[order], scores[order])
        return results

    def save(self, folder: str | Path) -> None:
        """Save the vectors, without the corpus and the encoder."""
        import faiss

        def write(path: Path) -> None:
            faiss.write_index(self._index, str(path / "vectors.faiss"))

        _save_index(Path(folder), _describe("dense", self.corpus), write)


def load_retriever(kind: str, corpus_path: str, *, index: str | None, model: str) -> BM25Retriever | DenseRetriever:
    """
    Load a corpus and its index, or build the index.

    Args:
        kind (`str`):
            `"bm25"` or `"dense"`.
        corpus_path (`str`):
            File that [`~trl_explore.retrieval.corpus.load_corpus`] reads.
        index (`str` or `None`):
            Folder of the index. If it has no index, one is built and saved there. `None` does not save the index.
        model (`str`):
            Model of sentence-transformers, for `"dense"`.

    Returns:
        `BM25Retriever` or `DenseRetriever`: The retriever.

    Raises:
        `ImportError`: If the extra is not installed.
        `ValueError` or `OSError`: If a file cannot be read or does not fit.
    """
    corpus = load_corpus(corpus_path)
    folder = saved = None
    action = "building"
    if index:
        folder = Path(index).expanduser()
        if has_index(folder):
            saved, action = folder, "loading"
    print(f"{len(corpus)} passages; {action} the {kind} index ...", flush=True)
    retriever: BM25Retriever | DenseRetriever
    if kind == "bm25":
        retriever = BM25Retriever(corpus, index=saved)
    else:
        retriever = DenseRetriever.from_model(model, corpus, index=saved)
    if folder and not saved:
        retriever.save(folder)
    return retriever
