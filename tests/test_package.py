"""What is installed is what is in the tree, and importing it is cheap."""

import ast
import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote

import pytest
import yaml
from datasets import Dataset

import trl_explore
from trl_explore.methods import METHODS
from trl_explore.names import explain_fields, prompt_change

ROOT = Path(__file__).resolve().parent.parent


def test_every_sub_package_of_the_tree_is_installed():
    installed = Path(trl_explore.__file__).parent
    for folder, name in ((ROOT / "trl_explore", installed), (ROOT / "trainers", installed / "trainers")):
        for path in folder.rglob("*.py"):
            relative = path.relative_to(folder)
            if "trainers" not in relative.parts:
                assert (name / relative).is_file(), relative
    assert (installed / "py.typed").is_file()
    for card in (ROOT / "model_cards").glob("*.md"):
        assert (installed / "model_cards" / card.name).is_file(), card
    for part in (ROOT / "trl_explore" / "tree_view").glob("page.*"):
        assert (installed / "tree_view" / part.name).is_file(), part


def python(code, cwd):
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True)


def test_citations_name_the_version_and_the_paper_of_every_method():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == trl_explore.__version__ == metadata.version("trl-explore")
    papers = {ref["identifiers"][0]["value"].removeprefix("arXiv:"): ref["title"] for ref in cited["references"]}
    assert papers == {row.paper["id"]: row.paper["title"] for row in METHODS.values() if row.paper}


def test_badges_say_what_the_distribution_asks_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    trl = next(need.removeprefix("trl") for need in project["dependencies"] if re.match(r"trl\W", need))
    badges = re.findall(
        r"^\[!\[(\w+) (.+?)\]\(.+?/badge/(.+?)-(.+?)-blue\)",
        (ROOT / "README.md").read_text(encoding="utf-8"),
        flags=re.M,
    )
    said = {name: text for name, text, _, _ in badges}
    assert said.items() >= {"Python": project["requires-python"], "TRL": trl, "License": project["license"]}.items()
    drawn = {label.title(): unquote(text).replace("--", "-") for _, _, label, text in badges[:3]}
    assert drawn == {name.title(): text for name, text in list(said.items())[:3]}


def test_type_checkers_see_the_types_of_the_installed_package(tmp_path, monkeypatch):
    finder = pytest.importorskip("mypy.modulefinder")
    from mypy.options import Options

    monkeypatch.chdir(tmp_path)
    paths, site_packages = finder.get_search_dirs(sys.executable)
    search = finder.SearchPaths((), (), (*paths, *site_packages), ())
    found = finder.FindModuleCache(search, None, Options()).find_module("trl_explore.names")
    assert isinstance(found, str) and found.endswith("names.py"), found  # else it says that there is no py.typed


def test_importing_the_package_loads_neither_torch_nor_trl(tmp_path):
    done = python("import sys, trl_explore; print([m for m in ('torch', 'trl') if m in sys.modules])", tmp_path)
    assert done.stdout.strip() == "[]", done.stderr


def test_the_trainers_folder_cannot_be_imported_under_another_name():
    done = python("import trainers", ROOT)
    assert done.returncode == 1 and "import it under that name" in done.stderr


@pytest.mark.parametrize(
    ("columns", "change"),
    [
        (["id", "problem", "solution"], '.rename_column("problem", "prompt")'),
        (["Question", "Answer"], '.rename_column("Question", "prompt")'),
        (["answer", "question_text"], '.rename_column("question_text", "prompt")'),
        (["response", "instruction", "input"], '.rename_column("instruction", "prompt")'),
        (["answer", "riddle"], '.rename_column("riddle", "prompt")'),
        (["answer"], '.rename_column("answer", "prompt")'),
        (["messages", "source"], '.map(lambda row: {"prompt": row["messages"][:-1]})'),
    ],
)
def test_the_change_that_makes_a_prompt_takes_the_likeliest_column(columns, change):
    assert prompt_change(columns) == change
    rows = {column: [[{"role": "user", "content": "a"}] * 2] for column in columns}
    made = eval(f"dataset{change}", {"dataset": Dataset.from_dict(rows)})
    assert "prompt" in made.column_names


def test_no_message_points_to_a_file_that_is_not_installed():
    pages = re.compile(r"(?:examples|docs|tests|model_cards)/[\w./-]+\.\w+|CONTRIBUTING")
    raised = []
    for path in [*(ROOT / "trl_explore").rglob("*.py"), *(ROOT / "trainers").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and node.exc is not None and pages.search(ast.unparse(node.exc)):
                raised.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert raised == []


def test_only_the_command_line_imports_the_command_line():
    for path in [*(ROOT / "trl_explore").rglob("*.py"), *(ROOT / "trainers").rglob("*.py")]:
        if "cli" not in path.parts:
            assert "trl_explore.cli" not in re.findall(r"(?:from|import) (trl_explore\.\w+)", path.read_text()), path


def test_the_help_of_a_field_is_its_entry_in_the_docstring_as_argparse_takes_it():
    @explain_fields
    @dataclass
    class Knobs:
        """
        Knobs.

        Args:
            width (`int`, *optional*, defaults to `1`):
                Children of a `Node`, at
                least 5%. See [`~trl_explore.names.unknown_name`].
            depth (`int`, *optional*, defaults to `2`):
                Levels.

        Raises:
            ValueError: Never.
        """

        width: int = 1
        depth: int = 2

    assert [f.metadata["help"] for f in fields(Knobs)] == [
        "Children of a Node, at least 5%%. See unknown_name.",
        "Levels.",
    ]
    assert Knobs(2).width == Knobs(width=2).width == 2


def test_a_class_without_its_docstring_has_empty_help_and_keeps_that_of_its_base():
    @explain_fields
    @dataclass
    class Base:
        """
        Args:
            width (`int`):
                Children.
        """

        width: int

    @explain_fields
    @dataclass
    class Knobs(Base):
        depth: int = 2

    assert [f.metadata["help"] for f in fields(Knobs)] == ["Children.", ""]
