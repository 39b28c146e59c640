"""
What changed of TRL around each seam of `trl_explore/compat.py`, from one version to the next.

    python tests/drift.py 1.14.2 1.15.0 1.16.0

prints a table for CONTRIBUTING.md; `make drift` does, with the versions that are known to work. A version is a folder
with an unpacked TRL, or a number, whose wheel pip brings. Nothing of these versions is imported.
"""

import ast
import difflib
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

from trl_explore.compat import KNOWN_TRL, SEAMS

TESTS = Path(__file__).resolve().parent


def unpacked(version: str, folder: Path) -> Path:
    """The folder `trl` of a version."""
    if Path(version).is_dir():
        return Path(version)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    subprocess.run([*command, f"trl=={version}"], check=True)
    (wheel,) = folder.glob("trl-*.whl")
    ZipFile(wheel).extractall(folder)
    return folder / "trl"


class Sources:
    """Classes and functions of a TRL, by name."""

    def __init__(self, folder: Path) -> None:
        self.texts: dict[str, str] = {}
        self.bases: dict[str, list[str]] = {}
        for path in sorted(folder.rglob("*.py")):
            if "experimental" not in path.relative_to(folder).parts:
                self._read(path.read_text(encoding="utf-8"))

    def _read(self, text: str) -> None:
        lines = text.splitlines()
        for node in ast.parse(text).body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef):
                continue
            for name, part in _parts(node):
                first = min([part.lineno, *(decorator.lineno for decorator in part.decorator_list)])
                self.texts[name] = textwrap.dedent("\n".join(lines[first - 1 : part.end_lineno]))
            if isinstance(node, ast.ClassDef):
                self.bases[node.name] = [ast.unparse(base).split(".")[-1] for base in node.bases]

    def lines(self, path: str) -> list[str]:
        """Lines of what a seam is about, also where a class has it from another; none if it is not there."""
        *_, owner, name = path.split(".")
        if owner not in self.bases:
            return self.texts.get(name, "").splitlines()
        if f"{owner}.{name}" in self.texts:
            return self.texts[f"{owner}.{name}"].splitlines()
        return next(
            filter(None, (self.lines(f"{base}.{name}") for base in self.bases[owner] if base in self.bases)), []
        )


def _parts(node: ast.ClassDef | ast.FunctionDef) -> Iterator[tuple[str, ast.FunctionDef]]:
    if isinstance(node, ast.FunctionDef):
        yield node.name, node
    else:
        yield from ((f"{node.name}.{part.name}", part) for part in node.body if isinstance(part, ast.FunctionDef))


def num_changed(before: list[str], after: list[str]) -> int:
    """Lines that were taken out or put in."""
    return sum(line[0] in "+-" for line in difflib.ndiff(before, after))


def covering(path: str) -> list[str]:
    """Tests that name what a seam is about, if its name is like no other; `test_contract.py` looks at all."""
    name = path.split(".")[-1]
    if name == "__init__" or "_" not in name:
        return []
    word = re.compile(rf"\b{name}\b")
    files = {file.stem: file.read_text(encoding="utf-8") for file in sorted(TESTS.glob("test_*.py"))}
    return [stem.removeprefix("test_") for stem, text in files.items() if word.search(text) and "contract" not in stem]


def report(names: list[str], versions: list[Sources]) -> str:
    """A table in Markdown: what TRL has at each seam in the newest version, and what changed on the way there."""
    steps = [f"{old} to {new}" for old, new in zip(names, names[1:], strict=False)]
    rows, total, lines = [], [0] * len(steps), 0
    for seam in dict.fromkeys(seam.path for seam in SEAMS if seam.path.startswith("trl.")):
        doors = ", ".join(dict.fromkeys(f"`{other.door}`" for other in SEAMS if other.path == seam))
        texts = [version.lines(seam) for version in versions]
        if not texts[-1]:
            continue  # no function
        counts = [num_changed(old, new) for old, new in zip(texts, texts[1:], strict=False)]
        said = ["new" if new and not old else str(n) for old, new, n in zip(texts, texts[1:], counts, strict=False)]
        total, lines = [sum(pair) for pair in zip(total, counts, strict=True)], lines + len(texts[-1])
        tests = covering(seam)
        rows.append([f"`{'.'.join(seam.split('.')[-2:])}`", doors, str(len(texts[-1])), *said, ", ".join(tests)])
    rows.append(["all", "", str(lines), *map(str, total), ""])
    head = ["seam", "named in", f"lines in {names[-1]}", *steps, "named by the tests of"]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def main(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        folders = [Path(folder) / str(number) for number in range(len(names))]
        for path in folders:
            path.mkdir()
        versions = [Sources(unpacked(name, path)) for name, path in zip(names, folders, strict=True)]
        print(report(names, versions))


if __name__ == "__main__":
    main(sys.argv[1:] or list(KNOWN_TRL))
