"""A separate accelerate state for a trainer that is used only for a moment."""

from collections.abc import Iterator
from contextlib import contextmanager

from accelerate.state import AcceleratorState, GradientState, PartialState


@contextmanager
def separate_accelerate_state() -> Iterator[None]:
    """
    Run code that creates a configuration and a trainer, and restore accelerate's state afterwards.

    accelerate keeps device, precision and gradient accumulation in three dictionaries that all trainers of a process
    share. A new configuration empties the first two, and the next trainer fills them. Without this context, a trainer
    that was created before would change its precision, and a trainer that is created later from an earlier
    configuration would get the precision of this one. accelerate (up to 1.15) has no public way to store and restore
    the dictionaries. So this function uses the private attribute `_shared_state`, as transformers does.

    If no configuration was created before, the new state stays, because it holds the process group.
    """
    states = (PartialState, AcceleratorState, GradientState)
    before = [dict(state._shared_state) for state in states]
    try:
        yield
    finally:
        if before[0]:
            for state, values in zip(states, before, strict=True):
                state._shared_state.clear()
                state._shared_state.update(values)
