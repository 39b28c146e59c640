"""What a run is asked for: file and flags, turned into configurations, and these into a trainer's arguments."""

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

# Script arguments, the method's configuration, the model's, and the mixture of data sets.
RunArguments: TypeAlias = "tuple[TrainArguments, GRPOConfig, ModelConfig, DatasetMixtureConfig]"


@dataclass
class TrainArguments(ScriptArguments):
    """
    Arguments of `trl-explore train` beside those of the method's config.

    Args:
        method (`str`, *optional*):
            Name of the method, one of `METHODS`.
        trainer (`str`, *optional*):
            A trainer of one's own in the place of a method, by its import path.
        reward_funcs (`list[str]`, *optional*):
            Reward functions: names from `trl_explore.rewards.answers` or TRL, or import paths.
        reward_model_name_or_path (`str`, *optional*):
            Reward model, a Hub name or a folder.
        overwrite_output_dir (`bool`, *optional*, defaults to `False`):
            Start anew in an `output_dir` that holds an earlier run, whose checkpoints are moved to `_earlier-1`.
    """

    method: str | None = field(default=None, metadata={"help": f"Training method: {', '.join(METHODS)}."})
    trainer: str | None = field(
        default=None,
        metadata={"help": "A trainer of your own in the place of a method: its import path (`my_module.MyTrainer`)."},
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
    overwrite_output_dir: bool = field(
        default=False,
        metadata={
            "help": "Start anew in an output_dir that holds an earlier run: its checkpoints are moved to `_earlier-1` "
            "in it, and its model is overwritten."
        },
    )


class OneLineParser(TrlParser):
    """A `TrlParser` whose complaint is one line: the usage of 300 fields would push it off the screen."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (all fields: trl-explore train --method METHOD --help)")


def read_config(path: str | None) -> dict[str, Any]:
    """The fields of a YAML file, as given to `--config`; sets the environment variables under its `env`."""
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
    """Brings a YAML value into the form that a flag's text has, so that the parser checks both alike."""
    union = get_origin(hint) in (Union, UnionType)
    alternatives = [choice for choice in get_args(hint) if choice is not NoneType] if union else [hint]
    if value is None or isinstance(value, (list, dict)):
        return value
    if all(get_origin(choice) is list for choice in alternatives):
        return [value]
    if isinstance(value, bool):  # YAML reads the `no` of `save_strategy: no` as a boolean
        is_strategy = any(isclass(choice) and issubclass(choice, Enum) for choice in alternatives)
        return "no" if is_strategy and not value else value
    return str(value)


def build_arguments(config: dict[str, Any], flags: list[str] | None = None) -> RunArguments:
    """The arguments of a run: fields as YAML reads them, under the flags that override them. `method` is among the
    fields: a method's name, or a trainer's import path."""
    from trl_explore.trainers.config import check_training_values

    method, flags = config["method"], flags or []
    types: tuple[Any, ...] = (TrainArguments, find_method(method).config_class, ModelConfig, DatasetMixtureConfig)
    hints = {name: hint for cls in types for name, hint in get_type_hints(cls).items()}
    known = {spec.name for cls in types for spec in fields(cls) if spec.init}
    parser = OneLineParser(types, prog=f"trl-explore train {flag_of(method)}", allow_abbrev=False)
    for name in config.keys() - known:
        _explain_foreign_field(str(name), method)
        raise UsageError(f"--config: {unknown_name('field', str(name), known)}")
    parser.set_defaults_with_config(**{name: _as_default(value, hints[name]) for name, value in config.items()})
    # Looked at before the dataclasses are built: a mistyped field would else show as a complaint about its default.
    for text in parser.parse_known_args(flags)[1]:
        if not text.startswith("--"):
            raise UsageError(f"unexpected argument {text!r}; fields are written --field value")
        name = text[2:].split("=")[0].replace("-", "_")
        _explain_foreign_field(name, method)
        raise UsageError(f"{unknown_name('flag', '--' + name, {'--' + field for field in known})}{_launch_hint(name)}")
    try:
        parsed: Any = parser.parse_args_into_dataclasses(args=flags, look_for_args_file=False)
        check_training_values(parsed[1])  # plain TRL's configuration does not
    except (ValueError, TypeError) as error:  # what the configs' own checks raise
        if "bf16/gpu" in str(error):
            _check_paths(config, flags)  # what else is wrong would be told after the flags only
            raise UsageError(
                "there is no GPU here that knows bfloat16, in which models are trained by default: add --use_cpu "
                "--bf16 false to train on the CPU, or --bf16 false on an older GPU"
            ) from error
        raise UsageError(str(error)) from error
    return parsed


def _check_paths(config: dict[str, Any], flags: list[str]) -> None:
    """Raise where the model's or the data's path is not there."""
    scout = OneLineParser(add_help=False, allow_abbrev=False)
    for name in ("model_name_or_path", "dataset_name"):
        scout.add_argument(f"--{name}", f"--{name.replace('_', '-')}", default=config.get(name))
    for name, given in vars(scout.parse_known_args(flags)[0]).items():
        path = Path(str(given)).expanduser()
        if given is not None and looks_like_path(str(given)) and not path.exists():
            raise missing_path(name, path)


def _explain_foreign_field(name: str, method: str) -> None:
    """Of a field that other methods have, says which; plain `grpo` is TRL's own trainer and has no field of ours."""
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
    """Whether a field is one that all methods but plain `grpo` have."""
    from trl_explore.trainers import ExplorationConfig

    return name in ExplorationConfig.__annotations__


def methods_with(name: str) -> list[str]:
    """The methods whose configuration has a field."""
    return [row.name for row in METHODS.values() if name in {spec.name for spec in fields(row.config_class)}]


def _launch_hint(flag: str) -> str:
    from accelerate.commands.launch import launch_command_parser

    if flag not in vars(launch_command_parser().parse_args(["script.py"])):
        return ""
    return " It is a flag of accelerate: accelerate launch FLAGS -m trl_explore.cli train ..."


def trainer_arguments(arguments: RunArguments) -> dict[str, Any]:
    """What a trainer is constructed with: the model, the data and the rewards that the arguments name, found."""
    from trl import get_peft_config, get_quantization_config

    script_args, training_args, model_args, mixture = arguments
    rewards = load_reward_functions(script_args.reward_funcs, script_args.reward_model_name_or_path)
    model = check_model(
        model_args.model_name_or_path,
        revision=model_args.model_revision,
        trust_remote_code=training_args.trust_remote_code,
    )
    train_dataset, eval_dataset = load_train_and_eval(
        script_args, mixture, needs_eval=training_args.eval_strategy != "no"
    )
    given: Any = training_args.model_init_kwargs or {}  # the config has turned JSON text into a dictionary
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "trust_remote_code": training_args.trust_remote_code,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **given,
    }
    return {
        "model": model,
        "reward_funcs": rewards,
        "args": training_args,
        "train_dataset": train_dataset,
        "eval_dataset": eval_dataset,
        "quantization_config": get_quantization_config(model_args),
        "peft_config": get_peft_config(model_args),
    }
