"""A task by its name, embedded or of another package, and what `train`, `compare` and `eval` ask of it."""

import functools
import json
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_explore.compare.tasks import ALL_TASKS, task_metrics, task_num_eval, task_options
from trl_explore.environments import specs
from trl_explore.environments.specs import SOURCES, TaskSpec, names_a_spec
from trl_explore.methods import METHODS, Method
from trl_explore.names import unknown_name
from trl_explore.runs.inputs import UsageError
from trl_explore.tasks import is_agent
from trl_explore.tasks.lake_agent import LakeAgentTask

if TYPE_CHECKING:
    from datasets import Dataset

NUM_TRAIN, NUM_TRAIN_AGENT = 4000, 2000  # training rows of an embedded task; there are not many more boards
NUM_EVAL, NUM_EVAL_AGENT = 128, 64  # held-out rows of a comparison on a task of another package
# Rows of a task of another package come from this seed, whatever the run's seed is: runs of different seeds, and
# `trl-explore eval`, have the same held-out rows, and no run was trained on one of them.
DATA_SEED = 0
WARM_START_SEED = 0  # of the one warm start that all runs on such a task begin with


class RunTask(ABC):
    """A task of a run."""

    has_tiny_model: bool  # whether the task has a model of its own, which is built and taught before the run

    @property
    @abstractmethod
    def task(self) -> Any:
        """The embedded task, or the spec."""

    @property
    def name(self) -> str:
        """The name that the user gives."""
        return self.task.name

    @property
    def is_agent(self) -> bool:
        """True if the task is played with tools."""
        return is_agent(self.task)

    @property
    @abstractmethod
    def options(self) -> dict[str, Any]:
        """Fields of `GRPOConfig` that suit the task, for all methods."""

    @property
    @abstractmethod
    def metrics(self) -> tuple[str, ...]:
        """Metrics that a comparison shows, unless it is asked for others."""

    @property
    @abstractmethod
    def num_eval(self) -> int:
        """Held-out rows of an evaluation, unless it is asked for another number."""

    @property
    @abstractmethod
    def warm_start_steps(self) -> int | None:
        """Supervised steps before a run, unless the user says otherwise. `None` if the task is not taught first."""

    @property
    @abstractmethod
    def reward_funcs(self) -> list[Callable[..., Any]]:
        """The task's reward functions. Empty if its environment knows the reward."""

    @property
    @abstractmethod
    def answer_fn(self) -> Callable[[str], Hashable | None]:
        """Reads the answer of a completion, for votes."""

    def tokenizer(self) -> Any:
        """The tokenizer of the task's own model. `None` if the task has no model of its own."""
        return None

    @abstractmethod
    def train_rows(self, seed: int) -> "Dataset":
        """Training rows; `seed` is the run's, which only embedded tasks use."""

    @abstractmethod
    def held_out_rows(self, count: int) -> "Dataset":
        """The first `count` held-out rows, which are the same for all runs."""

    @abstractmethod
    def check_teaching(self, steps: int) -> None:
        """Raises UsageError where the task cannot be taught by demonstrations."""

    @abstractmethod
    def teach(
        self, model: str | None, *, steps: int | None, seed: int, use_cpu: bool, progress: bool = True, **size: Any
    ) -> str:
        """Teaches the task to its tiny model, or to `model`; returns the folder of the result."""

    def trainer_arguments(self, *, seed: int, evaluates: bool) -> dict[str, Any]:
        """
        What a trainer takes from the task.

        Args:
            seed (`int`):
                Seed of the run.
            evaluates (`bool`):
                Whether the run evaluates, and needs held-out rows.

        Returns:
            `dict`: Rows, rewards and environments, by the names of `GRPOTrainer`'s arguments.
        """
        return {
            "train_dataset": self.train_rows(seed),
            "eval_dataset": self.held_out_rows(self.num_eval) if evaluates else None,
            "reward_funcs": self.reward_funcs,
            "environment_factory": self.task.environment_factory if self.is_agent else None,
        }

    def method_options(self, method: Method) -> dict[str, Any] | None:
        """Fields of a method that suit the task, or None if the method does not suit it."""
        return method.options(self.task)

    def options_with(self, method: Method) -> dict[str, Any]:
        """Fields that suit a run of one method, which a user's own override. UsageError if the method does not suit
        the task."""
        own = self.method_options(method)
        if own is None:
            raise UsageError(self.unsuited(method))
        return {**self.options, **own}

    def unsuited(self, method: Method) -> str:
        """Sentence on a method that does not suit the task."""
        if names_a_spec(self.name):
            suited = [row.name for row in METHODS.values() if self.method_options(row) is not None]
            kind = "is played with tools" if self.is_agent else "has no tools"
            return f"{method.name} does not suit the task {self.name}, which {kind}; use one of {', '.join(suited)}"
        others = ", ".join(name for name, other in ALL_TASKS.items() if method.options(other) is not None)
        return f"{method.name} does not suit the task {self.name}; it suits {others}"


