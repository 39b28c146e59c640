"""Settings of a comparison, read from its YAML file and flags. They are checked and completed before training."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from transformers.trainer_utils import SchedulerType
from trl import DatasetMixtureConfig, ModelConfig

from trl_explore.errors import UsageError
from trl_explore.machine.devices import available_accelerator
from trl_explore.methods import METHODS
from trl_explore.names import unknown_name
from trl_explore.runs.arguments import RunArguments, TrainArguments, build_arguments, is_shared, methods_with
from trl_explore.runs.embedded import AGENT_SAMPLES
from trl_explore.runs.methods import find_method
from trl_explore.runs.tasks import WARM_START_SEED, RunTask, find_run_task, read_task_config
from trl_explore.runs.yaml_values import read_count, read_mapping, read_number
from trl_explore.tasks.tiny_model import HEAD_SIZE
from trl_explore.visible_text import visible_text

COST_OF_UNIT = {"tokens": "tokens", "seconds": "seconds", "steps": "step"}  # unit of a budget: field of `Cost`
FINGERPRINTS = "fingerprints"  # entry that `compare` adds to the file in its folder; it is no setting
# The metrics. Where a name ends in a number, any other k is possible too (see `COUNTED`).
METRICS = ("greedy_accuracy", "reward", "pass_at_1", "pass_at_8", "maj_at_8", "coverage_at_8")
COUNTED = re.compile(r"(pass|maj|coverage)_at_([1-9]\d*)")
# Configuration fields that the comparison sets itself, with the reason that its error messages give. They may not be
# in `common` or in the `options` of an arm.
OWNED = {
    "output_dir": "it is --output_dir",
    "seed": "it is `seeds`",
    "logging_steps": "costs are counted at every step",
    "resume_from_checkpoint": "a comparison continues by itself",
    "eval_strategy": "it is `evaluations`",
    "push_to_hub": "publish the arm that you choose",
}
# Configuration fields of every arm unless `common` sets them. The budget ends a run, so `max_steps` is high. The
# learning rate is constant, because a schedule over `max_steps` steps would hardly begin. A run resumes from its last
# checkpoint. It keeps two, because the process may be killed while it writes the last one.
DEFAULTS = {
    "max_steps": 100_000,
    "lr_scheduler_type": "constant",
    "save_strategy": "no",
    "save_total_limit": 2,
    "disable_tqdm": True,
}


@dataclass
class Cost:
    """Cost of training so far."""

    step: int = 0  # optimizer steps
    tokens: float = 0.0  # generated
    trained_tokens: float = 0.0  # in the loss
    cpu_seconds: float = 0.0  # CPU seconds of this process in training steps
    seconds: float = 0.0  # wall seconds of training steps


@dataclass(frozen=True)
class Arm:
    """One side of a comparison."""

    name: str  # label in tables and plots
    method: str  # name in `trl_explore.methods.METHODS`, or a trainer's import path
    options: dict[str, Any] = field(default_factory=dict)  # configuration fields of this arm, which override `common`


@dataclass
class Budget:
    """Limits of the training cost. Training stops when the cost reaches one of the limits."""

    tokens: float = float("inf")  # generated tokens, including extra streams
    cpu_seconds: float = float("inf")  # of training steps
    steps: int = 100_000  # optimizer steps
    seconds: float = float("inf")  # wall seconds of training steps

    def is_spent(self, cost: "Cost") -> bool:
        """Return whether `cost` has reached one of the limits."""
        return self.share_spent(cost) >= 1

    def share_spent(self, cost: "Cost") -> float:
        """Return the largest ratio of a cost to its limit: 1 when the budget is spent, more if a step exceeds it."""
        return max(
            cost.tokens / self.tokens,
            cost.cpu_seconds / self.cpu_seconds,
            cost.seconds / self.seconds,
            cost.step / self.steps,
        )


@dataclass(frozen=True)
class Comparison:
    """
    Settings that change the result of a comparison.

    Args:
        subject (`dict[str, Any]`):
            Fields of `trl-explore train` that name the model and the data. They name a model and data, a model and a
            `task`, or only an embedded `task`, which has its own model.
        unit (`str`):
            Unit of the budget: `"tokens"`, `"seconds"` or `"steps"`. All arms have the same budget.
        amount (`float`):
            Budget of each run in that unit.
        seeds (`tuple[int, ...]`):
            Seeds; every arm has a run per seed.
        arms (`tuple[Arm, ...]`):
            Arms, with the options that suit the task filled in. Differences are to the first arm.
        common (`dict[str, Any]`):
            Configuration fields of all arms.
        metrics (`tuple[str, ...]`):
            Metrics in the table and the picture, such as `"pass_at_8"`.
        evaluations (`int`):
            Evaluations per run at even shares of the budget, in addition to the evaluation before training.
        num_eval (`int`):
            Number of held-out problems.
        success_threshold (`float`, *optional*):
            Smallest total reward that counts as a success in the evaluation, also for agents. With `success_reward`,
            the reward of that function must reach it instead. None means 1.
        success_reward (`str`, *optional*):
            Reward function that decides success in the evaluation instead of the total reward, also for agents.
        warm_start_steps (`int`, *optional*):
            Supervised training steps that teach the task to the model. None for no warm start.
        samples_at_ends (`int`, *optional*):
            Samples per held-out problem before and after training, for pass@k at large k. If None, they are not taken.
        model_size (`dict[str, Any]`):
            `hidden_size` and `num_layers` of an embedded task's model. A missing field has the tiny model's value.
    """

    subject: dict[str, Any]
    unit: str
    amount: float
    seeds: tuple[int, ...]
    arms: tuple[Arm, ...]
    common: dict[str, Any]
    metrics: tuple[str, ...]
    evaluations: int
    num_eval: int
    success_threshold: float | None
    success_reward: str | None
    warm_start_steps: int | None
    samples_at_ends: int | None
    model_size: dict[str, Any]

    @property
    def task(self) -> RunTask | None:
        """The task, or None if the comparison uses the user's own data."""
        if "task" not in self.subject:
            return None
        return find_run_task(self.subject["task"], self.subject.get("task_config"))

    @property
    def builds_model(self) -> bool:
        """True if the runs train the tiny model of a task."""
        return self.task is not None and self.task.has_tiny_model

    def warm_start_seed(self, seed: int) -> int | None:
        """
        Return the seed of the warm start that a run begins with, or None if the model is not taught the task.

        A tiny model is built and taught for each seed. A pretrained model is taught once for all runs.
        """
        if self.warm_start_steps is None:
            return None
        if self.builds_model:
            return seed
        return WARM_START_SEED

    @property
    def budget(self) -> Budget:
        """Budget of each run."""
        amount: Any = int(self.amount) if self.unit == "steps" else self.amount
        return Budget(**{self.unit: amount})

    @property
    def cost(self) -> str:
        """Field of [`~trl_explore.compare.settings.Cost`] that the budget limits."""
        return COST_OF_UNIT[self.unit]

    @property
    def num_samples(self) -> int:
        """Number of samples per held-out problem: the largest k of the metrics, but at least 8 (4 for agents)."""
        fewest = AGENT_SAMPLES if self.task is not None and self.task.is_agent else 8
        return max([fewest, *self.values_of_k("pass"), *self.values_of_k("maj"), *self.values_of_k("coverage")])

    def values_of_k(self, kind: str) -> tuple[int, ...]:
        """Return the values of k, ascending, of the metrics of one kind (`"pass"`, `"maj"` or `"coverage"`)."""
        found = set()
        for name in self.metrics:
            match = COUNTED.fullmatch(name)
            if match and match[1] == kind:
                found.add(int(match[2]))
        return tuple(sorted(found))

    def document(self) -> dict[str, Any]:
        """Return the comparison as the content of a YAML file that [`read_comparison`] reads."""
        optional = {
            "success_threshold": self.success_threshold,
            "success_reward": self.success_reward,
            "warm_start_steps": self.warm_start_steps,
            "samples_at_ends": self.samples_at_ends,
            "model_size": self.model_size or None,
        }
        return {
            **self.subject,
            "budget": {self.unit: self.amount},
            "seeds": list(self.seeds),
            "metrics": list(self.metrics),
            "evaluations": self.evaluations,
            "num_eval": self.num_eval,
            **{name: value for name, value in optional.items() if value is not None},
            "common": self.common,
            "arms": [{"name": arm.name, "method": arm.method, "options": arm.options} for arm in self.arms],
        }


