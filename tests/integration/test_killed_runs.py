"""Runs of all methods that are killed at any moment end as the runs that were left alone; see `kill_runs.py`."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

# Two ranks are started there too, and what else works here meanwhile makes it slow.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("two processes")]


def test_runs_that_are_killed_again_and_again_end_as_those_left_alone(tmp_path):
    command = [
        sys.executable,
        str(Path(__file__).with_name("kill_runs.py")),
        "--kills",
        "60",
        "--folder",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=2400)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    kills, different = map(int, re.search(r"(\d+) kills, (\d+) chains with differences", done.stdout).groups())
    assert kills >= 60 and different == 0
