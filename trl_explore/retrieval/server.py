"""`trl-explore serve-retriever`: search over HTTP, with the protocol of Search-R1's retrieval server."""

import argparse
import socket
from collections.abc import Sequence
from typing import Annotated, Any

from trl_explore.errors import UsageError
from trl_explore.retrieval.client import MAX_QUERIES, MAX_QUERY_CHARS, CachedRetriever
from trl_explore.retrieval.index import Retriever, load_retriever

try:
    import uvicorn
    from fastapi import FastAPI, HTTPException, Request
    from fastapi.exception_handlers import http_exception_handler
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse, Response
    from pydantic import BaseModel, Field
    from starlette.datastructures import Headers
    from starlette.exceptions import HTTPException as AnyHTTPException
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.types import ASGIApp, Message, Receive, Scope, Send
except ImportError as error:
    raise ImportError("a retrieval server needs FastAPI and uvicorn: pip install 'trl-explore[serve]'") from error

MAX_TOP_K = 100
MAX_BODY_BYTES = 8 * 2**20
CACHED_QUERIES = 100_000
LOCAL = ("127.0.0.1", "localhost", "::1", "[::1]")  # versions of starlette differ in the brackets
ALL_INTERFACES = ("0.0.0.0", "::")


class Search(BaseModel):
    """Body of a request, with Search-R1's names."""

    queries: list[str]
    topk: int | None = None
    return_scores: bool = False


class BodyLimit:
    """Middleware that refuses bodies of more than `max_bytes` bytes with status 413, even if they declare fewer."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app, self.max_bytes = app, max_bytes
        self.sentence = f"the body has more than {max_bytes} bytes: send fewer or shorter queries"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        declared = ""
        if scope["type"] == "http":
            declared = Headers(scope=scope).get("content-length", "")
        if declared.isdecimal() and int(declared) > self.max_bytes:
            await JSONResponse({"detail": self.sentence}, status_code=413)(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.max_bytes:
                raise HTTPException(413, self.sentence)
            return message

        await self.app(scope, counted, send)


def build_app(
    retriever: Retriever,
    *,
    top_k: int = 3,
    max_queries: int = MAX_QUERIES,
    max_query_chars: int = MAX_QUERY_CHARS,
    max_top_k: int = MAX_TOP_K,
    max_body_bytes: int = MAX_BODY_BYTES,
    allowed_hosts: Sequence[str] = LOCAL,
) -> FastAPI:
    """
    Build the server, with `POST /retrieve` (see [`Search`]) and `GET /health`.

    Args:
        retriever ([`~trl_explore.retrieval.index.Retriever`]):
            Retriever to search with.
        top_k (`int`, *optional*, defaults to `3`):
            Number of passages per query if a request has no `topk`.
        max_queries (`int`, *optional*, defaults to `512`):
            Maximum number of queries per request.
        max_query_chars (`int`, *optional*, defaults to `10000`):
            Maximum number of characters per query.
        max_top_k (`int`, *optional*, defaults to `100`):
            Maximum `topk` of a request.
        max_body_bytes (`int`, *optional*, defaults to `8388608`):
            Maximum number of bytes of a request.
        allowed_hosts (`Sequence[str]`, *optional*):
            Host names that requests may address. By default the names of this machine.

    Returns:
        `FastAPI`: The server. It answers requests outside these limits with a status 4xx.
    """

    class Limited(Search):
        queries: list[Annotated[str, Field(max_length=max_query_chars)]] = Field(max_length=max_queries)
        topk: int | None = Field(None, ge=1, le=max_top_k)

    app = FastAPI(title="trl-explore retriever")
    app.add_middleware(BodyLimit, max_bytes=max_body_bytes)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(allowed_hosts), www_redirect=False)

    @app.post("/retrieve")
    def retrieve(request: Limited) -> dict[str, Any]:
        results = []
        for passages in retriever.search(request.queries, request.topk or top_k):
            hits: list[dict[str, Any]] = []
            for passage in passages:
                document = {"id": passage.id, "contents": passage.contents}
                # Search-R1's clients expect bare documents, unless they ask for scores.
                if request.return_scores:
                    hits.append({"document": document, "score": passage.score})
                else:
                    hits.append(document)
            results.append(hits)
        return {"result": results}

    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.exception_handler(RequestValidationError)
    async def explain(request: Request, error: RequestValidationError) -> JSONResponse:
        problem, *others = error.errors()
        sentence = f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"
        if others:
            sentence += f" (and {len(others)} more)"
        return JSONResponse({"detail": sentence}, status_code=422)

    @app.exception_handler(AnyHTTPException)
    async def explain_unreadable(request: Request, error: AnyHTTPException) -> Response:
        if error.status_code == 400:  # FastAPI could not parse the body
            return JSONResponse({"detail": "body: must be JSON in UTF-8, and not deeply nested"}, status_code=422)
        return await http_exception_handler(request, error)

    return app


def run(args: argparse.Namespace) -> int:
    """Run `trl-explore serve-retriever` until it is stopped. Raise a `UsageError` if an argument does not fit."""
    for name in ("max_queries", "max_query_chars", "max_top_k", "max_body_mb", "max_cache_mb"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name} {getattr(args, name)} must be at least 1")
    if not 1 <= args.top_k <= args.max_top_k:
        raise UsageError(f"--top_k {args.top_k} must be between 1 and {args.max_top_k}")
    hosts = _allowed_hosts(args.host, args.allowed_hosts)
    _check_port(args.host, args.port)
    try:
        retriever = load_retriever(args.retriever, args.corpus, index=args.index, model=args.model)
    except (ImportError, ValueError, OSError) as error:
        raise UsageError(str(error)) from error
    print(f"serving at http://{args.host}:{args.port}/retrieve", flush=True)
    if args.host in ALL_INTERFACES and not args.allowed_hosts:
        print(f"requests may address it as {' '.join(hosts)}; --allowed_hosts NAME ... adds others", flush=True)
    app = build_app(
        CachedRetriever(retriever, CACHED_QUERIES, max_bytes=args.max_cache_mb * 2**20),
        top_k=args.top_k,
        max_queries=args.max_queries,
        max_query_chars=args.max_query_chars,
        max_top_k=args.max_top_k,
        max_body_bytes=args.max_body_mb * 2**20,
        allowed_hosts=hosts,
    )
    uvicorn.run(app, host=args.host, port=args.port, log_level="warning")
    return 0


def _check_port(host: str, port: int) -> None:
    """Check that the server can listen at an address, before an index is built."""
    if not 1 <= port <= 65535:
        raise UsageError(f"--port {port} must be between 1 and 65535")
    try:
        family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
            probe.bind(address)
    except OSError as error:
        raise UsageError(f"--host {host} --port {port} cannot be served at: {error}; choose another port") from error


def _allowed_hosts(host: str, more: list[str]) -> list[str]:
    """Return the host names that requests may address: local names, the name of the server, and the user's."""
    for name in more:
        if name != "*" and "*" in name.removeprefix("*."):
            raise UsageError(f"--allowed_hosts {name} must be a name, an address, *.example.com or *")
    own = host
    if host in ALL_INTERFACES:
        own = socket.gethostname()
    return list(dict.fromkeys([*LOCAL, own, *more]))
