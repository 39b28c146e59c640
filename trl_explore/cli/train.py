"""The command `trl-explore train`. It has the interface of `trl grpo` (YAML file, flags that override it, LoRA), and
the flags `--method` and `--trainer`."""

import os
import re
import shlex
import sys
import textwrap
from dataclasses import MISSING, Field, fields
from typing import TYPE_CHECKING, Any

from trl import ModelConfig

from trl_explore.methods import METHODS, Method
from trl_explore.names import program_name
from trl_explore.publishing.hub import HubError
from trl_explore.runs.arguments import (
    OneLineParser,
    RunArguments,
    TrainArguments,
    build_arguments,
    read_config,
    trainer_arguments,
)
from trl_explore.runs.inputs import (
    UsageError,
    check_earlier_run,
    check_output_dir,
    find_checkpoint,
    is_import_path,
)
from trl_explore.runs.methods import find_method, flag_of
from trl_explore.visible_text import visible_text

if TYPE_CHECKING:
    from trl import GRPOConfig, GRPOTrainer

# Fields that the help of every method lists, in addition to the fields of the method.
FIRST_FIELDS = (
    *("model_name_or_path", "dataset_name", "task", "reward_funcs", "output_dir", "max_steps", "learning_rate"),
    *("per_device_train_batch_size", "num_generations", "max_completion_length", "temperature", "beta"),
    *("use_peft", "use_vllm", "use_cpu"),
)

SHORT_HELP = """\
usage: trl-explore train --method METHOD [--config RUN.yaml] [--FIELD VALUE ...]

methods: {methods} (grpo is plain TRL, for comparisons)
exploration is GRPO with the fields that all our trainers share; a trainer of your own: --trainer my_module.MyTrainer

Fields are those of the method's config, ModelConfig and the script; flags override the file. A first run:
  trl-explore train --method deep_grpo --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct \\
      --dataset_name data.jsonl --reward_funcs accuracy_reward --output_dir out/first

The same on a task that brings data and rewards (all: trl-explore tasks):
  trl-explore train --method deep_grpo --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct \\
      --task reasoning_gym:countdown --output_dir out/first

Fields of a method: trl-explore train --method deep_grpo --help (with TRL's: --help-all)
Several processes: accelerate launch --num_processes 4 -m trl_explore.cli train --method deep_grpo ...
"""


def _split_arguments(argv: list[str]) -> tuple[Method, list[str], dict[str, Any]]:
    """
    Read `--method`, `--trainer` and `--config` before the other flags, because the method has flags of its own.

    Args:
        argv (`list[str]`):
            All flags.

    Returns:
        `tuple[Method, list[str], dict[str, Any]]`: The method; the other flags; and the fields of the YAML file, in
        which a method or trainer of the flags replaces the method or trainer of the file.

    Raises:
        UsageError: If no method is given, the method is unknown, or both a method and a trainer are given.
    """
    scout = OneLineParser(add_help=False, allow_abbrev=False)
    for name in ("--method", "--trainer", "--config"):
        scout.add_argument(name)
    given, flags = scout.parse_known_args(argv)
    config = read_config(given.config)
    in_file: dict[str, str] = {}
    in_flags: dict[str, str] = {}
    for name in ("method", "trainer"):
        in_file[name] = config.pop(name, None)
        in_flags[name] = getattr(given, name)
    named = {name: str(value) for name, value in in_flags.items() if value}
    if not named:
        named = {name: str(value) for name, value in in_file.items() if value}
    if not named:
        raise UsageError(
            f"no method: pass --method with one of {', '.join(METHODS)}, or --trainer my_module.MyTrainer"
        )
    if len(named) == 2:
        both = " and ".join(f"{name}={value!r}" for name, value in named.items())
        raise UsageError(f"{both}: give one of the two, a trainer replaces a method")
    ((kind, name),) = named.items()  # `kind` is "method" or "trainer"
    if kind == "trainer" and not is_import_path(name):
        raise UsageError(
            f"trainer={name!r} is no import path, such as my_module.MyTrainer; methods are named with --method"
        )
    # The field `method` also holds the import path of a trainer, because `find_method` finds a trainer by its path.
    return find_method(name, kind), flags, config | {"method": name, kind: name}


