"""Parser for the flags of sub-commands."""

import argparse
from typing import NoReturn

from trl_explore.errors import UsageError
from trl_explore.names import unknown_name


class FlagParser(argparse.ArgumentParser):
    """An `ArgumentParser` that raises a UsageError of one line, and suggests the nearest name for an unknown flag."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (all flags: {self.prog} --help)")

    def parse(self, argv: list[str]) -> argparse.Namespace:
        """
        Parse the flags after the name of the sub-command.

        Flags may have dashes instead of underscores, as in `trl-explore train`.

        Args:
            argv (`list[str]`):
                The flags and their values.

        Returns:
            `argparse.Namespace`: Values of all flags.

        Raises:
            UsageError: If a flag is unknown or has a wrong value.
        """
        normalized = []
        for text in argv:
            name, equals, value = text.partition("=")
            if name.startswith("--"):
                name = "--" + name[2:].replace("-", "_")
            normalized.append(name + equals + value)
        args, unknown = self.parse_known_args(normalized)
        if unknown:
            name = unknown[0].partition("=")[0]
            raise UsageError(unknown_name("flag", name, [f"--{known}" for known in vars(args)]))
        return args


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of the sub-commands by name. Changing the dictionary changes `parser`."""
    (action,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return action.choices
