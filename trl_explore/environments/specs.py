"""Protocols of tasks of other packages, and how one is made by its name."""

import random
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from datasets import Dataset

SOURCES = ("reasoning_gym", "textarena")  # prefixes of the names of tasks


def names_a_spec(name: str) -> bool:
    """Return whether a name has the form of a task of another package, such as `reasoning_gym:countdown`."""
    return ":" in name


class TaskSpec(Protocol):
    """A task: what `GRPOTrainer` takes, under the names of TRL's own specs."""

    @property
    def name(self) -> str:
        """Name as given to [`load_spec`], such as `reasoning_gym:countdown`."""

    @property
    def train_dataset(self) -> Dataset:
        """Training rows: a conversational `prompt`, and the plain columns that rewards and environments read."""

    @property
    def eval_dataset(self) -> Dataset:
        """Held-out rows with the same columns. They come from another seed, and none is a training row."""

    @property
    def reward_funcs(self) -> Callable[..., list[float | None]]:
        """TRL reward function."""

    @property
    def environment_factory(self) -> Callable[[], Any] | None:
        """Makes the environment of one rollout; `None` for a task of one turn."""

    @property
    def options(self) -> dict[str, Any]:
        """Fields of `GRPOConfig` that suit the task, such as `max_completion_length`; a user's own come first."""


class TeachableSpec(TaskSpec, Protocol):
    """A task that also writes demonstrations for a supervised warm start."""

    def demonstration(self, row: Mapping[str, Any], rng: random.Random) -> dict[str, Any]:
        """Return a row of `SFTTrainer`: conversational `prompt` and `completion`, and for an agent the schemas of its
        `tools` as JSON text. The prompt is that of a rollout on `row`. About half of the demonstrations are right."""


def load_spec(name: str, config: Mapping[str, Any] | None = None, *, seed: int = 0) -> TaskSpec:
    """
    Makes the spec of a task of another package.

    Args:
        name (`str`):
            `reasoning_gym:NAME` or `textarena:ENV_ID`.
        config (`Mapping`, *optional*):
            Arguments of [`ReasoningGymSpec`] or [`TextArenaSpec`] in addition to the name.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the training rows, where `config` has none.

    Returns:
        [`TaskSpec`]: The spec.

    Raises:
        ValueError: If there is no such task, or it has no such argument.
        ImportError: If the package is not installed.
    """
    source, _, rest = name.partition(":")
    given: dict[str, Any] = {"seed": seed, **(config or {})}
    if source == "reasoning_gym":
        from trl_explore.environments.reasoning_gym import ReasoningGymSpec

        return ReasoningGymSpec(rest, **given)
    if source == "textarena":
        from trl_explore.environments.text_arena import TextArenaSpec

        return TextArenaSpec(rest, **given)
    raise ValueError(
        f"`name` is {name!r}; write reasoning_gym:NAME or textarena:ENV_ID, such as reasoning_gym:countdown."
    )
