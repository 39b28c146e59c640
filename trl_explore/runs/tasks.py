"""Tasks that `train`, `compare`, `eval` and `filter` find by name: embedded tasks, tasks of other packages, and tasks
of the user, by their import paths."""

import difflib
import functools
import json
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_explore.environments import specs
from trl_explore.environments.specs import SOURCES, TaskSpec, names_a_spec
from trl_explore.errors import UsageError
from trl_explore.methods import METHODS, Method
from trl_explore.names import is_import_path, unknown_name
from trl_explore.runs.embedded import ALL_TASKS, task_metrics, task_num_eval, task_options
from trl_explore.runs.inputs import user_object
from trl_explore.tasks import Task, is_agent, is_teachable

if TYPE_CHECKING:
    from datasets import Dataset

# Number of training rows of a task without `num_train`.
NUM_TRAIN, NUM_TRAIN_AGENT = 4000, 2000
NUM_EVAL, NUM_EVAL_AGENT = 128, 64  # held-out rows of a comparison on a task of another package
# Seed of the rows of a task of another package. It does not depend on the run's seed. So all runs and `trl-explore
# eval` have the same held-out rows, and no run trains on one of them.
DATA_SEED = 0
TASK_ATTRIBUTES = ("name", "max_completion_length", "reward", "build_dataset", "evaluation_set")
WARM_START_SEED = 0  # seed of the warm start of a pretrained model, which all runs share


class RunTask(ABC):
    """A task of a run."""

    has_tiny_model: bool  # True if the task has a tiny model, which is built and taught before a run

    @property
    @abstractmethod
    def task(self) -> Any:
        """The task that is taught to the tiny model, or the spec."""

    @property
    def name(self) -> str:
        """The name of the task."""
        return self.task.name

    @property
    def is_agent(self) -> bool:
        """True if the task has tools."""
        return is_agent(self.task)

    @property
    @abstractmethod
    def options(self) -> dict[str, Any]:
        """Fields of `GRPOConfig` that suit the task, whatever the method is."""

    @property
    @abstractmethod
    def metrics(self) -> tuple[str, ...]:
        """Metrics that a comparison shows by default."""

    @property
    @abstractmethod
    def num_eval(self) -> int:
        """Number of held-out rows in an evaluation by default."""

    @property
    @abstractmethod
    def warm_start_steps(self) -> int | None:
        """Number of supervised steps before a run by default. `None` if there is no warm start by default."""

    @property
    @abstractmethod
    def reward_funcs(self) -> list[Callable[..., Any]]:
        """The task's reward functions. Empty if its environment has `get_reward`."""

    @property
    @abstractmethod
    def answer_fn(self) -> Callable[[str], Hashable | None]:
        """Function that reads the answer in a completion. Votes count equal answers."""

    def tokenizer(self) -> Any:
        """Return the tokenizer of the task's tiny model, or None if it has no tiny model."""
        return None

    @abstractmethod
    def train_rows(self, seed: int) -> "Dataset":
        """Return the training rows. `seed` is the seed of the run. Only embedded tasks use it."""

    @abstractmethod
    def held_out_rows(self, count: int) -> "Dataset":
        """Return the first `count` held-out rows. They are the same for all runs."""

    @abstractmethod
    def check_teaching(self, steps: int) -> None:
        """Raise a UsageError if the task writes no demonstrations."""

    @abstractmethod
    def teach(
        self, model: str | None, *, steps: int | None, seed: int, use_cpu: bool, progress: bool = True, **size: Any
    ) -> str:
        """Teach the task to its tiny model, or to `model` if it has none. Return the folder of the taught model."""

    def trainer_arguments(self, *, seed: int, evaluates: bool) -> dict[str, Any]:
        """
        Return arguments of a trainer for this task.

        Args:
            seed (`int`):
                Seed of the run.
            evaluates (`bool`):
                True if the run evaluates, so that it needs held-out rows.

        Returns:
            `dict`: Rows, reward functions and environments, by the names of `GRPOTrainer`'s arguments.
        """
        return {
            "train_dataset": self.train_rows(seed),
            "eval_dataset": self.held_out_rows(self.num_eval) if evaluates else None,
            "reward_funcs": self.reward_funcs,
            "environment_factory": self.task.environment_factory if self.is_agent else None,
        }

    def method_options(self, method: Method) -> dict[str, Any] | None:
        """Return the fields of a method that suit the task, or None if the method does not suit it."""
        return method.options(self.task)

    def options_with(self, method: Method) -> dict[str, Any]:
        """Return all fields that suit a run of a method on the task. The user's values override them. Raise a
        UsageError if the method does not suit the task."""
        of_method = self.method_options(method)
        if of_method is None:
            raise UsageError(self.unsuited(method))
        return {**self.options, **of_method}

    def unsuited(self, method: Method) -> str:
        """Return the error message for a method that does not suit the task."""
        if not self.has_tiny_model:
            suited = [row.name for row in METHODS.values() if self.method_options(row) is not None]
            tools = "is played with tools" if self.is_agent else "has no tools"
            return f"{method.name} does not suit the task {self.name}, which {tools}; use one of {', '.join(suited)}"
        others = ", ".join(name for name, other in ALL_TASKS.items() if method.options(other) is not None)
        return f"{method.name} does not suit the task {self.name}; it suits {others}"