def arm_folder(name: str) -> str:
    """Return an arm's name in the form that folder names have: lower-case letters, digits and single hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def read_comparison(document: Mapping[str, Any]) -> Comparison:
    """
    Check the document of a comparison and fill in its defaults.

    Args:
        document (`Mapping[str, Any]`):
            Content of the YAML file, with the flags of the command line merged into it.

    Raises:
        UsageError: If a field is wrong. The message names the field, its value and the remedy.
    """
    specs = [*fields(TrainArguments), *fields(ModelConfig), *fields(DatasetMixtureConfig)]
    subject_names = {spec.name for spec in specs} - {"method", "trainer", "warm_start_steps"}
    own = {"budget", FINGERPRINTS} | ({spec.name for spec in fields(Comparison)} - {"subject", "unit", "amount"})
    for name in document:
        if name not in own | subject_names:
            raise UsageError(_unknown_top_level(str(name), own | subject_names))
    subject = {name: value for name, value in document.items() if name in subject_names}
    if "task_config" in subject:
        subject["task_config"] = read_task_config(subject["task_config"])
    task = _find_task(subject)
    unit, amount = _read_budget(document.get("budget"))
    common = read_mapping("common", document.get("common"))
    threshold, at_ends = document.get("success_threshold"), document.get("samples_at_ends")
    comparison = Comparison(
        subject=subject,
        unit=unit,
        amount=amount,
        seeds=_read_seeds(document.get("seeds", [0])),
        arms=_read_arms(document.get("arms"), task, common),
        common={**DEFAULTS, **_options_of_task(task), **common},
        metrics=_read_metrics(document.get("metrics"), task),
        evaluations=read_count("evaluations", document.get("evaluations", 10)),
        num_eval=_read_num_eval(document.get("num_eval"), task),
        success_threshold=None if threshold is None else read_number("success_threshold", threshold),
        success_reward=document.get("success_reward"),
        warm_start_steps=_warm_start_steps(document.get("warm_start_steps"), task),
        samples_at_ends=None if at_ends is None else read_count("samples_at_ends", at_ends),
        model_size=_model_size(document.get("model_size"), task),
    )
    count = comparison.num_samples
    if task is not None and task.is_agent and (comparison.samples_at_ends or 0) % count:
        raise UsageError(
            f"samples_at_ends={at_ends}: give a multiple of {count}, which an evaluation of {task.name} samples"
        )
    _check_fields(comparison)
    return comparison


def _unknown_top_level(name: str, known: set[str]) -> str:
    """Return the error message for an unknown field at the top level of the document."""
    if methods_with(name):
        return f"{name}: training fields go under `common` (for all arms) or under `options` of an arm"
    return unknown_name("field", name, known)


def _find_task(subject: Mapping[str, Any]) -> RunTask | None:
    """Return the task, or None for the user's own data. Raise a UsageError if fields are missing or do not fit."""
    if "task" not in subject:
        if "task_config" in subject:
            raise UsageError(f"task_config={subject['task_config']} belongs to a `task`; name one, or leave it out")
        if "model_name_or_path" not in subject:
            raise UsageError("nothing to train: give `task` (an embedded task) or `model_name_or_path` and your data")
        return None
    task = find_run_task(str(subject["task"]), subject.get("task_config"))
    brings, allowed = "model, data and reward", {"task", "task_config"}
    if not task.has_tiny_model:
        brings, allowed = "data and reward", allowed | {spec.name for spec in fields(ModelConfig)}
    others = sorted(subject.keys() - allowed)
    if others:
        raise UsageError(f"{others[0]}: `task` has its own {brings}; leave one of the two out")
    if not task.has_tiny_model and subject.get("model_name_or_path") is None:
        raise UsageError(
            f"model_name_or_path is missing: {task.name} has no model of its own; give model_name_or_path, such as "
            "smollm2"
        )
    return task