@dataclass(frozen=True)
class EmbeddedTask(RunTask):
    """An embedded task. A run trains a tiny model, which is taught the task before."""

    embedded: Any

    has_tiny_model = True

    @property
    def task(self) -> Any:
        return self.embedded

    @property
    def options(self) -> dict[str, Any]:
        return task_options(self.task)

    @property
    def metrics(self) -> tuple[str, ...]:
        return task_metrics(self.task)

    @property
    def num_eval(self) -> int:
        return task_num_eval(self.task)

    @property
    def warm_start_steps(self) -> int | None:
        return self.task.warm_start_steps

    @property
    def reward_funcs(self) -> list[Callable[..., Any]]:
        return [] if isinstance(self.task, LakeAgentTask) else [self.task.reward]

    @property
    def answer_fn(self) -> Callable[[str], Hashable | None]:
        return str.strip  # answers are marked by each task in another way, so votes are for whole completions

    def train_rows(self, seed: int) -> "Dataset":
        return self.task.build_dataset(NUM_TRAIN_AGENT if self.is_agent else NUM_TRAIN, seed=seed)

    def held_out_rows(self, count: int) -> "Dataset":
        return self.task.evaluation_set(count)

    def check_teaching(self, steps: int) -> None:
        """Nothing: every embedded task has demonstrations."""

    def teach(
        self, model: str | None, *, steps: int | None, seed: int, use_cpu: bool, progress: bool = True, **size: Any
    ) -> str:
        from trl_explore.tasks.warm_start import warm_start

        device = "cpu" if use_cpu else None
        return str(warm_start(self.task, seed=seed, steps=steps, progress=progress, device=device, **size))

    def tokenizer(self) -> Any:
        from trl_explore.tasks.tiny_model import build_tokenizer

        return build_tokenizer(tools=self.is_agent)


