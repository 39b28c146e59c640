"""Dead services: exceptions of tools and environments that show one, and the number of failed calls in a row."""

import errno
import socket
import subprocess
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trl_explore.retrieval.client import RetrieverDown, RetrieverError

# End the run after this many failed calls in a row, if no other call of their generation batches succeeded.
MOST_FAILURES = 8

# Names of exception classes that clients raise if they get no connection or no answer in time (requests, urllib3,
# httpx, aiohttp, redis, openai, botocore). Names, because none of these packages has to be installed.
CONNECTION_ERRORS = frozenset(
    {
        "ConnectionError",
        "ConnectError",
        "ConnectTimeout",
        "ReadTimeout",
        "PoolTimeout",
        "WriteTimeout",
        "NetworkError",
        "RemoteProtocolError",
        "RemoteDisconnected",
        "MaxRetryError",
        "NewConnectionError",
        "ConnectTimeoutError",
        "ReadTimeoutError",
        "ProtocolError",
        "ClientConnectionError",
        "ServerTimeoutError",
        "APIConnectionError",
        "HTTPClientError",
    }
)
GATEWAY_ERRORS = (502, 503, 504)  # HTTP statuses of a proxy whose server is gone, and of a server that is overloaded
NETWORK_ERRORS = (errno.ETIMEDOUT, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN)
UNKNOWN_HOST = (socket.EAI_NONAME, socket.EAI_NODATA)  # of `socket.gaierror`: the host name does not exist
SOCKET_MODULES = ("socket", "ssl")  # a timeout that is raised in one of these modules is a timeout of a connection

# A wrong argument, or code that the model wrote, can raise these.
MISTAKES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    OSError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
    subprocess.SubprocessError,
)


def is_outage(error: BaseException) -> bool:
    """
    Return whether an exception, or an exception from which it was raised, shows that a service did not answer.

    Refused and lost connections, timeouts of sockets and the errors of HTTP clients for these are outages. Other
    `OSError`s are not: a model that names a path that does not exist gets a `FileNotFoundError`, and code that the
    model wrote may run into any timeout. An unknown host is not an outage either, because the model may have named it.
    """
    if isinstance(error, RetrieverError) and not isinstance(error, RetrieverDown):
        # `RetrieverError` is a `ConnectionError`, but `SearchTool` raises it for every exception of its retriever. If
        # that exception can come from a query that the retriever cannot read, take it as a mistake of the model.
        cause = error.__cause__
        if cause is not None and not isinstance(cause, OSError) and may_be_mistake(cause):
            return False
    chain = list(_chain(error))
    if any(isinstance(link, socket.gaierror) and link.errno in UNKNOWN_HOST for link in chain):
        return False
    return any(_says_outage(link) for link in chain)


def may_be_mistake(error: BaseException) -> bool:
    """Return whether a wrong call by the model can raise this exception."""
    return isinstance(error, MISTAKES) and not is_outage(error)


def names_address(arguments: Mapping[str, Any]) -> bool:
    """Return whether an argument of a call is a text with a URL. Then the model chose the address, which may be wrong.
    Texts inside lists and dictionaries are not searched."""
    return any(isinstance(value, str) and "://" in value for value in arguments.values())


class Streak:
    """Counts the failed calls (or environments) of the last generation batches in a row in which none succeeded."""

    def __init__(self) -> None:
        self.failures = self.batches = 0

    def add(self, *, failed: float, total: float) -> None:
        """Count the calls of one generation batch. A batch without calls changes nothing."""
        if not total:
            return
        if failed < total:
            self.failures = self.batches = 0
            return
        self.failures += int(failed)
        self.batches += 1

    @property
    def is_long(self) -> bool:
        """True if enough calls in a row failed to end the run."""
        return self.failures >= MOST_FAILURES

    def describe(self, what: str) -> str:
        """Return a clause such as "every tool call of this generation batch raised (8 of 8)"."""
        batches = "this generation batch" if self.batches == 1 else f"the last {self.batches} generation batches"
        return f"every {what} of {batches} raised ({self.failures} of {self.failures})"


def stop_if_long(streak: Streak, what: str, error: BaseException | None, save: Callable[[], str]) -> None:
    """If a streak is long, save a checkpoint and raise a RuntimeError. `what` names the calls, as in
    [`Streak.describe`]. `error` is the last error of the streak on this process, or None."""
    if streak.is_long:
        raise RuntimeError(f"{streak.describe(what)}, the last one {describe_error(error)}. {save()}") from error


def describe_error(error: BaseException | None) -> str:
    """Describe the last error of this process for "the last one ...". If `error` is None, only other processes had
    errors, so refer to their output."""
    return "shown by another process" if error is None else f"{type(error).__name__}: {error.__cause__ or error}"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and, recursively, the exceptions that led to it: the members of a group, the cause, the
    exception that was being handled, and the `reason` of a `URLError`."""
    waiting: list[BaseException] = [error]
    seen: set[int] = set()
    while waiting:
        link = waiting.pop()
        if id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        if isinstance(link, BaseExceptionGroup):
            waiting += link.exceptions
        if link.__cause__ is not None:
            waiting.append(link.__cause__)
        # An exception that a handler raises has the handled exception as its context. If a cache is down and the
        # handler raises a `ToolError`, that error is about the cache. An `OSError` of `open(path)` in the handler is
        # about the path, so its context does not count.
        elif link.__context__ is not None and not link.__suppress_context__ and not isinstance(link, OSError):
            waiting.append(link.__context__)
        reason = link.__dict__.get("reason")  # `urllib.error.URLError` keeps its cause there
        if isinstance(reason, BaseException):
            waiting.append(reason)


def _says_outage(error: BaseException) -> bool:
    """Return whether an exception by itself shows an outage. The exceptions that led to it are not looked at."""
    if isinstance(error, BrokenPipeError):  # a process that the tool started has ended
        return False
    if any(cls.__name__ in CONNECTION_ERRORS for cls in type(error).__mro__):
        return True
    if _http_status(error) in GATEWAY_ERRORS:
        return True
    if isinstance(error, socket.gaierror):
        return True
    if isinstance(error, TimeoutError) and _was_raised_by_socket(error):
        return True
    return isinstance(error, OSError) and error.errno in NETWORK_ERRORS


def _http_status(error: BaseException) -> Any:
    """Return the HTTP status that an exception of urllib, aiohttp, requests or httpx carries, or None."""
    # Exceptions come from any package, so the attributes are looked up by name.
    response = getattr(error, "response", None)
    found = [getattr(error, "code", None), getattr(error, "status", None), getattr(response, "status_code", None)]
    return next((status for status in found if isinstance(status, int)), None)


def _was_raised_by_socket(error: BaseException) -> bool:
    """Return whether code of `socket` or `ssl` is in the traceback."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_globals.get("__name__") in SOCKET_MODULES for frame, _ in frames)