@dataclass(frozen=True)
class EmbeddedTask(RunTask):
    """An embedded task, or a task of the user that writes demonstrations. By default, a run trains a tiny model that
    was taught the task before."""

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
        if self.task.reward is None:
            return []
        return [self.task.reward]

    @property
    def answer_fn(self) -> Callable[[str], Hashable | None]:
        # Each task marks answers differently. By default, votes count whole completions.
        return getattr(self.task, "answer_fn", str.strip)

    def train_rows(self, seed: int) -> "Dataset":
        return self.task.build_dataset(num_train(self.task), seed=seed)

    def held_out_rows(self, count: int) -> "Dataset":
        return self.task.evaluation_set(count)

    def check_teaching(self, steps: int) -> None:
        """Accept any task, because all of these tasks write demonstrations."""

    def teach(
        self, model: str | None, *, steps: int | None, seed: int, use_cpu: bool, progress: bool = True, **size: Any
    ) -> str:
        from trl_explore.tasks.warm_start import warm_start

        device = "cpu" if use_cpu else None
        return str(warm_start(self.task, seed=seed, steps=steps, progress=progress, device=device, **size))

    def tokenizer(self) -> Any:
        from trl_explore.tasks.tiny_model import build_tokenizer

        return build_tokenizer(tools=self.is_agent)


def num_train(task: Any) -> int:
    """Return the number of training rows of a task."""
    default = NUM_TRAIN_AGENT if is_agent(task) else NUM_TRAIN
    return getattr(task, "num_train", default)


class UserSpec:
    """
    A task of the user, with the attributes of a [`TaskSpec`]. It is trained on a language model.

    Args:
        task ([`Task`]):
            The task.
    """

    def __init__(self, task: Task) -> None:
        self.task: Any = task
        self.name = task.name
        self.reward_funcs = task.reward
        self.environment_factory = getattr(task, "environment_factory", None)
        self.options = {"max_completion_length": task.max_completion_length, **getattr(task, "options", {})}
        for name in ("metrics", "num_eval", "step_delimiters", "answer_fn"):
            if hasattr(task, name):
                setattr(self, name, getattr(task, name))

    @functools.cached_property
    def train_dataset(self) -> "Dataset":
        return self.task.build_dataset(num_train(self.task), seed=DATA_SEED)

    @functools.cached_property
    def eval_dataset(self) -> "Dataset":
        return self.task.evaluation_set(task_num_eval(self.task))


