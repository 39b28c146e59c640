"""Processes that do one job after the other, share nothing, and stop in order when their parent hangs up."""

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

from trl_explore.runs.quiet import without_noise

AT_WORK, DONE, FAILED = "at work", "done", "failed"
NOTICE = "\nInterrupted: what is running is saved at the end of its step, then all stops. Ctrl-C again aborts now."


class WorkerFailed(Exception):
    """A job raised, or its process died; `details` is the traceback, empty where there is none."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


@dataclass(frozen=True)
class Job:
    """What a process is to do: `function(connection, *arguments)`, called by its name in messages."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


def count_cores() -> int:
    """How many CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


class Workers:
    """Processes that do jobs. They share nothing, so that one that dies does not block the others."""

    def __init__(self, count: int) -> None:
        # Not forked: a process that has used a GPU or several threads cannot be.
        context = multiprocessing.get_context("spawn")
        self.processes: dict[Connection, BaseProcess] = {}
        # Ctrl-C reaches every process of a terminal. These leave it to their parent, from their first moment on.
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
        if kind is KeyboardInterrupt:
            print(NOTICE, file=sys.stderr, flush=True)
        self.close()

    def do(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, str, Any]]:
        """Have jobs done in their order by all processes; yields a job, `AT_WORK` or `DONE`, and a value."""
        left, busy = list(jobs), dict[Connection, Job]()
        while left or busy:
            for connection in self.processes:
                if left and connection not in busy:
                    busy[connection] = left.pop(0)
                    with suppress(ConnectionError):  # a process that has died is noticed next
                        connection.send(busy[connection])
            for connection in cast(list[Connection], wait(list(busy))):
                job = busy[connection]
                kind, value = self._hear(connection, job)
                if kind == DONE:
                    del busy[connection]
                yield job, kind, value

    def close(self) -> None:
        """Hangs up and waits until every process has stopped, those at work at their next step."""
        try:
            for connection in self.processes:
                connection.close()
            for process in self.processes.values():
                process.join()
        finally:
            self.kill()

    def kill(self) -> None:
        """Ends all processes at once."""
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
        return kind, value


def death(code: int | None) -> str:
    """How a process ended, as the end of a sentence."""
    if code == -9:
        return "was killed, as a system does that runs out of memory"
    return f"was ended by signal {-code}" if code and code < 0 else f"ended with exit code {code}"


def serve(connection: Connection) -> None:
    """Do jobs until the parent hangs up: what a process of [`Workers`] runs."""
    # By default bars share a lock between processes, which a process that is killed leaves behind, and Python says so.
    tqdm.set_lock(threading.RLock())
    with without_noise(), suppress(EOFError, ConnectionError, KeyboardInterrupt):
        while True:
            job = connection.recv()
            try:
                message = (DONE, job.function(connection, *job.arguments))
            except Exception as error:
                message = (FAILED, (f"{type(error).__name__}: {error}", traceback.format_exc()))
            connection.send(message)
