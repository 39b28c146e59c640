"""What a shell offers after the completion script of `trl-explore` was sourced."""

import subprocess
import sys

import pytest

from trl_explore.cli import main

TRY = """
source ./script
COMP_WORDS=("$@" "$LAST")
COMP_CWORD=$#
_shtab_trl_explore
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def offered(tmp_path_factory):
    pytest.importorskip("shtab")
    folder = tmp_path_factory.mktemp("completion")
    with open(folder / "script", "w") as file, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", file)
        assert main(["completion", "bash"]) == 0

    def complete(line):
        *words, last = line.split(" ")
        command = ["bash", "-c", TRY, "bash", *words]
        done = subprocess.run(command, cwd=folder, env={"LAST": last}, capture_output=True, text=True, check=True)
        return done.stdout.split()

    return complete


def test_sub_commands_flags_methods_and_tasks_are_offered(offered):
    assert {"train", "compare", "env"} <= set(offered("trl-explore "))
    assert offered("trl-explore comp") == ["compare", "completion"]
    assert offered("trl-explore train --method tr") == ["tree_grpo", "tree_rl"]
    assert offered("trl-explore train --num_bran") == ["--num_branches", "--num_branches_solved"]
    assert offered("trl-explore compare --task deep") == ["deep_doors"]
    assert offered("trl-explore train --task deep") == ["deep_doors"]
    assert offered("trl-explore eval --task_c") == ["--task_config"]
    assert offered("trl-explore tasks rea") == ["reasoning_gym"]
    assert offered("trl-explore tasks deep") == ["deep_doors"]
    assert offered("trl-explore compare --methods grpo b") == ["branpo"]
    assert offered("trl-explore filter --thr") == ["--threshold"]
    assert offered("trl-explore eval --metr") == ["--metrics"]


def test_without_shtab_the_error_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)  # as if it were not installed
    assert main(["completion", "zsh"]) == 2
    assert "pip install 'trl-explore[completion]'" in capsys.readouterr().err
