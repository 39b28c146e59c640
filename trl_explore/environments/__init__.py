"""Tasks of reasoning-gym and TextArena for any `GRPOTrainer`: data, reward functions and environments.

A task is a spec, an object with the attributes of TRL's own specs such as `HarborSpec`. This module imports the
packages only when a spec is created.
"""

from trl_explore.environments.specs import TaskSpec, TeachableSpec, load_spec

__all__ = ["ReasoningGymSpec", "TaskSpec", "TeachableSpec", "TextArenaSpec", "load_spec"]


def __getattr__(name: str) -> type:
    if name == "ReasoningGymSpec":
        from trl_explore.environments.reasoning_gym import ReasoningGymSpec

        return ReasoningGymSpec
    if name == "TextArenaSpec":
        from trl_explore.environments.text_arena import TextArenaSpec

        return TextArenaSpec
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
