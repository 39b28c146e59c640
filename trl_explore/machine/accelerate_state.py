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
    from before the block would change its precision. A trainer that is created after the block, from a configuration
    from before the block, would get the precision of the block.

    accelerate (up to 1.15) has no public way to store and restore the dictionaries. So this function uses the private
    attribute `_shared_state`, as transformers does.

    If no configuration was created before the block, the new state stays, because it holds the process group.
    """
    states = (PartialState, AcceleratorState, GradientState)
    before = [dict(state._shared_state) for state in states]
    try:
        yield
    finally:
        if before[0]:  # empty if no configuration was created before
            for state, values in zip(states, before, strict=True):
                state._shared_state.clear()
                state._shared_state.update(values)
