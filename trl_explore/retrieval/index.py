"""Search over a corpus of passages on this machine: BM25 (extra `retrieval`) and dense vectors (extra `dense`)."""

import hashlib
import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from trl_explore.retrieval.corpus import Corpus, Passage, load_corpus, read_passage

MANIFEST = "index.json"
SAME_VECTOR = 0.999  # cosine; another device or precision stays above it
FINGERPRINT_ROWS = 1000  # evenly spaced: the whole of Wikipedia would take minutes to hash

Encoder = Callable[[list[str]], Any]


class Retriever(Protocol):
    """Whatever finds passages."""

    def search(self, queries: list[str], top_k: int) -> list[list[Passage]]:
        """The best `top_k` passages for each of several queries, the best first; none where nothing fits."""
        ...


def _indexed_text(row: Mapping[str, Any]) -> str:
    passage = read_passage(row, default_id="")
    return f"{passage.title}\n{passage.text}".strip()


def _found(corpus: Corpus, positions: np.ndarray, scores: np.ndarray) -> list[Passage]:
    return [
        read_passage(corpus[int(position)], default_id=str(position), score=float(score))
        for position, score in zip(positions, scores, strict=True)
    ]


def _check_search(corpus: Corpus, top_k: int) -> int:
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
        raise ValueError(f"{folder} holds no index that was written to the end: build it again.")
    saved, expected = json.loads((folder / MANIFEST).read_text()), _describe(kind, corpus)
    if saved != expected:
        raise ValueError(
            f"{folder} is a {saved['retriever']} index of {saved['passages']} passages and not a {kind} index of this "
            f"corpus of {len(corpus)}: name another folder, or delete it to build it again."
        )


def has_index(folder: str | Path) -> bool:
    """Whether a folder holds an index that was written to its end."""
    return (Path(folder) / MANIFEST).is_file()


def _save_index(folder: Path, description: dict[str, Any], write: Callable[[Path], None]) -> None:
    """The manifest is there only while the rest is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)
    write(folder)
    (folder / MANIFEST).write_text(json.dumps(description))


class Shared:
    """A service, not a state: deep copies of whatever holds it, such as an environment, share it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


class BM25Retriever(Shared):
    """
    BM25 over English words (Lucene's variant by bm25s: stemmed, without stop words).

    Args:
        corpus ([`Corpus`]):
            Passages; a `ValueError` if there are none, or no words.
        index (`str` or `Path`, *optional*):
            Folder that [`~BM25Retriever.save`] wrote for this corpus (else a `ValueError`), instead of building one.

    Raises:
        ImportError: Without the extra `retrieval`.
    """

    def __init__(self, corpus: Corpus, *, index: str | Path | None = None) -> None:
        try:
            import bm25s
            import Stemmer  # noqa: F401  (asked for now rather than at the first query)
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
        """See [`Retriever`]. Passages without any word of the query are not results; ties go to the earlier
        passage."""
        top_k = _check_search(self.corpus, top_k)
        results = []
        for words in _words(queries):
            scores = self._index.get_scores(words) if words else np.zeros(len(self.corpus))
            best = _best(scores, top_k)
            results.append(_found(self.corpus, best, scores[best]))
        return results

    def save(self, folder: str | Path) -> None:
        """Save the index, without the corpus."""
        _save_index(Path(folder), _describe("bm25", self.corpus), self._index.save)


def _words(texts: list[str]) -> list[list[str]]:
    import bm25s
    import Stemmer

    # A stemmer of its own for every call: one must not be used by two threads.
    stemmer = Stemmer.Stemmer("english")
    return bm25s.tokenize(texts, stopwords="english", stemmer=stemmer, return_ids=False, show_progress=False)


