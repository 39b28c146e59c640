"""Arguments of a run. A file and flags are parsed into configurations, which become the arguments of a trainer."""

import os
from dataclasses import dataclass, field, fields
from enum import Enum
from inspect import isclass
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, Union, get_args, get_origin, get_type_hints

from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, TrlParser

from trl_explore.methods import METHODS
from trl_explore.names import unknown_name
from trl_explore.runs.inputs import (
    UsageError,
    check_model,
    load_reward_functions,
    load_train_and_eval,
    looks_like_path,
    missing_path,
)
from trl_explore.runs.methods import find_method, flag_of

if TYPE_CHECKING:
    from trl import GRPOConfig

    from trl_explore.runs.tasks import RunTask

# The script's arguments, the method's configuration, the model's configuration, and the mixture of data sets.
RunArguments: TypeAlias = "tuple[TrainArguments, GRPOConfig, ModelConfig, DatasetMixtureConfig]"


@dataclass
class TrainArguments(ScriptArguments):
    """
    Arguments of `trl-explore train` in addition to the fields of the method's configuration.

    Args:
        method (`str`, *optional*):
            Name of the method, one of `METHODS`.
        trainer (`str`, *optional*):
            Import path of the user's own trainer class. It replaces `method`.
        reward_funcs (`list[str]`, *optional*):
            Reward functions: names from `trl_explore.rewards.answers` or TRL, or import paths.
        reward_model_name_or_path (`str`, *optional*):
            Reward model, a Hub name or a folder.
        task (`str`, *optional*):
            Task that brings data and rewards: an embedded one, one of another package such as
            `reasoning_gym:countdown`, or the import path of a task object, `my_tasks:MAZE`.
        task_config (`dict` or `str`, *optional*):
            Arguments of the task's spec, as a mapping or as JSON text.
        warm_start_steps (`int`, *optional*):
            Supervised steps on the task's demonstrations before the run.
        overwrite_output_dir (`bool`, *optional*, defaults to `False`):
            If `True`, start a new run in an `output_dir` that holds an earlier run. The earlier checkpoints are moved
            to `_earlier-1`.
    """

    method: str | None = field(default=None, metadata={"help": f"Training method: {', '.join(METHODS)}."})
    trainer: str | None = field(
        default=None,
        metadata={"help": "A trainer of your own instead of a method: its import path (`my_module.MyTrainer`)."},
    )
    reward_funcs: list[str] | None = field(
        default=None,
        metadata={
            "help": "Reward functions: names from trl_explore.rewards or TRL (`accuracy_reward`, `format_reward`, "
            "`think_format_reward`, ...) or import paths (`my_module.my_reward`)."
        },
    )
    reward_model_name_or_path: str | None = field(
        default=None, metadata={"help": "Reward model: a Hub name or a folder written by `save_pretrained`."}
    )
    task: str | None = field(
        default=None,
        metadata={
            "help": "A task that brings data and rewards, instead of `dataset_name`: `reasoning_gym:countdown`, "
            "`textarena:Wordle-v0`, an embedded task with its tiny model, `chain` (all: trl-explore tasks), or the "
            "import path of a task object, `my_tasks:MAZE`."
        },
    )
    task_config: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "Fields of the task, as JSON text. Fields of a task: trl-explore tasks reasoning_gym:countdown."
        },
    )
    warm_start_steps: int | None = field(
        default=None,
        metadata={"help": "Supervised steps on demonstrations of the task before the run. The result is kept."},
    )
    overwrite_output_dir: bool = field(
        default=False,
        metadata={
            "help": "Start a new run in an output_dir that holds an earlier run: its checkpoints are moved to "
            "`_earlier-1` in it, and its model is overwritten."
        },
    )


