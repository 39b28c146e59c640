"""`trl-explore serve-retriever`: a corpus behind HTTP, with the protocol of Search-R1's retrieval server."""

import argparse
from typing import Any

from trl_explore.cli_inputs import UsageError
from trl_explore.retrieval import Retriever, load_retriever
from trl_explore.retrieval_client import MAX_QUERIES, CachedRetriever

try:
    import uvicorn
    from fastapi import FastAPI, Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse
    from pydantic import BaseModel, Field
except ImportError as error:
    raise ImportError("a retrieval server needs FastAPI and uvicorn: pip install 'trl-explore[serve]'") from error

MAX_TOP_K = 100
CACHED_QUERIES = 100_000


class Search(BaseModel):
    """Body of a request; the names are Search-R1's."""

    queries: list[str] = Field(max_length=MAX_QUERIES)
    topk: int | None = Field(None, ge=1, le=MAX_TOP_K)
    return_scores: bool = False


def build_app(retriever: Retriever, *, top_k: int = 3) -> FastAPI:
    """
    The server: `POST /retrieve` as described in [`Search`], and `GET /health`.

    Args:
        retriever ([`~trl_explore.retrieval.Retriever`]):
            What is searched; several threads use it at once.
        top_k (`int`, *optional*, defaults to `3`):
            Passages per query of requests that do not say how many.

    Returns:
        `FastAPI`: The application. Requests it does not understand get status 422 and one sentence.
    """
    app = FastAPI(title="trl-explore retriever")

    @app.post("/retrieve")
    def retrieve(request: Search) -> dict[str, Any]:
        results = []
        for passages in retriever.search(request.queries, request.topk or top_k):
            documents = [{"id": passage.id, "contents": passage.contents} for passage in passages]
            scored = [
                {"document": document, "score": passage.score}
                for document, passage in zip(documents, passages, strict=True)
            ]
            results.append(scored if request.return_scores else documents)
        return {"result": results}

    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.exception_handler(RequestValidationError)
    async def explain(request: Request, error: RequestValidationError) -> JSONResponse:
        problems = [f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()]
        return JSONResponse({"detail": "; ".join(problems)}, status_code=422)

    return app


def run(args: argparse.Namespace) -> int:
    """
    Runs `trl-explore serve-retriever` until it is stopped.

    Args:
        args (`argparse.Namespace`):
            Flags of the sub-command.

    Returns:
        `int`: `0`.
    """
    if not 1 <= args.top_k <= MAX_TOP_K:
        raise UsageError(f"--top_k {args.top_k} must be between 1 and {MAX_TOP_K}")
    try:
        retriever = load_retriever(args.retriever, args.corpus, index=args.index, model=args.model)
    except (ImportError, ValueError, OSError) as error:
        raise UsageError(str(error)) from error
    print(f"serving at http://{args.host}:{args.port}/retrieve", flush=True)
    app = build_app(CachedRetriever(retriever, CACHED_QUERIES), top_k=args.top_k)
    uvicorn.run(app, host=args.host, port=args.port, log_level="warning")
    return 0
