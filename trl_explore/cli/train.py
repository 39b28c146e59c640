"""`trl-explore train`: the interface of `trl grpo` (YAML file, flags that override it, LoRA), plus `--method`."""

import os
import re
import shlex
import sys
import textwrap
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields
from enum import Enum
from inspect import isclass
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, NoReturn, Union, get_args, get_origin, get_type_hints

from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, TrlParser

from trl_explore.names import unknown_name
from trl_explore.publishing.hub import HubError
from trl_explore.runs.inputs import (
    UsageError,
    check_model,
    check_output_dir,
    find_checkpoint,
    load_reward_functions,
    load_train_and_eval,
)
from trl_explore.visible_text import visible_text

if TYPE_CHECKING:
    from trl import GRPOConfig, GRPOTrainer


def _grpo() -> "tuple[type[GRPOConfig], type[GRPOTrainer]]":
    from trl import GRPOConfig, GRPOTrainer

    return GRPOConfig, GRPOTrainer


def _deep_grpo() -> "tuple[type[GRPOConfig], type[GRPOTrainer]]":
    from trl_explore.trainers import DeepGRPOConfig, DeepGRPOTrainer

    return DeepGRPOConfig, DeepGRPOTrainer


def _branpo() -> "tuple[type[GRPOConfig], type[GRPOTrainer]]":
    from trl_explore.trainers import BranPOConfig, BranPOTrainer

    return BranPOConfig, BranPOTrainer


def _g2rl() -> "tuple[type[GRPOConfig], type[GRPOTrainer]]":
    from trl_explore.trainers import G2RLConfig, G2RLTrainer

    return G2RLConfig, G2RLTrainer


def _sesa() -> "tuple[type[GRPOConfig], type[GRPOTrainer]]":
    from trl_explore.trainers import SESAConfig, SESATrainer

    return SESAConfig, SESATrainer


def _tree_grpo() -> "tuple[type[GRPOConfig], type[GRPOTrainer]]":
    from trl_explore.trainers import TreeGRPOConfig, TreeGRPOTrainer

    return TreeGRPOConfig, TreeGRPOTrainer


# Functions, because a trainer's import costs seconds that `--help` and a mistyped name need not wait for.
METHODS: "dict[str, Callable[[], tuple[type[GRPOConfig], type[GRPOTrainer]]]]" = {
    "deep_grpo": _deep_grpo,
    "tree_grpo": _tree_grpo,
    "sesa": _sesa,
    "g2rl": _g2rl,
    "branpo": _branpo,
    "grpo": _grpo,
}

# What a run says of itself before it turns to a method's own fields.
FIRST_FIELDS = (
    *("model_name_or_path", "dataset_name", "reward_funcs", "output_dir", "max_steps", "learning_rate"),
    *("per_device_train_batch_size", "num_generations", "max_completion_length", "temperature", "beta"),
    *("use_peft", "use_vllm", "use_cpu"),
)

SHORT_HELP = f"""\
usage: trl-explore train --method METHOD [--config RUN.yaml] [--FIELD VALUE ...]

methods: {", ".join(METHODS)} (grpo is plain TRL, for comparisons)

Fields are those of the method's config, ModelConfig and the script; flags override the file. A first run:
  trl-explore train --method deep_grpo --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct \\
      --dataset_name data.jsonl --reward_funcs accuracy_reward --output_dir out/first

Fields of a method: trl-explore train --method deep_grpo --help (with TRL's: --help-all)
Several processes: accelerate launch --num_processes 4 -m trl_explore.cli train --method deep_grpo ...
"""


@dataclass
class TrainArguments(ScriptArguments):
    """
    Arguments of `trl-explore train` beside those of the method's config.

    Args:
        method (`str`, *optional*):
            Name of the method, one of `METHODS`.
        reward_funcs (`list[str]`, *optional*):
            Reward functions: names from `trl_explore.rewards.answers` or TRL, or import paths.
        reward_model_name_or_path (`str`, *optional*):
            Reward model, a Hub name or a folder.
    """

    method: str | None = field(default=None, metadata={"help": f"Training method: {', '.join(METHODS)}."})
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


