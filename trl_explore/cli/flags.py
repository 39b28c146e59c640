"""Flags of the sub-commands that have few enough to list them."""

import argparse
from typing import NoReturn

from trl_explore.errors import UsageError
from trl_explore.names import unknown_name


class FlagParser(argparse.ArgumentParser):
    """An `ArgumentParser` whose complaint is one line, and which knows the nearest name of an unknown flag."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (all flags: {self.prog} --help)")

    def parse(self, argv: list[str]) -> argparse.Namespace:
        """Reads the flags behind the sub-command; those of `train` may be written with dashes, so these may too."""
        flags = [flag.partition("=") for flag in argv]
        argv = [
            "--" + name[2:].replace("-", "_") + equals + value if name.startswith("--") else name + equals + value
            for name, equals, value in flags
        ]
        args, unknown = self.parse_known_args(argv)
        if unknown:
            name = unknown[0].partition("=")[0]
            raise UsageError(unknown_name("flag", name, [f"--{known}" for known in vars(args)]))
        return args


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of a parser's sub-commands by name; what is put into the answer is there."""
    (action,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return action.choices
