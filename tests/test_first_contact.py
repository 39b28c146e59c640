"""What a user can cause is said in a sentence, and nothing that was computed is lost."""

import errno
import json
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from trl_explore.cli import main
from trl_explore.errors import UsageError
from trl_explore.saving.full_disk import is_disk_full
from trl_explore.tasks import get_task
from trl_explore.tasks.warm_start import warm_start

SMALL = ["--task", "doors", "--methods", "grpo", "--tokens", "600", "--evaluations", "1", "--num_eval", "4"]


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), True),
        (OSError(errno.ENOENT, "No such file"), False),
        (RuntimeError("[enforce fail] PytorchStreamWriter failed writing file data/0: file write failed"), True),
        (ValueError("no room"), False),
    ],
)
def test_a_full_disk_is_told_from_other_errors_also_behind_another(error, full):
    assert is_disk_full(error) == full
    try:
        raise RuntimeError("saving failed") from error
    except RuntimeError as outer:
        assert is_disk_full(outer) == full


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--processes", "1"]], ids=["in this process", "in another"])
def test_a_run_on_a_full_disk_ends_in_a_sentence_and_goes_on(tmp_path, more):
    folder = str(tmp_path / "out")
    command = [sys.executable, "-m", "trl_explore.cli", "compare", *SMALL, *more, "--output_dir", folder]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

    def run(limit):
        def few_bytes():
            # Files end there with EFBIG, as they do with ENOSPC on a disk without room.
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=500, preexec_fn=few_bytes)

    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    warm_start(get_task("doors"), seed=0)  # it is there from now on, and the disk fills up at a checkpoint
    full = run(100_000)
    assert full.returncode == 1 and "Traceback" not in full.stderr, full.stderr
    assert "too large" in full.stderr and "error: " in full.stderr
    again = run(unlimited)
    assert again.returncode == 0 and (tmp_path / "out" / "table.md").is_file(), again.stderr


def test_a_port_that_is_taken_or_none_is_named_before_an_index_is_built(tmp_path, capsys):
    pytest.importorskip("fastapi")
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"text": "not even read"}\n')
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve-retriever", "--corpus", str(corpus), "--port", str(port)]) == 2
    told = capsys.readouterr()
    assert f"--port {port} cannot be served at" in told.err and "choose another port" in told.err
    assert "index" not in told.out
    assert main(["serve-retriever", "--corpus", str(corpus), "--port", "70000"]) == 2
    assert "--port 70000 must be between 1 and 65535" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------- the world outside, as it is

RUN = Path(__file__).parent / "integration" / "contact_runs.py"
COMPARE = ["compare", *SMALL, "--seeds", "0"]


def contact(folder, *command, **environment):
    done = subprocess.run(
        [sys.executable, str(RUN), *command],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
    )
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    return done.returncode, done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="nobody, root neither, writes to /proc")
def test_a_cache_that_cannot_be_written_to_is_known_before_a_model_is_taught(monkeypatch):
    monkeypatch.setenv("TRL_EXPLORE_CACHE", "/proc/cache")
    with pytest.raises(UsageError, match="folder ./proc/cache. .*; name another folder in TRL_EXPLORE_CACHE"):
        warm_start(get_task("doors"), seed=0)


# What argparse itself cannot write, without a buffer, it passes over.
BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
HELP = [sys.executable, "-m", "trl_explore.cli", "--help"]


def test_a_reader_that_has_seen_enough_ends_a_command_quietly():
    process = subprocess.Popen(HELP, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=BUFFERED)
    process.stdout.close()
    assert process.communicate()[1] == "" and process.returncode == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_output_that_no_disk_takes_is_told_in_a_sentence():
    with open("/dev/full", "w") as full:
        done = subprocess.run(HELP, stdout=full, stderr=subprocess.PIPE, text=True, env=BUFFERED)
    assert done.returncode == 1 and "Traceback" not in done.stderr and "Exception" not in done.stderr
    assert "trl-explore: error: the disk is full: " in done.stderr


@pytest.mark.parametrize("module", ["torch", pytest.param("transformers.trainer", marks=pytest.mark.slow)])
def test_ctrl_c_during_the_imports_ends_in_one_line(tmp_path, module):
    code, error = contact(tmp_path, "import", module, *COMPARE)
    assert code == 130
    assert error.splitlines()[-1] == "trl-explore: aborted; the same command continues from here"


@pytest.mark.slow
@pytest.mark.parametrize("function", ["train", "PassAtKCallback.evaluate", "write_report"])
def test_ctrl_c_at_any_stage_of_a_comparison_keeps_what_is_done(tmp_path, function):
    cache = {"TRL_EXPLORE_CACHE": str(tmp_path / "cache")} if function == "train" else {}
    code, error = contact(tmp_path, "call", function, *COMPARE, "--output_dir", "out", **cache)
    assert code == 130 and error.rstrip().splitlines()[-2:] == [
        "Stopped; what is done is kept. Continue with:",
        f"  trl-explore {' '.join(COMPARE)} --output_dir out",
    ]
    if function == "write_report":
        assert json.loads((tmp_path / "out/grpo-seed0/run.json").read_text())["points"]
