"""Command lines: flags of a tiny run, and examples up to the point where they would train."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

from trl import TrlParser

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"


# Fields of `trl-explore train` for a run of two steps on a CPU.
TINY_RUN = {
    "output_dir": "out",
    "max_steps": 2,
    "per_device_train_batch_size": 4,
    "num_generations": 4,
    "save_steps": 1,
    "logging_steps": 1,
    "report_to": "none",
    "use_cpu": "true",
    "bf16": "false",
    "disable_tqdm": "true",
}


def as_flags(fields):
    """Return fields as flags of a command. Fields that are None are left out."""
    flags = []
    for name, value in fields.items():
        if value is not None:
            flags += [f"--{name}", str(value)]
    return flags


class Parsed(BaseException):
    """Carries what the parser returned past the rest of a script."""


def parsed(argv, monkeypatch):
    """
    Run an example script with its own parser and defaults, and stop it there: its argument dataclasses. `--use_cpu` is
    added, because configurations ask for a GPU that supports bfloat16.
    """
    parse = TrlParser.parse_args_and_config

    def stop(self, *args, **options):
        raise Parsed(*parse(self, *args, **options))

    with monkeypatch.context() as patch:
        patch.setattr(TrlParser, "parse_args_and_config", stop)
        patch.setattr(sys, "argv", [*argv, "--use_cpu"])
        patch.syspath_prepend(str((ROOT / argv[0]).parent))
        patch.chdir(ROOT)
        try:
            runpy.run_path(str(argv[0]), run_name="__main__")
        except Parsed as result:
            return result.args
    raise AssertionError(f"{argv[0]} did not parse its arguments")


def run_example(name, *arguments, folder, monkeypatch):
    """Run an example in `folder` as its command line does, but in this process, which has the imports behind it."""
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", [str(EXAMPLES / name), *arguments])
        patch.syspath_prepend(str((EXAMPLES / name).parent))
        patch.chdir(folder)
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def shell_calls(script, stubs, folder, *arguments, **environment):
    """
    Run a shell script with stand-ins for some commands, which note their arguments in `CALLS` and then run the Python
    lines given for them. Returns the finished process, and the noted calls in their order.
    """
    calls = folder / "calls"
    calls.touch()
    for name, lines in stubs.items():
        note = "with open(CALLS, 'a') as file:\n    file.write(json.dumps(sys.argv) + '\\n')\n"
        head = f"#!{sys.executable} -I\nimport json, os, sys, time\nCALLS = {str(calls)!r}\n"
        (folder / name).write_text(f"{head}sys.argv[0] = {name!r}\n{note}{lines}\n")
        (folder / name).chmod(0o755)
    done = subprocess.run(
        ["bash", str(script), *arguments],
        cwd=ROOT,
        env={**os.environ, **environment, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    return done, [json.loads(line) for line in calls.read_text().splitlines()]
