"""Environments that raise: what TRL's loop sees of them, and what is the model's own mistake."""

import asyncio
import copy
import errno
import inspect
import json
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from email.message import Message
from pathlib import Path

import pytest
import requests
from transformers.utils import get_json_schema

from trl_explore.agents.environments import environment_error, guarded
from trl_explore.agents.outages import Streak, is_outage, may_be_mistake
from trl_explore.agents.snapshots import has_own_snapshots
from trl_explore.agents.watch import ToolWatch
from trl_explore.retrieval.client import RetrieverDown, RetrieverError, SearchTool


class Door:
    """Breaks where the test says."""

    def __init__(self, breaks=()):
        self.breaks = breaks
        self.opened = 0

    def reset(self, word="", **columns):
        if "reset" in self.breaks:
            raise RuntimeError("no key")
        self.opened = 0
        return f"door {word}"

    def open(self, hand: str, force: int = 1) -> str:
        """
        Opens the door.

        Args:
            hand: Which hand.
            force: How strongly.

        Returns:
            What happens.
        """
        if "open" in self.breaks:
            raise ValueError("stuck")
        self.opened += force
        return f"open by {hand}"

    async def knock(self, times: int) -> str:
        """Knocks so many times."""
        await asyncio.sleep(0)
        if "knock" in self.breaks:
            raise OSError("no hand")
        return "knock " * times

    def careful(self) -> str:
        """Opens the door, and answers if it is stuck."""
        try:
            return self.open("left")
        except ValueError:
            return "still closed"

    def get_reward(self):
        if "reward" in self.breaks:
            raise ZeroDivisionError("no reward")
        return float(self.opened)

    def _private(self):
        raise RuntimeError("private")


def door(*breaks):
    return guarded(lambda: Door(breaks))()


def test_a_sound_environment_and_other_instances_of_its_class_behave_as_before():
    environment = door()
    assert type(environment) is Door
    assert environment.reset(word="a") == "door a"
    assert environment.open("left") == "open by left" and environment.open(hand="left", force=2)
    assert asyncio.run(environment.knock(2)) == "knock knock "
    assert environment.get_reward() == 3.0 and environment_error(environment) is None
    with pytest.raises(RuntimeError, match="no key"):
        Door(("reset",)).reset()
    with pytest.raises(ZeroDivisionError):
        Door(("reward",)).get_reward()
    assert "_trl_explore_error" not in vars(Door())


def test_classes_resolve_their_methods_as_before():
    class Left(Door):
        pass

    class Right(Door):
        def open(self, hand: str) -> str:
            return f"right {super().open(hand)}"

    class Both(Left, Right):
        @staticmethod
        def look(where: str) -> str:
            return f"a door {where}"

    assert type(guarded(Left)()) is Left
    both = guarded(Both)()
    assert both.open("a") == "right open by a" and both.look("here") == "a door here"
    both.breaks = ("open", "reset")
    with pytest.raises(ValueError, match="stuck"):
        both.open("a")
    assert str(environment_error(both)) == "stuck" and both.reset() is None


def test_trl_finds_the_same_tools():
    names = [name for name, _ in inspect.getmembers(type(door()), predicate=inspect.isfunction) if name[0] != "_"]
    assert names == ["careful", "get_reward", "knock", "open", "reset"]
    assert get_json_schema(door().open) == get_json_schema(Door().open)
    assert inspect.iscoroutinefunction(door().knock) and not inspect.iscoroutinefunction(door().open)


def test_a_tool_that_raises_ends_the_episode():
    environment = door("open", "knock")
    assert environment.careful() == "still closed"  # what an environment catches itself is no failure
    assert environment_error(environment) is None
    with pytest.raises(OSError, match="no hand"):
        asyncio.run(environment.knock(1))
    assert str(environment_error(environment)) == "no hand"
    environment.reset()
    with pytest.raises(ValueError, match="stuck"):
        environment.open("left")
    environment.breaks = ()
    environment.open("left")  # later calls do not bring it back
    assert str(environment_error(environment)) == "stuck" and environment.get_reward() == 0.0
    environment.reset()
    environment.open("left")
    assert environment_error(environment) is None and environment.get_reward() == 1.0


