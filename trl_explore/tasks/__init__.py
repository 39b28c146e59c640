"""Embedded tasks: small problems with exact verifiers that a randomly initialized model can learn on a CPU."""

import difflib
import random
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

from datasets import Dataset

from trl_explore.tasks.chain import CHAIN, CHAIND, LATE1, LATE3, ChainTask
from trl_explore.tasks.doors import DEEP_DOORS, DOORS, DoorsTask, FactTask
from trl_explore.tasks.multihop import MULTI_HOP, MultiHopTask
from trl_explore.tasks.multihop_world import EnglishWorld
from trl_explore.tasks.sketched import SketchedTask

__all__ = [
    "AGENTS",
    "MULTI_HOP",
    "TASKS",
    "ChainTask",
    "DoorsTask",
    "EnglishWorld",
    "FactTask",
    "MultiHopTask",
    "SketchedTask",
    "Task",
    "TeachableTask",
    "get_task",
    "is_agent",
    "is_teachable",
]


class Task(Protocol):
    """
    Task: its problems, and the function that rewards answers. It has no model and no state.

    A task may have more attributes. A task without one of them gets the default.

    - `environment_factory` (`Callable`): Creates the environment of one rollout, for a task that is played with tools.
    - `options` (`dict`): Fields of `GRPOConfig` that suit the task, such as `max_tool_calling_iterations`.
    - `metrics` (`tuple[str, ...]`): Metrics that a comparison shows.
    - `num_train`, `num_eval` (`int`): Number of training problems, and of held-out problems in an evaluation.
    - `step_delimiters` (`list[str]`): Texts that end a step of an answer, for methods that branch at steps.
    - `answer_fn` (`Callable`): Returns the answer in a completion. Votes count equal answers.
    """

    @property
    def name(self) -> str:
        """Short name."""

    @property
    def max_completion_length(self) -> int:
        """Number of tokens of the longest correct answer, including the end-of-sequence token."""

    @property
    def reward(self) -> Callable[..., list[float]] | None:
        """TRL reward function `(completions, **columns)`; TRL names its metrics after the function's `__name__`. None
        if the task's environment has `get_reward`."""

    def build_dataset(self, num_examples: int, *, seed: int) -> Dataset:
        """Return training problems: a conversational `prompt` column, and the columns that `reward` needs."""

    def evaluation_set(self, num_examples: int = 256, *, seed: int = 0) -> Dataset:
        """Return held-out problems, which are in no training set and no demonstration."""


class TeachableTask(Task, Protocol):
    """
    A [`Task`] that also writes demonstrations, so that `warm_start` can teach it to the tiny model. It must be a
    dataclass. It may have two more attributes.

    - `step_length` (`int`): Number of tokens of a step of an answer, if a step has no delimiter.
    - `sesa_options` (`dict`): Fields of `SESAConfig`. Without them, SESA does not suit the task.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def warm_start_steps(self) -> int:
        """Optimizer steps after which supervised training on the demonstrations has converged."""

    def sample_problem(self, rng: random.Random) -> str:
        """Sample a training problem. Return the user's message."""

    def demonstration(self, prompt: str, rng: random.Random) -> str:
        """Sample an answer to `prompt`, right or wrong. Return the assistant's message."""


EMBEDDED: tuple[TeachableTask, ...] = (CHAIN, CHAIND, LATE1, LATE3, DOORS, DEEP_DOORS)
TASKS: dict[str, TeachableTask] = {task.name: task for task in EMBEDDED}
AGENTS: dict[str, Any] = {MULTI_HOP.name: MULTI_HOP}


def is_agent(task: Any) -> bool:
    """Return whether a task is played with tools."""
    return getattr(task, "environment_factory", None) is not None


def is_teachable(task: Any) -> bool:
    """Return whether a task can be taught to the tiny model, as a [`TeachableTask`]."""
    return hasattr(task, "sample_problem") and hasattr(task, "demonstration")


def get_task(name: str) -> TeachableTask:
    """
    Return an embedded task by its name.

    Args:
        name (`str`):
            `chain`, `chaind`, `late1`, `late3`, `doors` or `deep_doors`.

    Returns:
        [`TeachableTask`]: The task. Use `dataclasses.replace` to make a variant.

    Raises:
        ValueError: If there is no such task.
    """
    if name in TASKS:
        return TASKS[name]
    nearest = difflib.get_close_matches(name, TASKS, n=1, cutoff=0.4)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    raise ValueError(f"`name` is {name!r}, which is no embedded task.{hint} Choose one of: {', '.join(TASKS)}.")