class OneLineParser(TrlParser):
    """`TrlParser` that raises a one-line error, because the usage of 300 fields would hide the message."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (all fields: trl-explore train --method METHOD --help)")


def read_config(path: str | None) -> dict[str, Any]:
    """Return the fields of the YAML file given to `--config`, and set the environment variables under its `env`."""
    import yaml

    if path is None:
        return {}
    try:
        with open(path, encoding="utf-8") as file:
            config = yaml.safe_load(file) or {}
    except (OSError, yaml.YAMLError) as error:
        raise UsageError(f"--config {path}: {error}") from error
    if not isinstance(config, dict):
        raise UsageError(f"--config {path}: expected lines of the form `field: value`, got a {type(config).__name__}")
    for name, value in (config.pop("env", None) or {}).items():
        os.environ[name] = str(value)
    return config


def _as_default(value: Any, hint: Any) -> Any:
    """
    Convert a value from the YAML file to a default of the parser.

    Numbers become texts, because the parser converts and checks a text in the same way as a flag. Lists, mappings and
    booleans are not converted. A single value of a field that takes only a list becomes a list.

    Args:
        value (`Any`):
            The value.
        hint (`Any`):
            Type of the field.
    """
    alternatives = [hint]
    if get_origin(hint) in (Union, UnionType):
        alternatives = [choice for choice in get_args(hint) if choice is not NoneType]
    if value is None or isinstance(value, (list, dict)):
        return value
    if all(get_origin(choice) is list for choice in alternatives):
        return [value]
    if isinstance(value, bool):  # YAML reads the `no` of `save_strategy: no` as a boolean
        is_strategy = any(isclass(choice) and issubclass(choice, Enum) for choice in alternatives)
        if is_strategy and not value:
            return "no"
        return value
    return str(value)


def build_arguments(config: dict[str, Any], flags: list[str] | None = None) -> RunArguments:
    """
    Parse the arguments of a run.

    Args:
        config (`dict[str, Any]`):
            Fields as YAML reads them. `method` is a method's name, or a trainer's import path.
        flags (`list[str]`, *optional*):
            Flags of the command line, which override `config`.

    Returns:
        `RunArguments`: The parsed arguments. A run on a task also has the defaults that suit the task.

    Raises:
        UsageError: If a field is unknown or its value is wrong.
    """
    from trl_explore.trainers.config import check_training_values

    method, flags = config["method"], flags or []
    config = {**_defaults_of_task(config, flags), **config}
    types: tuple[Any, ...] = (TrainArguments, find_method(method).config_class, ModelConfig, DatasetMixtureConfig)
    hints: dict[str, Any] = {}
    known: set[str] = set()
    for cls in types:
        hints |= get_type_hints(cls)
        known |= {spec.name for spec in fields(cls) if spec.init}
    parser = OneLineParser(types, prog=f"trl-explore train {flag_of(method)}", allow_abbrev=False)
    for name in config.keys() - known:
        _explain_foreign_field(str(name), method)
        raise UsageError(f"--config: {unknown_name('field', str(name), known)}")
    parser.set_defaults_with_config(**{name: _as_default(value, hints[name]) for name, value in config.items()})
    # Check for unknown flags before the dataclasses are built. If a flag is mistyped, its field keeps the default, and
    # a dataclass may complain about this default instead of the flag.
    for text in parser.parse_known_args(flags)[1]:
        if not text.startswith("--"):
            raise UsageError(f"unexpected argument {text!r}; fields are written --field value")
        name = text[2:].split("=")[0].replace("-", "_")
        _explain_foreign_field(name, method)
        raise UsageError(f"{unknown_name('flag', '--' + name, {'--' + field for field in known})}{_launch_hint(name)}")
    try:
        parsed: Any = parser.parse_args_into_dataclasses(args=flags, look_for_args_file=False)
        check_training_values(parsed[1])  # our configurations do so when they are built, but TRL's own does not
    except (ValueError, TypeError) as error:  # the configurations' own checks raise these
        if "bf16/gpu" in str(error):
            _check_paths(config, flags)  # report a wrong path now, not only after the user has added the flags
            raise UsageError(
                "there is no GPU here that supports bfloat16, in which models are trained by default: add --use_cpu "
                "--bf16 false to train on the CPU, or --bf16 false on an older GPU"
            ) from error
        raise UsageError(str(error)) from error
    return parsed


def _defaults_of_task(config: dict[str, Any], flags: list[str]) -> dict[str, Any]:
    """Return the fields that suit the task of a run and its method. The file and the flags override them."""
    from trl_explore.runs.tasks import find_run_task, read_task_config

    given = _look_ahead(config, flags, "task", "task_config", "dataset_name")
    if given["task"] is None:
        return {}
    data = None
    if config.get("datasets"):
        data = f"datasets={config['datasets']}"
    elif given["dataset_name"] is not None:
        data = f"dataset_name={given['dataset_name']!r}"
    if data is not None:
        raise UsageError(f"task={given['task']!r} and {data}: a task brings its data; leave one of the two out")
    task = find_run_task(str(given["task"]), read_task_config(given["task_config"]))
    return task.options_with(find_method(config["method"]))


def _look_ahead(config: dict[str, Any], flags: list[str], *names: str) -> dict[str, Any]:
    """Return the values of some fields, from the flags or else from the file, before all fields are read."""
    scout = OneLineParser(add_help=False, allow_abbrev=False)
    for name in names:
        scout.add_argument(f"--{name}", f"--{name.replace('_', '-')}", dest=name, default=config.get(name))
    return vars(scout.parse_known_args(flags)[0])


def _check_paths(config: dict[str, Any], flags: list[str]) -> None:
    """Raise a UsageError if the path of the model or of the data does not exist."""
    for name, given in _look_ahead(config, flags, "model_name_or_path", "dataset_name").items():
        path = Path(str(given)).expanduser()
        if given is not None and looks_like_path(str(given)) and not path.exists():
            raise missing_path(name, path)


def _explain_foreign_field(name: str, method: str) -> None:
    """Raise a UsageError that names the methods with this field. Do nothing if no method has it. `method` is the
    method of the run, which does not have it."""
    if is_shared(name):
        raise UsageError(
            f"`{name}` is a field of trl-explore's trainers, but {flag_of(method)} is TRL's own: leave it out, or use "
            "--method exploration, which is plain GRPO with these fields"
        )
    if owners := methods_with(name):
        raise UsageError(
            f"`{name}` is no field of {method}; it belongs to {' and '.join(owners)}: leave it out, or use "
            f"--method {owners[0]}"
        )


def is_shared(name: str) -> bool:
    """Return whether all methods except plain `grpo` have a field."""
    from trl_explore.trainers import ExplorationConfig

    return name in ExplorationConfig.__annotations__


def methods_with(name: str) -> list[str]:
    """Return the names of the methods whose configuration has a field."""
    found = []
    for row in METHODS.values():
        if name in {spec.name for spec in fields(row.config_class)}:
            found.append(row.name)
    return found


def _launch_hint(flag: str) -> str:
    """Return a sentence for users who pass a flag of `accelerate launch` to `trl-explore train`. Empty for other
    flags."""
    from accelerate.commands.launch import launch_command_parser

    if not hasattr(launch_command_parser().parse_args(["script.py"]), flag):
        return ""
    return " It is a flag of accelerate: accelerate launch FLAGS -m trl_explore.cli train ..."


def find_task_of(script_args: TrainArguments) -> "RunTask | None":
    """Return the task that a run's arguments name, if they name one."""
    from trl_explore.runs.tasks import find_run_task, read_task_config

    if script_args.task is None:
        for name in ("task_config", "warm_start_steps"):
            value = getattr(script_args, name)
            if value is not None:
                raise UsageError(f"{name}={value!r} belongs to a task; name one with --task, or leave it out")
        return None
    return find_run_task(script_args.task, read_task_config(script_args.task_config))


