"""Tasks of other packages, in the form of TRL's own specs: data, rewards and environments for any `GRPOTrainer`.

Nothing of these packages is imported before a spec is made.
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
