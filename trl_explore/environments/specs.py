"""Protocols for tasks of other packages, and the function that creates such a task."""

import random
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from datasets import Dataset

SOURCES = ("reasoning_gym", "textarena")  # packages with tasks; the name of a task begins with a package and a colon


def names_a_spec(name: str) -> bool:
    """Return whether a name has the form of a task of another package, such as `reasoning_gym:countdown`."""
    source, colon, _ = name.partition(":")
    return colon == ":" and source in SOURCES


class TaskSpec(Protocol):
    """
    A task of another package. The attributes have the names of `GRPOTrainer`'s arguments, as in TRL's own specs.

    A task may have two more attributes: `step_delimiters`, a list of texts that end a step of an answer, for methods
    that branch at steps; and `answer_fn`, a function that returns the answer in a completion, for votes.
    """

    @property
    def name(self) -> str:
        """Name as given to [`load_spec`], such as `reasoning_gym:countdown`."""

    @property
    def train_dataset(self) -> Dataset:
        """Training rows: a conversational `prompt`, and the columns that the reward function or the environment
        reads."""

    @property
    def eval_dataset(self) -> Dataset:
        """Evaluation rows with the same columns. They come from another seed, and none of them is a training row."""

    @property
    def reward_funcs(self) -> Callable[..., list[float | None]]:
        """Reward function with the signature that TRL expects."""

    @property
    def environment_factory(self) -> Callable[[], Any] | None:
        """Function that creates the environment of one rollout. `None` if the task has no tools."""

    @property
    def options(self) -> dict[str, Any]:
        """Values of fields of `GRPOConfig` that suit the task, such as `max_completion_length`. The user's own values
        override them."""


class TeachableSpec(TaskSpec, Protocol):
    """A task that also writes demonstrations for a supervised warm start."""

    def demonstration(self, row: Mapping[str, Any], rng: random.Random) -> dict[str, Any]:
        """Return a row of `SFTTrainer`: a conversational `prompt` and `completion`, and for an agent the schemas of
        its `tools` as JSON text. The prompt is the same as in a rollout on `row`. About half of the demonstrations
        solve the task."""


def load_spec(name: str, config: Mapping[str, Any] | None = None, *, seed: int = 0) -> TaskSpec:
    """
    Create a task of another package.

    Args:
        name (`str`):
            `reasoning_gym:NAME` or `textarena:ENV_ID`.
        config (`Mapping`, *optional*):
            Arguments of [`ReasoningGymSpec`] or [`TextArenaSpec`] in addition to the name.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the training rows, if `config` has no `seed`.

    Returns:
        [`TaskSpec`]: The task.

    Raises:
        ValueError: If there is no task with this name, or an argument in `config` is wrong.
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