def parse_train_arguments(argv: list[str]) -> RunArguments:
    """Return the arguments of a run from its flags and its YAML file. Flags override the file."""
    _, flags, config = _split_arguments(argv)
    return build_arguments(config, flags)


def method_help(row: Method) -> str:
    """
    Return the help of a method: its own fields, and some fields that every run needs, with short defaults in brackets.

    The fields that all our trainers share are only named. They are explained if the method has no fields of its own.

    Args:
        row ([`~trl_explore.methods.Method`]):
            The method.

    Returns:
        `str`: The text.
    """
    from trl import GRPOConfig

    from trl_explore.trainers import ExplorationConfig

    config, chosen = row.config_class, flag_of(row.name)
    by_name: dict[str, Field[Any]] = {}
    for spec in (*fields(GRPOConfig), *fields(ModelConfig), *fields(TrainArguments)):
        by_name[spec.name] = spec
    of_grpo = {spec.name for spec in fields(GRPOConfig)}
    shared = {spec.name for spec in fields(ExplorationConfig)} - of_grpo
    own = [spec for spec in fields(config) if spec.name not in of_grpo | shared]
    common = [spec for spec in fields(config) if spec.name in shared]
    names = ", ".join(spec.name for spec in common)
    lines = [f"usage: trl-explore train {chosen} [--config RUN.yaml] [--FIELD VALUE ...]"]
    if own:
        lines += ["", f"Fields of {row.name}:", *map(_help_line, own)]
    if own and common:
        lines += ["", "Fields of all methods but grpo, explained by --method exploration --help:"]
        lines += textwrap.wrap(names, 119, initial_indent="  ", subsequent_indent="  ")
    elif common:
        lines += ["", "Fields of all methods but grpo:", *map(_help_line, common)]
    lines += ["", "Of all methods, with many more:", *(_help_line(by_name[name]) for name in FIRST_FIELDS)]
    return "\n".join([*lines, "", f"All fields, with TRL's: trl-explore train {chosen} --help-all"])


def _help_line(spec: "Field[Any]") -> str:
    """Return one line with a field, the first sentences of its help that fit, and its default. `--help-all` has the
    whole help."""
    default = spec.default
    if spec.default_factory is not MISSING:
        default = spec.default_factory()
    shown = ""
    if default not in (None, False, MISSING) and len(repr(default)) <= 20:
        shown = f" [{default!r}]"
    room = 86 - len(shown)
    text = spec.metadata.get("help", "")  # fields of a user's own configuration may have no help
    sentences = re.split(r"(?<!Eq)\. ", text.replace("%%", "%").rstrip("."))  # `Eq. 5` ends no sentence
    while len(sentences) > 1 and len(". ".join(sentences)) > room:
        sentences.pop()
    text = textwrap.shorten(". ".join(sentences), room, placeholder=" ...")
    return f"  {'--' + spec.name:<29} {text}{shown}"


def resume_command(argv: list[str], checkpoint: str) -> str:
    """Return the command that continues a run from a checkpoint. `argv` has the flags of the run."""
    scout = OneLineParser(add_help=False, allow_abbrev=False)
    scout.add_argument("--resume_from_checkpoint", "--resume-from-checkpoint")
    kept = scout.parse_known_args(argv)[1]
    return shlex.join([program_name(), "train", *kept, "--resume_from_checkpoint", checkpoint])


