"""The rows of `METHODS`: cheap to read, and complete."""

import re
import subprocess
import sys
import tomllib

import pytest
import yaml
from commands import ROOT
from trl import GRPOConfig, GRPOTrainer
from world import TINY

import trl_explore
from trl_explore import trainers
from trl_explore.methods import METHODS

OURS = [row for row in METHODS.values() if row.name != "grpo"]
EXPLORING = [row for row in OURS if not row.plain]


def test_reading_the_rows_loads_neither_torch_nor_trl():
    code = "import sys, trl_explore.methods; sys.exit('torch' in sys.modules or 'trl' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_every_row_names_an_exported_trainer_and_its_configuration():
    for row in OURS:
        assert row.trainer_class is vars(trainers)[row.trainer] and row.trainer in trainers.__all__
        assert row.config_class is row.trainer_class.config_class and row.config in trainers.__all__
        assert row.trainer_class.method == row.name
    assert METHODS["grpo"].trainer_class is GRPOTrainer and METHODS["grpo"].config_class is GRPOConfig


def test_plain_grpo_is_there_as_trls_and_with_the_fields_that_all_methods_share():
    assert [row.name for row in METHODS.values() if row.plain] == ["exploration", "grpo"]
    assert METHODS["exploration"].trainer_class is trainers.ExplorationTrainer


def test_every_method_has_its_files_and_a_tiny_run():
    for row in EXPLORING:
        assert (ROOT / "trainers" / f"{row.name}.py").is_file() and (ROOT / "model_cards" / f"{row.card}.md").is_file()
        assert (ROOT / "tests" / f"test_{row.name}.py").is_file()
        assert row.name in TINY, f"{row.name} needs a row in TINY of tests/world.py"


def text_of(path):
    return (ROOT / path).read_text(encoding="utf-8")


def test_the_package_exports_what_its_trainers_export():
    assert sorted(trl_explore.__all__) == sorted([*trainers.__all__, "__version__"])
    assert all(getattr(trl_explore, name) is vars(trainers)[name] for name in trainers.__all__)


def test_type_checkers_see_every_exported_name():
    block = text_of("trl_explore/__init__.py").split("if TYPE_CHECKING:")[1].split(")")[0]
    assert re.findall(r"^ {8}(\w+),$", block, re.MULTILINE) == trainers.__all__


def test_an_issue_can_name_every_method():
    template = yaml.safe_load(text_of(".github/ISSUE_TEMPLATE/learning.yml"))
    (dropdown,) = [part for part in template["body"] if part.get("id") == "method"]
    *titles, shared = dropdown["attributes"]["options"]
    assert titles == [row.title for row in EXPLORING] and "ExplorationTrainer" in shared


def test_the_distribution_has_a_keyword_for_every_method():
    keywords = tomllib.loads(text_of("pyproject.toml"))["project"]["keywords"]
    assert {row.tags[-1] for row in EXPLORING} <= set(keywords)


@pytest.mark.parametrize("row", EXPLORING, ids=lambda row: row.name)
def test_every_page_that_lists_methods_has_this_one(row):
    assert f"methods/{row.name}.md\n" in text_of("mkdocs.yml")
    assert f"(docs/methods/{row.name}.md)" in text_of("README.md")
    assert f"({row.name}.md)" in text_of("docs/methods/index.md")
    assert f"(../docs/methods/{row.name}.md)" in text_of("trainers/README.md")
    assert f"::: trl_explore.trainers.{row.name}.{row.trainer}\n" in text_of("docs/api/trainers.md")
    assert f"::: trl_explore.trainers.{row.name}_config.{row.config}\n" in text_of("docs/api/configs.md")
    assert row.paper["id"] in text_of("CITATION.cff")


@pytest.mark.parametrize("row", EXPLORING, ids=lambda row: row.name)
def test_every_method_has_an_example_and_a_configuration(row):
    assert (ROOT / "examples" / "configs" / f"{row.name}.yaml").is_file()
    scripts = [path.name for path in (ROOT / "examples").glob(f"{row.name}*.py")]
    assert scripts and any(f"({name})" in text_of("examples/README.md") for name in scripts)


# A file that was renamed leaves its old name behind in comments and on pages.
FOLDERS = r"(?<![\w./-])(?:tests|trainers|trl_explore|examples|model_cards|docs)"
NAMED = re.compile(FOLDERS + r"/[\w./-]+\.(?:py|md|ya?ml|sh|ipynb)\b")
TEXTS = (
    *("*.md", "*.toml", "Makefile", "docs/**/*.md"),
    *("trl_explore/**/*.py", "trainers/*", "tests/**/*.py", "examples/**/*.py"),
)


def test_every_file_that_a_text_names_is_there():
    missing = []
    for pattern in TEXTS:
        for path in ROOT.glob(pattern):
            if not path.is_file():
                continue
            for name in NAMED.findall(path.read_text(encoding="utf-8")):
                if not (ROOT / name).exists():
                    missing.append(f"{path.relative_to(ROOT)}: {name}")
    assert missing == []