@dataclass(frozen=True)
class SpecTask(RunTask):
    """A task of another package, or a task of the user without demonstrations. It is trained on the user's language
    model."""

    spec: TaskSpec | UserSpec

    has_tiny_model = False

    @property
    def task(self) -> Any:
        return self.spec

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.spec.options)

    @property
    def metrics(self) -> tuple[str, ...]:
        default = ("reward",) if self.is_agent else ("reward", "greedy_accuracy", "pass_at_1", "pass_at_8")
        return getattr(self.spec, "metrics", default)

    @property
    def num_eval(self) -> int:
        default = NUM_EVAL_AGENT if self.is_agent else NUM_EVAL
        return min(getattr(self.spec, "num_eval", default), len(self.spec.eval_dataset))

    @property
    def warm_start_steps(self) -> int | None:
        return None

    @property
    def reward_funcs(self) -> list[Callable[..., Any]]:
        if self.spec.reward_funcs is None:
            return []
        return [self.spec.reward_funcs]

    @property
    def answer_fn(self) -> Callable[[str], Hashable | None]:
        return getattr(self.spec, "answer_fn", str.strip)

    def train_rows(self, seed: int) -> "Dataset":
        return self.spec.train_dataset

    def held_out_rows(self, count: int) -> "Dataset":
        rows = self.spec.eval_dataset
        if count > len(rows):
            more = "eval_size in task_config" if names_a_spec(self.name) else "num_eval in the task"
            raise UsageError(
                f"num_eval={count}: {self.name} has {len(rows)} held-out rows; lower num_eval, or set a larger {more}"
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
        if folder.is_dir():
            model = str(folder)
        device = "cpu" if use_cpu else None
        return str(teach(model, spec, steps=steps, seed=WARM_START_SEED, progress=progress, device=device))


def find_run_task(name: str, config: Mapping[str, Any] | None = None) -> RunTask:
    """
    Return the task with a name.

    Args:
        name (`str`):
            Name of an embedded task, `reasoning_gym:NAME`, `textarena:ENV_ID`, or the import path of a task object,
            `my_tasks:MAZE`.
        config (`Mapping`, *optional*):
            Arguments of the spec, if it is a task of another package. The seed of its rows is 0, unless `config` has
            a `seed`.

    Returns:
        [`RunTask`]: The task. For a task that is trained on a language model, equal arguments give the same object,
            whose rows are generated only once.

    Raises:
        UsageError: If there is no task with this name, an argument is wrong, or the package is not installed.
    """
    if names_a_spec(name):
        return _spec_task(name, json.dumps(config or {}, sort_keys=True, default=str))
    if name in SOURCES:
        raise UsageError(
            f"task={name!r} is a package with many tasks; name one of them, which trl-explore tasks {name} lists"
        )
    if name not in ALL_TASKS and not is_import_path(name):
        raise UsageError(
            f"task: {unknown_name('task', name, [*ALL_TASKS, *SOURCES])} All: trl-explore tasks. A task of your own "
            "is named by its import path, my_tasks:MAZE"
        )
    if config:
        raise UsageError(f"task_config={dict(config)}: the task {name} has no fields; leave it out")
    if name in ALL_TASKS:
        return EmbeddedTask(ALL_TASKS[name])
    return _user_task(name)


def _user_task(path: str) -> RunTask:
    """Return the task with an import path. Raise a UsageError if there is none, or if it lacks an attribute."""
    source = path.partition(":")[0]
    if ":" in path and difflib.get_close_matches(source, SOURCES, n=1):
        raise UsageError(f"task={path!r}: {unknown_name('source of tasks', source, SOURCES)} All: trl-explore tasks")
    path, found = user_object("task", path, "task", _is_task, fits=lambda found: found is not None)
    if isinstance(found, type):
        raise UsageError(f"task={path!r} is a class; write an object of it into the module, and name that")
    if not _is_task(found):
        missing = [name for name in TASK_ATTRIBUTES if not hasattr(found, name)]
        raise UsageError(
            f"task={path!r} has no {missing[0]}; a task has {', '.join(TASK_ATTRIBUTES)}, see trl_explore.tasks.Task"
        )
    if not hasattr(found, "build_dataset"):  # a spec, such as `ReasoningGymSpec("gcd")`
        return SpecTask(found)
    if not is_teachable(found):
        if id(found) not in _user_specs:
            _user_specs[id(found)] = UserSpec(found)  # it keeps the task, so that no other object gets its id
        return SpecTask(_user_specs[id(found)])
    if not is_dataclass(found) or not hasattr(found, "warm_start_steps"):
        raise UsageError(
            f"task={path!r} writes demonstrations for the tiny model, so its class must be a dataclass with "
            "warm_start_steps, see trl_explore.tasks.TeachableTask"
        )
    return EmbeddedTask(found)


_user_specs: dict[int, UserSpec] = {}


def _is_task(found: Any) -> bool:
    """Return whether an object is a task, or a spec such as `ReasoningGymSpec("gcd")`."""
    if isinstance(found, type):
        return False
    is_spec = hasattr(found, "train_dataset") and hasattr(found, "reward_funcs")
    return is_spec or all(hasattr(found, name) for name in TASK_ATTRIBUTES)


@functools.lru_cache(maxsize=16)
def _spec_task(name: str, config: str) -> SpecTask:
    """Create a task of another package. The result is cached, because a run needs the task several times and rows may
    take seconds to generate."""
    fields = json.loads(config)
    given = f"task={name!r}"
    if fields:
        given = f"{given} with task_config={config}"
    try:
        return SpecTask(specs.load_spec(name, fields, seed=DATA_SEED))
    except (ValueError, TypeError) as error:
        raise UsageError(f"{given}: {error}") from error
    except ImportError as error:  # the message names the package to install
        raise UsageError(f"task={name!r}: {error}") from error


def read_task_config(given: Any) -> dict[str, Any]:
    """
    Read the fields of a task.

    Args:
        given (`Any`):
            A mapping, the JSON text of a mapping, or `None` for no fields.

    Returns:
        `dict`: The fields.

    Raises:
        UsageError: If `given` is something else.
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