class OneLineParser(TrlParser):
    """A `TrlParser` whose complaint is one line: the usage of 300 fields would push it off the screen."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (all fields: trl-explore train --method METHOD --help)")


def read_config(path: str | None) -> dict[str, Any]:
    """
    Reads a YAML file of fields, and sets the environment variables under its `env`.

    Args:
        path (`str` or `None`):
            The file, as given to `--config`.

    Returns:
        `dict`: Fields by name; empty without a file.
    """
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


def _split_arguments(argv: list[str]) -> tuple[str, list[str], dict[str, Any]]:
    """Takes method and config file out of the flags, because the method decides which other flags there are."""
    scout = OneLineParser(add_help=False, allow_abbrev=False)
    scout.add_argument("--method")
    scout.add_argument("--config")
    found, flags = scout.parse_known_args(argv)
    config = read_config(found.config)
    method = found.method or config.get("method")
    if method is None:
        raise UsageError(f"no method: pass --method with one of {', '.join(METHODS)}")
    if method not in METHODS:
        raise UsageError(unknown_name("method", str(method), METHODS))
    return method, flags, config


def parse_train_arguments(
    argv: list[str],
) -> "tuple[TrainArguments, GRPOConfig, ModelConfig, DatasetMixtureConfig]":
    """
    Reads the arguments of `trl-explore train`.

    Args:
        argv (`list[str]`):
            Flags, among them `--method` and `--config`. Flags override the file.

    Returns:
        `tuple`: Script arguments, the method's config, [`~trl.ModelConfig`] and [`~trl.DatasetMixtureConfig`].
    """
    method, flags, config = _split_arguments(argv)
    return build_arguments(config | {"method": method}, flags)


def build_arguments(
    config: dict[str, Any], flags: list[str] | None = None
) -> "tuple[TrainArguments, GRPOConfig, ModelConfig, DatasetMixtureConfig]":
    """
    Builds the arguments of a run from the fields of its file and the flags that override them.

    Args:
        config (`dict`):
            Fields by name, among them `method`, as YAML reads them.
        flags (`list[str]`, *optional*):
            The other fields as flags.

    Returns:
        `tuple`: As [`parse_train_arguments`].

    Raises:
        UsageError: For names that are no field, and for values that a configuration refuses.
    """
    from trl_explore.trainers.config import check_training_values

    method, flags = config["method"], flags or []
    types: tuple[Any, ...] = (TrainArguments, METHODS[method]()[0], ModelConfig, DatasetMixtureConfig)
    hints = {name: hint for cls in types for name, hint in get_type_hints(cls).items()}
    known = {spec.name for cls in types for spec in fields(cls) if spec.init}
    parser = OneLineParser(types, prog=f"trl-explore train --method {method}", allow_abbrev=False)
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
        raise UsageError(str(error)) from error
    return parsed


def _explain_foreign_field(name: str, method: str) -> None:
    """Of a field that other methods have, says which; plain `grpo` is TRL's own trainer and has no field of ours."""
    from trl_explore.trainers import ExplorationConfig

    if name in ExplorationConfig.__annotations__:
        raise UsageError(
            f"`{name}` is a field of trl-explore's trainers, but --method {method} is TRL's own: leave it out, or use "
            "ExplorationTrainer from Python, which is plain GRPO with these fields"
        )
    if owners := methods_with(name):
        raise UsageError(
            f"`{name}` is no field of {method}; it belongs to {' and '.join(owners)}: leave it out, or use "
            f"--method {owners[0]}"
        )


def methods_with(name: str) -> list[str]:
    """
    The methods whose configuration has a field.

    Args:
        name (`str`):
            The field.

    Returns:
        `list[str]`: Their names.
    """
    return [method for method, build in METHODS.items() if name in {spec.name for spec in fields(build()[0])}]


def _launch_hint(flag: str) -> str:
    from accelerate.commands.launch import launch_command_parser

    if flag not in vars(launch_command_parser().parse_args(["script.py"])):
        return ""
    return " It is a flag of accelerate: accelerate launch FLAGS -m trl_explore.cli train ..."


def trainer_arguments(
    script_args: TrainArguments, training_args: "GRPOConfig", model_args: ModelConfig, mixture: DatasetMixtureConfig
) -> dict[str, Any]:
    """
    Finds the model, the data and the rewards that the arguments name.

    Args:
        script_args ([`TrainArguments`]):
            Data set and rewards.
        training_args ([`~trl.GRPOConfig`]):
            The method's configuration; its `model_init_kwargs` are completed.
        model_args ([`~trl.ModelConfig`]):
            Model, adapter and quantisation.
        mixture ([`~trl.DatasetMixtureConfig`]):
            The alternative to `dataset_name`.

    Returns:
        `dict`: What the method's trainer is constructed with.
    """
    from trl import get_peft_config, get_quantization_config

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


def _build_trainer(
    script_args: TrainArguments, training_args: "GRPOConfig", model_args: ModelConfig, mixture: DatasetMixtureConfig
) -> "GRPOTrainer":
    trainer_class = METHODS[str(script_args.method)]()[1]
    return trainer_class(**trainer_arguments(script_args, training_args, model_args, mixture))


