"""The error of a command that was given something wrong."""


class UsageError(Exception):
    """A mistake in the arguments, told in one line instead of a traceback; the command exits with code 2."""