@dataclass(frozen=True)
class SpecTask(RunTask):
    """A task of another package. A run trains the user's language model."""

    spec: TaskSpec

    has_tiny_model = False

    @property
    def task(self) -> Any:
        return self.spec

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.spec.options)

    @property
    def metrics(self) -> tuple[str, ...]:
        return ("reward",) if self.is_agent else ("reward", "greedy_accuracy", "pass_at_1", "pass_at_8")

    @property
    def num_eval(self) -> int:
        return min(NUM_EVAL_AGENT if self.is_agent else NUM_EVAL, len(self.spec.eval_dataset))

    @property
    def warm_start_steps(self) -> int | None:
        return None

    @property
    def reward_funcs(self) -> list[Callable[..., Any]]:
        return [self.spec.reward_funcs]

    @property
    def answer_fn(self) -> Callable[[str], Hashable | None]:
        return getattr(self.spec, "answer_fn", str.strip)

    def train_rows(self, seed: int) -> "Dataset":
        return self.spec.train_dataset

    def held_out_rows(self, count: int) -> "Dataset":
        rows = self.spec.eval_dataset
        if count > len(rows):
            raise UsageError(
                f"num_eval={count}: {self.name} has {len(rows)} held-out rows; lower num_eval, or let task_config "
                "make more of them"
            )
        return rows.select(range(count))

    def check_teaching(self, steps: int) -> None:
        demonstration = getattr(self.spec, "demonstration", None)
        if demonstration is None:
            raise UsageError(
                f"warm_start_steps={steps}: {self.name} writes no demonstrations; leave warm_start_steps out"
            )
        try:
            demonstration(self.spec.train_dataset[0], random.Random(0))
        except ValueError as error:
            raise UsageError(f"warm_start_steps={steps}: {error}") from error

    def teach(
        self, model: str | None, *, steps: int | None, seed: int, use_cpu: bool, progress: bool = True, **size: Any
    ) -> str:
        from trl_explore.pretrained.teaching import teach

        assert model is not None and steps is not None
        spec: Any = self.spec
        folder = Path(model).expanduser()
        model = str(folder) if folder.is_dir() else model
        device = "cpu" if use_cpu else None
        return str(teach(model, spec, steps=steps, seed=WARM_START_SEED, progress=progress, device=device))


def find_run_task(name: str, config: Mapping[str, Any] | None = None) -> RunTask:
    """
    Looks a task up, or makes it.

    Args:
        name (`str`):
            Name of an embedded task, `reasoning_gym:NAME` or `textarena:ENV_ID`.
        config (`Mapping`, *optional*):
            Arguments of the spec, for a task of another package. Its rows come from seed 0 unless `seed` is there.

    Returns:
        [`RunTask`]: The task. The same name and arguments give the same object, whose rows are made once.

    Raises:
        UsageError: If there is no such task, it has no such argument, or its package is not installed.
    """
    if name in ALL_TASKS:
        if config:
            raise UsageError(f"task_config={dict(config)}: the embedded task {name} has no fields; leave it out")
        return EmbeddedTask(ALL_TASKS[name])
    source = name.partition(":")[0]
    if name in SOURCES:
        raise UsageError(
            f"task={name!r} is a package with many tasks; name one of them, as trl-explore tasks {name} lists them"
        )
    if not names_a_spec(name):
        raise UsageError(f"task: {unknown_name('task', name, [*ALL_TASKS, *SOURCES])} All: trl-explore tasks")
    if source not in SOURCES:
        raise UsageError(f"task={name!r}: {unknown_name('source of tasks', source, SOURCES)} All: trl-explore tasks")
    return _spec_task(name, json.dumps(config or {}, sort_keys=True, default=str))


@functools.lru_cache(maxsize=16)
def _spec_task(name: str, config: str) -> SpecTask:
    """Make the spec of a task; a run and its checks ask for it several times, and rows may take seconds to make."""
    fields = json.loads(config)
    given = f"task={name!r}" + (f" with task_config={config}" if fields else "")
    try:
        return SpecTask(specs.load_spec(name, fields, seed=DATA_SEED))
    except (ValueError, TypeError) as error:
        raise UsageError(f"{given}: {error}") from error
    except ImportError as error:  # says what to install
        raise UsageError(f"task={name!r}: {error}") from error


def read_task_config(given: Any) -> dict[str, Any]:
    """
    Reads the fields of a task.

    Args:
        given (`Any`):
            A mapping, JSON text of one, or `None` for no fields.

    Returns:
        `dict`: The fields.

    Raises:
        UsageError: If it is neither.
    """
    example = """such as --task_config '{"min_numbers": 3}'"""
    read = given
    if isinstance(given, str):
        try:
            read = json.loads(given)
        except json.JSONDecodeError as error:
            raise UsageError(
                f"task_config={given!r} is no JSON ({error.msg}, column {error.colno}); give fields with values, "
                f"{example}"
            ) from error
    if read is None:
        return {}
    if not isinstance(read, dict):
        raise UsageError(f"task_config={given!r}: expected fields with values, {example}")
    return read