def method_help(method: str) -> str:
    """
    The fields that tell a method from others, and the few that every run needs.

    Args:
        method (`str`):
            A name of `METHODS`.

    Returns:
        `str`: About forty lines; short defaults stand in brackets.
    """
    from trl import GRPOConfig

    from trl_explore.trainers import ExplorationConfig

    config = METHODS[method]()[0]
    of_run = {spec.name: spec for cls in (GRPOConfig, ModelConfig, TrainArguments) for spec in fields(cls)}
    plain, shared = ({spec.name for spec in fields(cls)} for cls in (GRPOConfig, ExplorationConfig))
    own = [spec for spec in fields(config) if spec.name not in plain | shared]
    lines = [f"usage: trl-explore train --method {method} [--config RUN.yaml] [--FIELD VALUE ...]"]
    if own:
        lines += ["", f"Fields of {method}:", *map(_help_line, own)]
        common = [spec for spec in fields(config) if spec.name in shared - plain]
        lines += ["", "Fields of all methods but grpo:", *map(_help_line, common)]
    lines += ["", "Of all methods, with many more:", *(_help_line(of_run[name]) for name in FIRST_FIELDS)]
    return "\n".join([*lines, "", f"All fields, with TRL's: trl-explore train --method {method} --help-all"])


def _help_line(spec: "Field[Any]") -> str:
    """A field, its default, and what it does: the whole sentences of its help that fit; `--help-all` has them all."""
    default = spec.default if spec.default_factory is MISSING else spec.default_factory()
    shown = "" if default in (None, False, MISSING) or len(repr(default)) > 20 else f" [{default!r}]"
    sentences = re.split(r"(?<!Eq)\. ", spec.metadata["help"].replace("%%", "%").rstrip("."))
    while len(sentences) > 1 and len(". ".join(sentences)) > 86 - len(shown):
        sentences.pop()
    text = textwrap.shorten(". ".join(sentences), 86 - len(shown), placeholder=" ...")
    return f"  {'--' + spec.name:<29} {text}{shown}"


def resume_command(argv: list[str], checkpoint: str) -> str:
    """
    Writes the command that continues a run.

    Args:
        argv (`list[str]`):
            Arguments the run was started with, after `train`.
        checkpoint (`str`):
            Folder of the checkpoint.

    Returns:
        `str`: A line for the shell.
    """
    scout = OneLineParser(add_help=False, allow_abbrev=False)
    scout.add_argument("--resume_from_checkpoint", "--resume-from-checkpoint")
    kept = scout.parse_known_args(argv)[1]
    return shlex.join(["trl-explore", "train", *kept, "--resume_from_checkpoint", checkpoint])


def run(argv: list[str]) -> int:
    """
    Runs `trl-explore train`.

    Args:
        argv (`list[str]`):
            Arguments after `train`.

    Returns:
        `int`: `0`, or `130` when Ctrl-C stopped the training early.
    """
    if {"-h", "--help"} & set(argv):
        print(SHORT_HELP if len(argv) == 1 else method_help(_split_arguments(argv)[0]))
        return 0
    argv = ["--help" if text == "--help-all" else text for text in argv]  # which the parser of all fields answers
    script_args, training_args, model_args, mixture = parse_train_arguments(argv)
    check_output_dir(str(training_args.output_dir))
    checkpoint = find_checkpoint(training_args.resume_from_checkpoint, str(training_args.output_dir))
    try:
        trainer = _build_trainer(script_args, training_args, model_args, mixture)
    except (ValueError, NotImplementedError, HubError) as error:  # what a trainer refuses, it explains in its message
        raise UsageError(str(error)) from error
    data = [source.path for source in mixture.datasets] or str(script_args.dataset_name)
    return _train(trainer, data, checkpoint, argv)


def _train(trainer: "GRPOTrainer", data: str | list[str], checkpoint: str | None, argv: list[str]) -> int:
    from trl_explore.runs.threads import limit_threads
    from trl_explore.saving.interrupt import InterruptCallback

    model: Any = trainer.model
    limit_threads(model, trainer.accelerator.device)
    output_dir = str(trainer.args.output_dir)
    interrupt = InterruptCallback()
    trainer.add_callback(interrupt)
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    finally:
        interrupt.restore()
    say = trainer.accelerator.print
    stopped_early = interrupt.interrupted and trainer.state.global_step < trainer.state.max_steps
    if stopped_early:
        # not the newest in the folder, which an earlier and longer run may have left there
        saved = os.path.join(output_dir, f"checkpoint-{trainer.state.global_step}")
        say(f"Stopped after step {trainer.state.global_step} of {trainer.state.max_steps}. Continue with:")
        say(f"  {resume_command(argv, saved)}")
        code = 130
    else:
        code = _save_and_push(trainer, output_dir, data)
    trainer.accelerator.end_training()  # trackers and process group
    return code


def _save_and_push(trainer: "GRPOTrainer", output_dir: str, data: Any) -> int:
    from huggingface_hub import constants

    say = trainer.accelerator.print
    said = f"Trained {trainer.state.global_step} steps; model saved to {output_dir}"
    if not trainer.args.push_to_hub:
        trainer.save_model(output_dir)
        say(said)
        return 0
    try:
        trainer.push_to_hub(dataset_name=data)  # saves first
    except HubError as error:
        say(said)
        print(f"trl-explore: error: {visible_text(str(error))}", file=sys.stderr)
        return 1
    say(said)
    say(f"Pushed to {constants.ENDPOINT}/{trainer.hub_model_id}")
    return 0