@pytest.mark.parametrize("arguments", [{}, {"hand": "left", "speed": 1}, {"force": 2}])
def test_a_call_that_does_not_fit_is_the_models_mistake_and_reads_as_with_grpo(arguments):
    environment = door()
    with pytest.raises(TypeError) as plain:
        inspect.unwrap(Door.open)(environment, **arguments)
    for tool in (environment.open, ToolWatch().watched(environment.open)):
        with pytest.raises(TypeError) as seen:
            tool(**arguments)
        assert str(seen.value) == str(plain.value)
    assert environment_error(environment) is None


def test_reset_and_reward_do_not_raise():
    environment = door("reset")
    assert environment.reset(word="a") is None and str(environment_error(environment)) == "no key"
    environment = door("reward")
    environment.reset()
    assert environment.get_reward() == 0.0 and isinstance(environment_error(environment), ZeroDivisionError)


def test_copies_keep_what_happened_and_fail_by_themselves():
    environment = door("open")
    twin = copy.deepcopy(environment)
    with pytest.raises(ValueError):
        twin.open("left")
    assert environment_error(environment) is None and environment_error(twin) is not None


def test_ways_to_keep_a_state_are_no_tools():
    class Saved(Door):
        def snapshot(self):
            return self.opened

        def restore(self, state):
            self.opened = state

    environment = guarded(Saved)()
    offered = [name for name, _ in inspect.getmembers(type(environment), inspect.isfunction) if name[0] != "_"]
    assert "open" in offered and not {"snapshot", "restore"} & set(offered)
    environment.reset()
    environment.open("left", 3)
    state = environment.snapshot()
    environment.reset()
    environment.restore(state)
    assert Saved.snapshot(environment) == 3  # as a sub-class may ask its base
    assert environment.opened == 3 and has_own_snapshots(type(environment)) and has_own_snapshots(Saved)

    class Photographer(Door):
        def snapshot(self):  # alone it is a tool like any other
            return "click"

    offered = inspect.getmembers(type(guarded(Photographer)()), inspect.isfunction)
    assert "snapshot" in dict(offered) and not has_own_snapshots(Photographer)


def test_watched_tools_are_the_same_to_the_model_and_count():
    watch = ToolWatch()
    door = Door(breaks=("open", "knock"))
    tool, waiting = watch.watched(door.open), watch.watched(door.knock)
    assert get_json_schema(tool) == get_json_schema(door.open) and tool.__name__ == "open"
    assert inspect.iscoroutinefunction(waiting)
    with pytest.raises(TypeError):
        tool(speed=1)
    with pytest.raises(ValueError):
        tool("left")
    with pytest.raises(OSError, match="no hand"):
        asyncio.run(waiting(times=1))
    assert (watch.calls, watch.unanswered, watch.outages) == (2, 1, 0) and str(watch.last_error) == "no hand"
    watch.reset()
    door.breaks = ()
    assert tool("left") == "open by left" and (watch.calls, watch.unanswered) == (1, 0)


def raised(tool, *args, **kwargs):
    """Return the exception that a call raises."""
    try:
        tool(*args, **kwargs)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def read_from_silent_server():
    with socket.create_server(("127.0.0.1", 0)) as server:
        urllib.request.urlopen(f"http://127.0.0.1:{server.getsockname()[1]}/", timeout=0.01).read()


def wrapped(error, *, explicit):
    """Raise another exception in the handler of `error`."""
    try:
        raise error
    except Exception as cause:
        if explicit:
            raise RuntimeError("the search failed") from cause
        raise RuntimeError("the search failed")  # noqa: B904


def broken_pipe():
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit"], stdin=subprocess.PIPE)
    process.wait()
    process.stdin.write(b"1")
    process.stdin.flush()


class Unreadable:
    """A retriever that cannot read a query."""

    def search(self, queries, top_k):
        raise ValueError("unbalanced brackets")


class ConnectError(Exception):
    """Named as in httpx, whose exceptions are no `OSError`."""


def http_error(status):
    return urllib.error.HTTPError("http://127.0.0.1/", status, "reason", Message(), None)


