"""`trl-explore completion`: a script that lets a shell complete sub-commands, flags, methods and tasks."""

import argparse
from dataclasses import fields
from importlib import import_module
from typing import Any

from trl_explore.errors import UsageError
from trl_explore.methods import METHODS

# Flags whose value is a path.
PATHS = (
    "config",
    "dataset_name",
    "model_name_or_path",
    "output",
    "output_dir",
    "corpus",
    "index",
    "html",
    "file",
    "run",
)


def _train_parser() -> argparse.ArgumentParser:
    """The fields of all methods: which of them apply depends on `--method`, which a shell does not look at."""
    from trl import DatasetMixtureConfig, ModelConfig

    from trl_explore.runs.arguments import TrainArguments

    types: list[Any] = [
        TrainArguments,
        ModelConfig,
        DatasetMixtureConfig,
        *(row.config_class for row in METHODS.values()),
    ]
    parser = argparse.ArgumentParser()
    for name in ["config", *dict.fromkeys(spec.name for cls in types for spec in fields(cls) if spec.init)]:
        parser.add_argument(f"--{name}")
    return parser


def complete_parser(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Fills in what the sub-commands read by themselves, and what values there are to choose from."""
    import shtab

    from trl_explore.cli.compare import TASK_NAMES
    from trl_explore.cli.flags import subcommands
    from trl_explore.cli.tasks import GROUPS

    commands = subcommands(parser)
    commands["train"] = _train_parser()
    for name in ("advise", "compare", "eval", "filter", "tasks", "tree"):
        commands[name] = import_module(f"trl_explore.cli.{name}").build_parser()
    # Names of packages' tasks are left out: bash begins a new word at their colon.
    known: dict[str, Any] = {"method": METHODS, "methods": METHODS, "task": TASK_NAMES}
    for name, command in commands.items():
        actions: list[Any] = command._actions  # `complete` is an attribute that shtab reads
        for action in actions:
            if action.dest in known:
                action.choices = list(known[action.dest])
                if name == "tasks":
                    action.choices += GROUPS
            elif action.dest in PATHS:
                action.complete = shtab.FILE
    return parser


def run(parser: argparse.ArgumentParser, shell: str) -> int:
    """Prints the script for a shell: `bash`, `zsh` or `tcsh`."""
    try:
        import shtab
    except ModuleNotFoundError as error:
        raise UsageError("completion needs shtab: pip install 'trl-explore[completion]'") from error
    print(shtab.complete(complete_parser(parser), shell=shell))
    return 0
