"""Embeddings of texts, whose cosine measures similarity."""

from collections.abc import Callable
from typing import Any

import torch

NGRAMS = "ngrams"
Embedder = Callable[[list[str]], torch.Tensor]  # maps texts `[M]` to vectors `(M, D)`


def reasoning(text: str) -> str:
    """Return the text after the last `</think>`, which the authors' code compares. If there is no such mark, or no
    text after it, return the whole text."""
    return text.rpartition("</think>")[2].strip() or text


def make_embedder(name: str, *, device: Any, batch_size: int) -> Embedder:
    """
    Create an embedder.

    Args:
        name (`str`):
            Hub name or folder of a model of sentence-transformers, or `"ngrams"` for counts of the sequences of three
            characters that occur in a text.
        device (`torch.device` or `str`):
            Device of the model.
        batch_size (`int`):
            Batch size of the model.

    Returns:
        `Callable[[list[str]], torch.Tensor]`: Maps texts `[M]` to vectors `(M, D)` on the CPU.

    Raises:
        `ImportError`: If a model is given and the extra `dense` is not installed.
        `ValueError`: If the model cannot be loaded.
    """
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
        vectors = model.encode(texts, batch_size=batch_size, show_progress_bar=False, convert_to_tensor=True)
        return vectors.float().cpu()

    return embed


def _count_ngrams(texts: list[str]) -> torch.Tensor:
    from sklearn.feature_extraction.text import HashingVectorizer

    counts = HashingVectorizer(analyzer="char", ngram_range=(3, 3), n_features=2**12, alternate_sign=False, norm=None)
    return torch.from_numpy(counts.transform(texts).toarray()).float()