def _options_of_task(task: RunTask | None) -> dict[str, Any]:
    """Return the configuration fields that suit the task, for all arms. They include the fields for training on a CPU
    if the task trains a language model and there is no GPU."""
    if task is None:
        return {}
    options: dict[str, Any] = {}
    if not task.has_tiny_model and available_accelerator() is None:
        options = {"use_cpu": True, "bf16": False}  # TRL's defaults need a GPU
    return {**options, **task.options}


def _read_num_eval(given: Any, task: RunTask | None) -> int:
    if given is None:
        return 128 if task is None else task.num_eval
    count = read_count("num_eval", given)
    if task is not None and not task.has_tiny_model:
        task.held_out_rows(count)  # raises a UsageError if the task has fewer
    return count


def _read_budget(given: Any) -> tuple[str, float]:
    example = "for example budget: {tokens: 2e5}, or --tokens 2e5"
    if given is None:
        raise UsageError(f"budget is missing: say what is equal for all arms, tokens, seconds or steps, {example}")
    budget = read_mapping("budget", given)
    for name in budget:
        if name not in COST_OF_UNIT:
            raise UsageError(f"budget: {unknown_name('field', str(name), COST_OF_UNIT)}")
    if len(budget) != 1:
        raise UsageError(f"budget={budget}: give one of tokens, seconds and steps, {example}")
    ((unit, text),) = budget.items()
    amount = read_number(f"budget.{unit}", text)
    positive = 0 < amount < math.inf
    if unit == "steps" and not (positive and amount.is_integer()):
        raise UsageError(f"budget.{unit}={text}: it must be a whole number of steps, {example}")
    if not positive:
        raise UsageError(f"budget.{unit}={text}: it must be positive and finite, {example}")
    return unit, amount


