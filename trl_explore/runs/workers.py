"""Worker processes that do one job after another. They share nothing, and stop when their parent disconnects."""

import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, cast

from tqdm import tqdm

from trl_explore.errors import UsageError
from trl_explore.runs.quiet import without_noise

AT_WORK, DONE, FAILED, REFUSED = "at work", "done", "failed", "refused"
NOTICE = "\nInterrupted: each run is saved after its current step, then all stop. Ctrl-C again aborts now."


class WorkerFailed(Exception):
    """
    Raised when a job raised an exception other than `UsageError`, or its process died.

    Args:
        message (`str`):
            Message for the user.
        details (`str`, *optional*, defaults to `""`):
            Traceback of the job's exception.
    """

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


@dataclass(frozen=True)
class Job:
    """
    Job of a worker process: the call `function(connection, *arguments)`.

    Args:
        name (`str`):
            Name of the job in messages.
        function (`Callable`):
            Function that pickle can send to another process. It may send values to the parent process with
            `connection.send((AT_WORK, value))`. The parent gets its result too.
        arguments (`tuple`):
            Further arguments of the function.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


def count_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Workers:
    """
    Pool of worker processes. They share nothing, so a process that dies does not block the others.

    Args:
        count (`int`):
            Number of processes.
    """

    def __init__(self, count: int) -> None:
        # Forking is not safe after a process has used a GPU or several threads.
        context = multiprocessing.get_context("spawn")
        self.processes: dict[Connection, BaseProcess] = {}
        self._busy: dict[Connection, Job] = {}  # jobs that run now
        # Ctrl-C reaches every process of a terminal, but only the parent is to handle it. The workers inherit SIG_IGN.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            for _ in range(count):
                ours, theirs = context.Pipe()
                process = context.Process(target=serve, args=(theirs,))
                process.start()
                theirs.close()
                self.processes[ours] = process
        finally:
            signal.signal(signal.SIGINT, before)

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is KeyboardInterrupt and self._busy:  # without a running job, there is nothing to save
            print(NOTICE, file=sys.stderr, flush=True)
        self.close()

    def do(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, str, Any]]:
        """
        Distribute jobs to the processes in their order, and yield the messages of the jobs.

        Args:
            jobs (`Sequence[Job]`):
                The jobs.

        Yields:
            `tuple[Job, str, Any]`: A job, `AT_WORK` with a value that the job sent, or `DONE` with its result.

        Raises:
            UsageError: If a job raised a `UsageError`, with the same message.
            WorkerFailed: If a job raised another exception, or its process died.
        """
        left = list(jobs)
        busy = self._busy
        while left or busy:
            for connection in self.processes:
                if left and connection not in busy:
                    busy[connection] = left.pop(0)
                    with suppress(ConnectionError):  # the process has died, which `_hear` reports below
                        connection.send(busy[connection])
            for connection in cast(list[Connection], wait(list(busy))):
                job = busy[connection]
                kind, value = self._hear(connection, job)
                if kind == DONE:
                    del busy[connection]
                yield job, kind, value

    def close(self) -> None:
        """Close the connections and wait until every process has stopped. A running job stops after its next step."""
        try:
            for connection in self.processes:
                connection.close()
            for process in self.processes.values():
                process.join()
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill all processes, without waiting for their jobs."""
        self._busy.clear()
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.join()

    def _hear(self, connection: Connection, job: Job) -> tuple[str, Any]:
        try:
            kind, value = connection.recv()
        except (EOFError, ConnectionError):
            process = self.processes[connection]
            process.join()
            raise WorkerFailed(f"the process of {job.name} {death(process.exitcode)}") from None
        if kind == FAILED:
            error, details = value
            raise WorkerFailed(f"{job.name} ended in {error}", details)
        if kind == REFUSED:
            raise UsageError(value)
        return kind, value


def death(code: int | None) -> str:
    """Describe how a process ended, as the end of a sentence."""
    if code == -9:
        return "was killed, probably because the machine ran out of memory"
    if code and code < 0:
        return f"was ended by signal {-code}"
    return f"ended with exit code {code}"


def serve(connection: Connection) -> None:
    """Run jobs in a process of [`Workers`] until the parent closes the connection."""
    # By default, tqdm shares a lock between processes. Python warns about this lock if a process is killed.
    tqdm.set_lock(threading.RLock())
    with without_noise(), suppress(EOFError, ConnectionError, KeyboardInterrupt):
        while True:
            job = connection.recv()
            try:
                message = (DONE, job.function(connection, *job.arguments))
            except UsageError as error:
                message = (REFUSED, str(error))
            except Exception as error:
                message = (FAILED, (f"{type(error).__name__}: {error}", traceback.format_exc()))
            connection.send(message)