def _best(scores: np.ndarray, top_k: int) -> np.ndarray:
    """Positions of the highest positive scores; bm25s' own selection breaks ties at random."""
    threshold = np.partition(scores, -top_k)[-top_k]
    candidates = np.flatnonzero((scores >= threshold) & (scores > 0))
    return candidates[np.argsort(-scores[candidates], kind="stable")][:top_k]


class DenseRetriever(Shared):
    """
    Exact search for the nearest vectors by cosine (FAISS, inner products of normalised vectors).

    Args:
        corpus ([`Corpus`]):
            Passages; a `ValueError` if there are none.
        encoder (`Callable[[list[str]], array]`):
            Vectors of texts, of shape (texts, dimensions). One call at a time.
        query_prefix (`str`, *optional*, defaults to `""`):
            Put before every query.
        passage_prefix (`str`, *optional*, defaults to `""`):
            Put before every passage.
        batch_size (`int`, *optional*, defaults to `1024`):
            Passages given to the encoder at once while the index is built.
        index (`str` or `Path`, *optional*):
            Folder that [`~DenseRetriever.save`] wrote for this corpus and encoder (else a `ValueError`).

    Raises:
        ImportError: Without the extra `dense`.
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
        self._lock = threading.Lock()  # tokenizers fail when two threads use one at the same time
        self._prefixes = query_prefix, passage_prefix
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
        """Search with a model of sentence-transformers, a Hub name or folder such as `"intfloat/e5-base-v2"`, whose
        prefixes are the defaults. Without a `device` the library chooses, and takes a GPU it sees."""
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
                f"the encoder must give an array of shape ({len(texts)}, dimensions) of finite numbers for "
                f"{len(texts)} texts, and gave one of shape {vectors.shape}."
            )
        return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)

    def _check_encoder(self, first: np.ndarray, folder: Path) -> None:
        """Another model, or other prefixes, would find nonsense without a word."""
        if first.shape[1] != self._index.d or first[0] @ self._index.reconstruct(0) < SAME_VECTOR:
            raise ValueError(
                f"{folder} was built with another encoder or prefix: its vectors of the first passage differ. Use the "
                "same ones, or build it again in another folder."
            )

    def search(self, queries: list[str], top_k: int) -> list[list[Passage]]:
        """See [`Retriever`]; scores are cosines, and a blank query finds nothing."""
        top_k = _check_search(self.corpus, top_k)
        results: list[list[Passage]] = [[] for _ in queries]
        asked = [place for place, query in enumerate(queries) if query.strip()]
        if not asked:
            return results
        vectors = self._encode([self._prefixes[0] + queries[place] for place in asked])
        for place, scores, positions in zip(asked, *self._index.search(vectors, top_k), strict=True):
            order = np.lexsort((positions, -scores))
            results[place] = _found(self.corpus, positions[order], scores[order])
        return results

    def save(self, folder: str | Path) -> None:
        """Save the vectors, without corpus and encoder."""
        import faiss

        def write(path: Path) -> None:
            faiss.write_index(self._index, str(path / "vectors.faiss"))

        _save_index(Path(folder), _describe("dense", self.corpus), write)


def load_retriever(kind: str, corpus_path: str, *, index: str | None, model: str) -> BM25Retriever | DenseRetriever:
    """Load a corpus and its index (`kind` `"bm25"` or `"dense"`); an index folder that is not there is built and
    saved, and without one it is built and not kept. `ImportError` without the extra, `ValueError` or `OSError` for
    unfit files."""
    corpus = load_corpus(corpus_path)
    folder = Path(index).expanduser() if index else None
    saved = folder if folder and has_index(folder) else None
    print(f"{len(corpus)} passages; {'loading' if saved else 'building'} the {kind} index ...", flush=True)
    retriever: BM25Retriever | DenseRetriever
    if kind == "bm25":
        retriever = BM25Retriever(corpus, index=saved)
    else:
        retriever = DenseRetriever.from_model(model, corpus, index=saved)
    if folder and not saved:
        retriever.save(folder)
    return retriever