def _read_seeds(given: Any) -> tuple[int, ...]:
    seeds = given if isinstance(given, list) else [given]
    valid = all(isinstance(seed, int) and not isinstance(seed, bool) and seed >= 0 for seed in seeds)
    if not seeds or not valid or len(set(seeds)) < len(seeds):
        raise UsageError(f"seeds={given}: give different integers of at least 0, for example seeds: [0, 1, 2]")
    return tuple(seeds)


def _read_arms(given: Any, task: RunTask | None, common: Mapping[str, Any]) -> tuple[Arm, ...]:
    if given is None:
        given = [{"method": method} for method in _default_methods(task)]
    if not isinstance(given, list) or not given:
        raise UsageError(f"arms={given!r}: give a list, for example [{{name: GRPO, method: grpo}}]")
    arms: list[Arm] = []
    for number, entry in enumerate(given):
        arm = _read_arm(f"arms[{number}]", entry, task, common)
        if not arm_folder(arm.name) or arm_folder(arm.name) in {arm_folder(other.name) for other in arms}:
            raise UsageError(f"arms[{number}]: name={arm.name!r}: give each arm letters or digits of its own")
        arms.append(arm)
    return tuple(arms)


def _read_arm(place: str, entry: Any, task: RunTask | None, common: Mapping[str, Any]) -> Arm:
    """Read one arm, and fill in the options that suit the task. `place` names the arm in error messages."""
    entry = read_mapping(place, entry)
    for key in entry:
        if key not in ("name", "method", "options"):
            raise UsageError(f"{place}: {unknown_name('field', str(key), ('name', 'method', 'options'))}")
    if "method" not in entry:
        raise UsageError(f"{place}: method is missing; choose one of {', '.join(METHODS)}")
    method = find_method(str(entry["method"]), place)
    suited = {} if task is None else task.method_options(method)
    if suited is None:
        assert task is not None
        raise UsageError(f"{place}: {task.unsuited(method)}")
    # An arm's options override `common`. So leave out suited options that the user has set in `common`.
    filled_in = {name: value for name, value in suited.items() if name not in common}
    return Arm(
        name=visible_text(str(entry.get("name", method.title))),
        method=method.name,
        options={**filled_in, **read_mapping(f"{place}.options", entry.get("options"))},
    )


def _default_methods(task: RunTask | None) -> list[str]:
    """Return GRPO and the methods that suit the task. Methods that need tools do not suit a user's own data."""
    names = ["grpo"]  # the first arm, because differences are to the first arm
    for row in METHODS.values():
        if row.plain:
            continue
        if task is None:
            suits = not row.needs_tools
        else:
            suits = task.method_options(row) is not None
        if suits:
            names.append(row.name)
    return names


def _read_metrics(given: Any, task: RunTask | None) -> tuple[str, ...]:
    if given is None:
        if task is not None:
            return task.metrics
        return ("reward", "greedy_accuracy", "pass_at_1", "pass_at_8")
    if not isinstance(given, list):
        given = [given]
    names = [str(name).replace("@", "_at_") for name in given]
    for name in names:
        if name not in METRICS and not COUNTED.fullmatch(name):
            raise UsageError(
                f"metrics: {unknown_name('metric', name, METRICS)} After `_at_`, give any number from 1 on."
            )
        if task is not None and task.is_agent and not re.fullmatch(r"reward|pass_at_\d+", name):
            raise UsageError(f"metrics: {name} is not measured for agents; {task.name} has `reward` and `pass_at_8`")
    if not names or len(set(names)) < len(names):
        raise UsageError(f"metrics={given}: give different names, for example [greedy_accuracy, pass_at_8]")
    return tuple(names)


