"""What a user can cause is said in a sentence, and nothing that was computed is lost."""

import errno
import os
import resource
import socket
import subprocess
import sys

import pytest

from trl_explore.cli import main
from trl_explore.saving.full_disk import is_disk_full

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
    command = [
        sys.executable,
        "-m",
        "trl_explore.cli",
        "compare",
        *SMALL,
        *more,
        "--output_dir",
        str(tmp_path / "out"),
    ]

    env = {**os.environ, "TRL_EXPLORE_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

    def run(limit):
        def few_bytes():
            # Files end there with EFBIG, as they do with ENOSPC on a disk without room.
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=500, preexec_fn=few_bytes)

    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    assert run(unlimited).returncode == 0  # the warm start is there from now on
    for path in (tmp_path / "out").rglob("run.json"):
        path.unlink()
    for path in sorted((tmp_path / "out").rglob("checkpoint-*"), reverse=True):
        for file in path.rglob("*"):
            file.unlink()
        path.rmdir()
    full = run(100_000)
    assert full.returncode == 1 and "Traceback" not in full.stderr, full.stderr
    assert "too large" in full.stderr and "error: " in full.stderr
    again = run(unlimited)
    assert again.returncode == 0 and (tmp_path / "out" / "table.md").is_file(), again.stderr


def test_a_port_that_is_taken_is_named_before_an_index_is_built(tmp_path, capsys):
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


def test_a_port_that_is_none_is_named(tmp_path, capsys):
    pytest.importorskip("fastapi")
    assert main(["serve-retriever", "--corpus", str(tmp_path / "c.jsonl"), "--port", "70000"]) == 2
    assert "--port 70000 must be between 1 and 65535" in capsys.readouterr().err
