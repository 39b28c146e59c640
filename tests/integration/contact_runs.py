"""
A command of ours where Ctrl-C is pressed: python contact_runs.py WHAT WHERE COMMAND ...

`import MODULE` and `call FUNCTION`: Ctrl-C is pressed when a module is first imported, or a function first called.
"""

import signal
import sys


class AtImport:
    """A finder that finds nothing."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == sys.argv[2]:
            sys.meta_path.remove(AtImport)
            signal.raise_signal(signal.SIGINT)


def at_call(frame, event, argument):
    if event == "call" and frame.f_code.co_qualname == sys.argv[2]:
        sys.setprofile(None)
        signal.raise_signal(signal.SIGINT)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where a shell ignores it
    if sys.argv[1] == "import":
        sys.meta_path.insert(0, AtImport)
    else:
        sys.setprofile(at_call)
    from trl_explore.cli import main

    sys.exit(main(sys.argv[3:]))