def _warm_start_steps(given: Any, task: RunTask | None) -> int | None:
    if given is None:
        return None if task is None else task.warm_start_steps
    if task is None:
        raise UsageError(f"warm_start_steps={given}: only a `task` has a warm start; leave it out")
    steps = read_count("warm_start_steps", given)
    task.check_teaching(steps)
    return steps


def _model_size(given: Any, task: RunTask | None) -> dict[str, Any]:
    size = {name: read_count(f"model_size.{name}", value) for name, value in read_mapping("model_size", given).items()}
    if size and (task is None or not task.has_tiny_model):
        raise UsageError(f"model_size={given}: only the model of an embedded `task` is built; leave it out")
    for name in size:
        if name not in ("hidden_size", "num_layers"):
            raise UsageError(f"model_size: {unknown_name('field', name, ('hidden_size', 'num_layers'))}")
    if size.get("hidden_size", HEAD_SIZE) % HEAD_SIZE:
        raise UsageError(f"model_size.hidden_size={size['hidden_size']}: give a multiple of {HEAD_SIZE}")
    return size


def _check_fields(comparison: Comparison) -> None:
    """Build every arm's configuration to find wrong fields; raise a UsageError that names the first one."""
    for arm in comparison.arms:
        specs = {spec.name for spec in fields(find_method(arm.method).config_class) if spec.init}
        for place, options in (("common", comparison.common), (f"options of {arm.name}", arm.options)):
            for name in options:
                if name in OWNED:
                    raise UsageError(f"{place}: {name} is set by the comparison ({OWNED[name]}); leave it out")
                if name in specs:
                    continue
                if is_shared(str(name)):
                    raise UsageError(
                        f"{place}: {name} is a field of trl-explore's trainers, but {arm.method} is TRL's own: make "
                        f"the method of {arm.name} `exploration`, which is plain GRPO with these fields"
                    )
                owners = methods_with(str(name))
                if owners:
                    raise UsageError(
                        f"{place}: {name} is no field of {arm.method}, but of {' and '.join(owners)}: give it as one "
                        "of the `options` of such an arm"
                    )
                raise UsageError(f"{place}: {unknown_name(f'field of {arm.method}', str(name), specs)}")
        try:
            training = run_arguments(comparison, arm, seed=comparison.seeds[0], folder="out")[1]
        except UsageError as error:
            raise UsageError(f"arm {arm.name}: {error}") from error
        _check_schedule(arm, training)
        # Numbers of forward passes per generation batch, and per optimizer step.
        per_generation, per_step = training.steps_per_generation, training.gradient_accumulation_steps
        if per_generation is not None and per_generation < per_step:
            raise UsageError(
                f"arm {arm.name}: steps_per_generation={per_generation} is less than "
                f"gradient_accumulation_steps={per_step}; "
                "a curve has one log per generation batch, and an optimizer step would have several: make them equal"
            )


def _check_schedule(arm: Arm, training: Any) -> None:
    """Raise a UsageError if the learning rate of an arm depends on `max_steps`, and nobody has set this field."""
    steps = DEFAULTS["max_steps"]
    if training.max_steps != steps:
        return
    schedule, warmup = SchedulerType(training.lr_scheduler_type).value, training.warmup_steps
    remedy = "set `max_steps` to the number of steps of a run, or use a constant learning rate"
    if schedule not in ("constant", "constant_with_warmup"):
        raise UsageError(f"arm {arm.name}: lr_scheduler_type={schedule!r} would last {steps:,} steps: {remedy}")
    if schedule == "constant_with_warmup" and 0 < warmup < 1:
        raise UsageError(f"arm {arm.name}: warmup_steps={warmup} is a share of {steps:,} steps: {remedy}")


def run_arguments(comparison: Comparison, arm: Arm, *, seed: int, folder: str) -> RunArguments:
    """
    Return the arguments of one run, as `trl-explore train` parses them.

    Args:
        comparison ([`~trl_explore.compare.settings.Comparison`]):
            The comparison.
        arm ([`~trl_explore.compare.settings.Arm`]):
            The arm.
        seed (`int`):
            Seed of the run.
        folder (`str`):
            Folder of the run's checkpoints.
    """
    # The trainer of a tiny model gets model and data from `task_trainer`, not from these arguments.
    subject = {} if comparison.builds_model else comparison.subject
    fixed = {"method": arm.method, "seed": seed, "output_dir": folder, "logging_steps": 1}
    return build_arguments({**subject, **comparison.common, **arm.options, **fixed})