OUTAGES = {
    "refused": ConnectionRefusedError(111, "refused"),
    "reset": ConnectionResetError("reset by peer"),
    "unreachable": OSError(errno.EHOSTUNREACH, "No route to host"),
    "urllib": urllib.error.URLError(ConnectionRefusedError(111, "refused")),
    "requests": requests.exceptions.ConnectTimeout("timed out"),
    "httpx": ConnectError("All connection attempts failed"),
    "gateway": http_error(503),
    "names": socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"),
    "cause": raised(wrapped, ConnectionError("gone"), explicit=True),
    "context": raised(wrapped, ConnectionError("gone"), explicit=False),
    "group": ExceptionGroup("tasks", [ConnectError("gone")]),
    "silent server": raised(read_from_silent_server),
    "retriever": RetrieverError("no result"),
    "down": RetrieverDown("32 searches in a row failed"),
}
MISTAKES = {
    "wrong path": raised(Path("/nonexistent/x").read_text),
    "folder": raised(Path("/").read_text),
    "no folder": NotADirectoryError(20, "Not a directory"),
    "not allowed": PermissionError(13, "Permission denied"),
    "long name": raised(Path("x" * 5000).read_text),
    "wrong program": raised(subprocess.run, ["/nonexistent/program"]),
    "failed program": raised(subprocess.run, [sys.executable, "-c", "raise SystemExit(1)"], check=True),
    "ended program": raised(broken_pipe),
    "slow code": TimeoutError("the code took more than 5 s"),
    "slow program": subprocess.TimeoutExpired("python", 5),
    "json": raised(json.loads, "{"),
    "arithmetic": ZeroDivisionError("division by zero"),
    "no such page": http_error(404),
    "no such host": urllib.error.URLError(socket.gaierror(socket.EAI_NONAME, "Name or service not known")),
    "wrong address": requests.exceptions.MissingSchema("no scheme supplied"),
    "no room": OSError(errno.ENOSPC, "No space left on device"),
    "unknown": OSError("gone"),
    "query": raised(SearchTool(Unreadable()).search, "(("),
}


@pytest.mark.parametrize("error", OUTAGES.values(), ids=OUTAGES.keys())
def test_a_lost_service_is_an_outage(error):
    assert is_outage(error) and not may_be_mistake(error)


@pytest.mark.parametrize("error", MISTAKES.values(), ids=MISTAKES.keys())
def test_what_a_wrong_call_raises_is_no_outage(error):
    assert may_be_mistake(error) and not is_outage(error)


def test_an_exception_in_the_handler_of_an_outage_is_judged_by_itself():
    def fallback():
        try:
            raise ConnectionError("the cache is down")
        except ConnectionError:
            Path("/nonexistent/x").read_text()

    assert not is_outage(raised(fallback))


@pytest.mark.parametrize("arguments, outages", [({"query": "paris"}, 1), ({"query": "http://localhost:1/"}, 0)])
def test_a_connection_that_fails_at_the_models_address_is_no_outage(arguments, outages):
    def fetch(query):
        raise ConnectionError("refused")

    watch = ToolWatch()
    raised(watch.watched(fetch), **arguments)
    assert (watch.calls, watch.unanswered, watch.outages) == (1, 1, outages)


def test_failures_count_over_batches_until_a_call_succeeds():
    streak = Streak()
    streak.add(failed=5, total=5)
    assert not streak.is_long
    streak.add(failed=0, total=0)  # no call: nothing is known
    streak.add(failed=3, total=3)
    assert streak.is_long
    assert streak.describe("tool call") == "every tool call of the last 2 generation batches raised (8 of 8)"
    streak.add(failed=7, total=8)
    assert not streak.is_long
    streak.add(failed=9, total=9)
    assert streak.is_long
    assert "every tool call of this generation batch raised (9 of 9)" in streak.describe("tool call")


def test_an_environment_that_cannot_be_guarded_is_refused():
    class Slim:
        __slots__ = ()

        def reset(self):
            pass

    with pytest.raises(TypeError, match="Slim that cannot carry an attribute .*without `__slots__`"):
        guarded(Slim)()
    assert environment_error(object()) is None
