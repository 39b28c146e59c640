"""The command `trl-explore completion`, which prints a script for a shell's completion of commands and flags."""

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
    """Return a parser with the fields of all methods, because a shell does not know the chosen `--method`."""
    from trl import DatasetMixtureConfig, ModelConfig

    from trl_explore.runs.arguments import TrainArguments

    types: list[Any] = [TrainArguments, ModelConfig, DatasetMixtureConfig]
    types += [row.config_class for row in METHODS.values()]
    names = {"config": None}  # a dictionary keeps the order and drops duplicates
    for cls in types:
        for spec in fields(cls):
            if spec.init:
                names[spec.name] = None
    parser = argparse.ArgumentParser()
    for name in names:
        parser.add_argument(f"--{name}")
    return parser


def complete_parser(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add to `parser` the flags of the sub-commands that parse their own flags, and possible values of some flags.
    Return `parser`."""
    import shtab

    from trl_explore.cli.compare import TASK_NAMES
    from trl_explore.cli.flags import subcommands
    from trl_explore.cli.tasks import GROUPS

    commands = subcommands(parser)
    commands["train"] = _train_parser()
    for name in ("advise", "compare", "eval", "filter", "tasks", "tree"):
        commands[name] = import_module(f"trl_explore.cli.{name}").build_parser()
    # Tasks of other packages are left out: bash starts a new word at the colon in their names.
    known: dict[str, Any] = {"method": METHODS, "methods": METHODS, "task": TASK_NAMES}
    for name, command in commands.items():
        actions: list[Any] = command._actions  # shtab reads their attribute `complete`
        for action in actions:
            if action.dest in known:
                action.choices = list(known[action.dest])
                if name == "tasks":
                    action.choices += GROUPS
            elif action.dest in PATHS:
                action.complete = shtab.FILE
    return parser


def run(parser: argparse.ArgumentParser, shell: str) -> int:
    """Print the script for a shell: `bash`, `zsh` or `tcsh`."""
    try:
        import shtab
    except ModuleNotFoundError as error:
        raise UsageError("completion needs shtab: pip install 'trl-explore[completion]'") from error
    print(shtab.complete(complete_parser(parser), shell=shell))
    return 0