def trainer_arguments(arguments: RunArguments, *, start: str | None = None) -> dict[str, Any]:
    """
    Load the data, rewards and environments that the arguments of a run name, and find the model.

    This function also writes the options of the model into `model_init_kwargs` of the method's configuration, as the
    scripts of TRL do.

    Args:
        arguments (`RunArguments`):
            Parsed arguments of the run.
        start (`str`, *optional*):
            Folder of a model that was already taught the task. It replaces the model that `arguments` name.

    Returns:
        `dict`: Arguments of the trainer's constructor.

    Raises:
        UsageError: If the model, the data or a reward cannot be found.
    """
    from trl import get_peft_config, get_quantization_config

    script_args, training_args, model_args, mixture = arguments
    task = find_task_of(script_args)
    evaluates = training_args.eval_strategy != "no"
    if task is None:
        rewards = load_reward_functions(script_args.reward_funcs, script_args.reward_model_name_or_path)
        model = _find_model(arguments)
        train_dataset, eval_dataset = load_train_and_eval(script_args, mixture, needs_eval=evaluates)
        found = {"train_dataset": train_dataset, "eval_dataset": eval_dataset, "reward_funcs": rewards}
    else:
        found = task.trainer_arguments(seed=training_args.seed, evaluates=evaluates)
        if script_args.reward_funcs or script_args.reward_model_name_or_path:
            more = load_reward_functions(script_args.reward_funcs, script_args.reward_model_name_or_path)
            found["reward_funcs"] = [*found["reward_funcs"], *more]
        if task.has_tiny_model and model_args.model_name_or_path is None:
            found["processing_class"] = task.tokenizer()
        model = start or _model_of_task(task, arguments)
    given: Any = training_args.model_init_kwargs or {}  # a dictionary, because the configuration has parsed JSON text
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "trust_remote_code": training_args.trust_remote_code,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **given,
    }
    return {
        "model": model,
        "args": training_args,
        **found,
        "quantization_config": get_quantization_config(model_args),
        "peft_config": get_peft_config(model_args),
    }


def _find_model(arguments: RunArguments) -> str:
    """Return the name or folder of the model that the arguments name. Raise a UsageError if it cannot be found."""
    _, training_args, model_args, _ = arguments
    return check_model(
        model_args.model_name_or_path,
        revision=model_args.model_revision,
        trust_remote_code=training_args.trust_remote_code,
    )


def _model_of_task(task: "RunTask", arguments: RunArguments) -> str:
    """Return the model that a run on a task begins with. If it is the task's tiny model, or if `warm_start_steps` is
    set, the model is taught the task first."""
    script_args, training_args, model_args, _ = arguments
    steps, name = script_args.warm_start_steps, model_args.model_name_or_path
    if steps is not None and steps < 1:
        raise UsageError(f"warm_start_steps={steps}: give at least 1, or leave it out")
    if task.has_tiny_model and name is not None:
        if steps is not None:
            raise UsageError(
                f"warm_start_steps={steps} teaches {task.name} to its tiny model, but model_name_or_path={name!r} "
                "names another model; leave one of the two out"
            )
        return _find_model(arguments)
    if not task.has_tiny_model:
        if name is None:
            raise UsageError(
                f"model_name_or_path is missing: {task.name} has no model of its own; pass a Hub name, a folder, or "
                "--model_name_or_path smollm2"
            )
        name = _find_model(arguments)
        if steps is None:
            return name
        task.check_teaching(steps)
    # The first process of each machine teaches the model. The other processes wait, and find the model in the cache.
    with training_args.main_process_first(desc="warm start"):
        seed, use_cpu = training_args.seed, training_args.use_cpu
        return task.teach(name, steps=steps, seed=seed, use_cpu=use_cpu, progress=not training_args.disable_tqdm)
