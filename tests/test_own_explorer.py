"""The page on an explorer of your own: its code is the example, and its comparison trains it and its control."""

import csv
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import yaml
from commands import EXAMPLES, ROOT

from trl_explore.cli import main

WHOLE_PAGE = (ROOT / "docs" / "own-method.md").read_text()
PAGE = WHOLE_PAGE.split("## Your own explorer")[1].split("## An explorer that adds")[0]
BRANCHES = WHOLE_PAGE.split("## An explorer that adds")[1].split("## The other hooks")[0]
SOURCE = (EXAMPLES / "own_explorer.py").read_text()
SMALL = dict(warm_start_steps=2, evaluations=1, num_eval=2, budget={"steps": 1}, seeds=[0])
SMALL["common"] = dict(per_device_train_batch_size=4, num_generations=2)


def block(language, page=PAGE):
    (text,) = re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)
    return text


def test_the_page_shows_the_example_and_the_explorer_has_at_most_thirty_lines():
    code = block("python")
    assert SOURCE.endswith(code)
    explorer = code[code.index("class HalfwayExplorer") : code.index("@dataclass\nclass HalfwayConfig")]
    assert len([line for line in explorer.splitlines() if line]) <= 30


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    """A folder with the examples, and a file that makes the comparisons of the page small."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("TRL_EXPLORE_CACHE", str(tmp_path / "cache"))
    for name in ("own_explorer.py", "own_branches.py"):
        shutil.copy(EXAMPLES / name, tmp_path)
    Path("tiny.yaml").write_text(yaml.safe_dump({"task": "doors", **SMALL}))


def run_smaller(line):
    line = line.replace("--task doors", "--config tiny.yaml").replace("--tokens 3e4", "")
    assert main(shlex.split(line)[1:]) == 0


@pytest.mark.slow
def test_the_comparison_of_the_page_trains_the_explorer_and_its_control(workdir, capsys):
    document = yaml.safe_load(block("yaml"))
    Path("halfway.yaml").write_text(yaml.safe_dump({**document, **SMALL}))
    command = shlex.split(block("bash").splitlines()[1].replace("--processes 2", "--processes 1"))
    assert main(command[1:]) == 0
    capsys.readouterr()
    with open("out/halfway-unsolved/curves.csv") as file:
        rows = list(csv.DictReader(file))
    assert {row["arm"] for row in rows} == {arm.get("name", "GRPO") for arm in document["arms"]}


@pytest.mark.slow
def test_the_first_command_of_the_page_runs(workdir):
    run_smaller(block("bash").splitlines()[0])


@pytest.mark.slow
def test_the_branch_explorer_of_the_page_runs_and_trains_its_branches(workdir):
    assert (EXAMPLES / "own_branches.py").read_text().endswith(block("python", BRANCHES))
    run_smaller(block("bash", BRANCHES))
    (state,) = Path("out/retry").glob("retry*/**/trainer_state.json")
    assert "branch/reward" in json.loads(state.read_text())["log_history"][0]
