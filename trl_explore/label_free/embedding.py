"""Texts as vectors whose cosine says how alike they are."""

from collections.abc import Callable
from typing import Any

import torch

NGRAMS = "ngrams"
Embedder = Callable[[list[str]], torch.Tensor]  # texts `[M]` to vectors `(M, D)`


def reasoning(text: str) -> str:
    """What a completion says behind its thoughts, as the authors' code compares it; all where it marks none."""
    return text.rpartition("</think>")[2].strip() or text


def make_embedder(name: str, *, device: Any, batch_size: int) -> Embedder:
    """A model of sentence-transformers by its name or folder, or `"ngrams"`: counts of three characters. ImportError
    without the extra `dense`, ValueError for a model that is not there."""
    if name == NGRAMS:
        return _count_ngrams
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise ImportError(
            f"`embedding_model={name!r}` needs sentence-transformers: pip install 'trl-explore[dense]', or set "
            f"`embedding_model={NGRAMS!r}`, which compares characters."
        ) from error
    try:
        model = SentenceTransformer(name, device=str(device))
    except OSError as error:
        raise ValueError(
            f"`embedding_model={name!r}` cannot be loaded ({str(error).splitlines()[0]}): give a name on the Hub or a "
            f"folder, or set it to {NGRAMS!r}."
        ) from error

    def embed(texts: list[str]) -> torch.Tensor:
        found = model.encode(texts, batch_size=batch_size, show_progress_bar=False, convert_to_tensor=True)
        return found.float().cpu()

    return embed


def _count_ngrams(texts: list[str]) -> torch.Tensor:
    from sklearn.feature_extraction.text import HashingVectorizer

    counts = HashingVectorizer(analyzer="char", ngram_range=(3, 3), n_features=2**12, alternate_sign=False, norm=None)
    return torch.from_numpy(counts.transform(texts).toarray()).float()