def run(argv: list[str]) -> int:
    """Run `trl-explore train`, and return its exit status, which is 130 after Ctrl-C."""
    if argv in (["-h"], ["--help"]):
        print(SHORT_HELP.format(methods=", ".join(METHODS)))
        return 0
    if {"-h", "--help"} & set(argv):
        print(method_help(_split_arguments(argv)[0]))
        return 0
    # The parser of all fields answers `--help` with all fields.
    argv = ["--help" if text == "--help-all" else text for text in argv]
    arguments = parse_train_arguments(argv)
    script_args, training_args, model_args, mixture = arguments
    check_output_dir(str(training_args.output_dir))
    checkpoint = find_checkpoint(training_args.resume_from_checkpoint, str(training_args.output_dir))
    if not script_args.overwrite_output_dir:
        _check_earlier_run(training_args, checkpoint, model_args.model_name_or_path)
    try:
        trainer = find_method(str(script_args.method)).trainer_class(**trainer_arguments(arguments))
    except (ValueError, NotImplementedError, HubError) as error:  # their messages say what to change
        raise UsageError(str(error)) from error
    data: str | list[str] | None = str(script_args.dataset_name)
    if script_args.task is not None:
        data = _name_task(trainer, script_args.task)
    elif mixture.datasets:
        data = [source.path for source in mixture.datasets]
    if script_args.overwrite_output_dir and checkpoint is None:
        _set_aside_checkpoints(trainer)
    return _train(trainer, data, checkpoint, argv)


def _name_task(trainer: "GRPOTrainer", task: str) -> str | None:
    """Set the name of a task's data for model cards, and return it. Return None for TRL's own trainer, because TRL's
    card would link a data set of that name on the Hub."""
    from trl_explore.publishing.cards import data_of_task
    from trl_explore.trainers import ExplorationTrainer

    if not isinstance(trainer, ExplorationTrainer):
        return None
    trainer.dataset_names = [data_of_task(task)]  # for the cards of checkpoints, too
    return trainer.dataset_names[0]


def _check_earlier_run(training_args: "GRPOConfig", checkpoint: str | None, model: str | None) -> None:
    """Raise a UsageError if the run would overwrite an earlier one. The first process decides for all processes,
    because the others may not have access to the folder."""
    problem: str | None = None
    if training_args.process_index == 0:
        try:
            check_earlier_run(str(training_args.output_dir), checkpoint=checkpoint, model=model)
        except UsageError as error:
            problem = str(error)
    if training_args.world_size > 1:
        from accelerate.utils import broadcast_object_list

        (problem,) = broadcast_object_list([problem])
    if problem is not None:
        raise UsageError(problem)


def _set_aside_checkpoints(trainer: "GRPOTrainer") -> None:
    """Move the checkpoints of an earlier run to another folder, so that nobody resumes this run from them."""
    from trl_explore.saving.checkpoints import set_aside_checkpoints

    if trainer.accelerator.is_main_process:
        aside = set_aside_checkpoints(str(trainer.args.output_dir))
        if aside is not None:
            print(f"trl-explore: checkpoints of an earlier run are in {aside} now", file=sys.stderr)
    trainer.accelerator.wait_for_everyone()


def _train(trainer: "GRPOTrainer", data: str | list[str] | None, checkpoint: str | None, argv: list[str]) -> int:
    """Train, save and push the model, and return the exit status."""
    from trl_explore.machine.threads import limit_threads
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
        # The newest checkpoint in the folder may belong to an earlier and longer run, so name this run's checkpoint.
        saved = os.path.join(output_dir, f"checkpoint-{trainer.state.global_step}")
        say(f"Stopped after step {trainer.state.global_step} of {trainer.state.max_steps}. Continue with:")
        say(f"  {resume_command(argv, saved)}")
        code = 130
    else:
        code = _save_and_push(trainer, output_dir, data)
    trainer.accelerator.end_training()  # ends trackers and the process group
    return code


def _save_and_push(trainer: "GRPOTrainer", output_dir: str, data: Any) -> int:
    """Save the model, push it if the configuration says so, and return the exit status."""
    from huggingface_hub import constants

    from trl_explore.trainers import ExplorationConfig

    say = trainer.accelerator.print
    report = f"Trained {trainer.state.global_step} steps; model saved to {output_dir}"
    if not trainer.args.push_to_hub:
        trainer.save_model(output_dir)
        say(report)
        return 0
    try:
        trainer.push_to_hub(dataset_name=data)  # also saves the model
    except HubError as error:
        say(report)
        print(f"trl-explore: error: {visible_text(str(error))}", file=sys.stderr)
        return 1
    say(report)
    if isinstance(trainer.args, ExplorationConfig) and trainer.args.push_dry_run:
        return 0  # the trainer has printed the files that it would push
    say(f"Pushed to {constants.ENDPOINT}/{trainer.hub_model_id}")
    return 0
