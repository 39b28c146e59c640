"""Environments that raise: what TRL's loop sees of them, and what is the model's own mistake."""

import asyncio
import copy
import inspect

import pytest
from transformers.utils import get_json_schema

from trl_explore.agents.environments import environment_error, guarded
from trl_explore.agents.snapshots import has_own_snapshots
from trl_explore.agents.watch import ToolWatch


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
        """
        Knocks.

        Args:
            times: How often.

        Returns:
            What is heard.
        """
        await asyncio.sleep(0)
        if "knock" in self.breaks:
            raise OSError("no hand")
        return "knock " * times

    def careful(self) -> str:
        """
        Opens the door, and answers if it is stuck.

        Returns:
            What happens.
        """
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


def test_a_sound_environment_behaves_as_before():
    environment = door()
    assert type(environment) is Door
    assert environment.reset(word="a") == "door a"
    assert environment.open("left") == "open by left" and environment.open(hand="left", force=2)
    assert asyncio.run(environment.knock(2)) == "knock knock "
    assert environment.get_reward() == 3.0 and environment_error(environment) is None


def test_other_instances_of_the_class_raise_as_before():
    door("reset")
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
    environment = door("open")
    with pytest.raises(ValueError, match="stuck"):
        environment.open("left")
    environment.breaks = ()
    environment.open("left")  # later calls do not bring it back
    assert str(environment_error(environment)) == "stuck" and environment.get_reward() == 0.0
    environment.reset()
    environment.open("left")
    assert environment_error(environment) is None and environment.get_reward() == 1.0


def test_coroutines_are_guarded():
    environment = door("knock")
    with pytest.raises(OSError, match="no hand"):
        asyncio.run(environment.knock(1))
    assert str(environment_error(environment)) == "no hand"


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


def test_what_an_environment_catches_itself_is_no_failure():
    environment = door("open")
    assert environment.careful() == "still closed" and environment_error(environment) is None


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
    assert (watch.calls, watch.unanswered) == (2, 1) and str(watch.last_error) == "no hand"
    watch.reset()
    door.breaks = ()
    assert tool("left") == "open by left" and (watch.calls, watch.unanswered) == (1, 0)


def test_an_environment_that_cannot_be_guarded_is_refused():
    class Slim:
        __slots__ = ()

        def reset(self):
            pass

    with pytest.raises(TypeError, match="Slim that cannot carry an attribute .*without `__slots__`"):
        guarded(Slim)()
    assert environment_error(object()) is None
