"""Row of the table of methods, and functions that several rows share. This module must load neither torch nor TRL."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any, NamedTuple

OURS = ("trl", "grpo", "trl-explore")


def _no_options(task: Any) -> dict[str, Any]:
    return {}


class Remark(NamedTuple):
    """Remark on the metrics of a run."""

    text: str  # a sentence with the values of the metrics
    link: str  # page that explains the remark


def _no_remarks(ends: Mapping[str, float]) -> list[Remark]:
    return []


@dataclass(frozen=True)
class Method:
    """Description of one method."""

    name: str  # on the command line, and at the beginning of its file names
    title: str  # in tables, pictures and checkpoints
    trainer: str  # a class of `trl_explore.trainers`, or an import path `module:Class`
    config: str  # a class of `trl_explore.trainers`, or an import path
    tags: tuple[str, ...] = OURS  # of its models on the Hub
    # `title` and `id` (arXiv). A method without a paper has GRPO's. `citation` (BibTeX) is only needed if the template
    # of its card has no such block.
    paper: Mapping[str, str] = field(default_factory=dict)
    card: str = "base"  # stem of its template in `model_cards/`
    # Names and meanings of the metrics that only this method logs. GRPO's metrics and the metrics of `exploration` are
    # not repeated. `aux/...` means all other names that begin with `aux/`.
    metrics: Mapping[str, str] = field(default_factory=dict)
    card_metrics: tuple[str, ...] | None = None  # metrics that its model card shows; None: all
    # Returns values of fields that fit a task, and the tiny model of an embedded task. Gives None if the method cannot
    # be used with the task.
    options: Callable[[Any], dict[str, Any] | None] = _no_options
    needs_tools: bool = False  # True if it has no effect without tools
    plain: bool = False  # True for `GRPOTrainer` and `ExplorationTrainer`, which explore nothing by default
    # Colour and marker in pictures. None: the next unused pair. The rows use the palette of Okabe and Ito, which
    # colour-blind readers can distinguish. It is used without yellow, because yellow is hard to see on white. The
    # markers distinguish the methods in black and white.
    style: tuple[str, str] | None = None
    # Returns the remarks of `trl-explore advise` on the last logged values of a run, by name.
    remarks: Callable[[Mapping[str, float]], list[Remark]] = _no_remarks

    def logs_alone(self, name: str) -> bool:
        """Return whether only this method logs the metric, and neither GRPO nor all trainers do."""
        if self.plain or "/" not in name:
            return False
        prefixes = [known.removesuffix("...") for known in self.metrics if known.endswith("/...")]
        return name in self.metrics or any(name.startswith(prefix) for prefix in prefixes)

    @property
    def trainer_class(self) -> Any:
        """Trainer class. Its import takes seconds, so `--help` and the check of names avoid it."""
        return _load(self.trainer)

    @property
    def config_class(self) -> Any:
        """Configuration class."""
        return _load(self.config)


def _load(path: str) -> Any:
    if ":" not in path:
        path = f"trl_explore.trainers:{path}"
    return resolve_name(path)


def for_language_models(task: Any) -> bool:
    """Return whether a language model is trained on a task. The defaults of a method's fields are for language
    models."""
    from trl_explore import tasks  # here, because tasks load `datasets`, which is slow

    return not tasks.is_teachable(task)


def is_agent(task: Any) -> bool:
    """Return whether a task is played with tools."""
    from trl_explore import tasks

    return tasks.is_agent(task)


def only_agents(task: Any) -> dict[str, Any] | None:
    """Return no options if a task is played with tools, else None: no other task suits the method."""
    return {} if is_agent(task) else None


def only_single_turns(task: Any) -> dict[str, Any] | None:
    """Return no options if a task is answered in one turn, else None: no other task suits the method."""
    return None if is_agent(task) else {}


def branching_agent_options(task: Any) -> dict[str, Any] | None:
    """Return options of a method that adds branches to an agent's rollouts, or None for a task without tools. The tiny
    model gets half the rollouts of GRPO, as in BranPO's paper."""
    if for_language_models(task) or not is_agent(task):
        return only_agents(task)
    return {"num_generations": 4, "per_device_train_batch_size": 32}
