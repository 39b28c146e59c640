"""Search in a corpus of passages, local or over HTTP, and the search tool for agents."""

from trl_explore.retrieval.client import CachedRetriever, HTTPRetriever, RetrieverDown, RetrieverError, SearchTool
from trl_explore.retrieval.corpus import Passage, load_corpus
from trl_explore.retrieval.index import BM25Retriever, DenseRetriever, load_retriever

__all__ = [
    "BM25Retriever",
    "CachedRetriever",
    "DenseRetriever",
    "HTTPRetriever",
    "Passage",
    "RetrieverDown",
    "RetrieverError",
    "SearchTool",
    "load_corpus",
    "load_retriever",
]
