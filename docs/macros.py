"""Tables of the site that are made from the code: `{{ knobs("deep_grpo") }}` and `{{ metrics("deep_grpo") }}`."""

import ast
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the package is not installed where the site is built

from trl_explore.methods import METHODS  # noqa: E402
from trl_explore.names import field_entries  # noqa: E402

REFERENCE = re.compile(r"\[`~?(?:\w+\.)*(\w+)`\]")


def knobs(method: str) -> str:
    """
    The fields that a method adds, as its configuration's docstring tells them. The file is read, not imported: the
    site is built without torch and TRL.
    """
    lines = ["| knob | default | meaning |", "| --- | --- | --- |"]
    for name, (brackets, text) in field_entries(_docstring(METHODS[method].config)).items():
        default = re.search("defaults to (`.+`)", brackets)
        text = REFERENCE.sub(r"`\1`", text)
        lines.append(f"| `{name}` | {default[1] if default else '`None`'} | {text} |")
    return "\n".join(lines)


def metrics(method: str, beginning: str = "") -> str:
    """What a method logs; with a `beginning`, only the metrics whose names start so."""
    described = METHODS[method].metrics.items()
    rows = [f"| `{name}` | {meaning} |" for name, meaning in described if name.startswith(beginning)]
    return "\n".join(["| metric | meaning |", "| --- | --- |", *rows])


def _docstring(config: str) -> str:
    for path in (ROOT / "trainers").glob("*config.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name == config:
                return ast.get_docstring(node) or ""
    raise LookupError(f"no file of trainers/ defines {config}")


def define_env(env: Any) -> None:
    """What mkdocs-macros calls."""
    env.macro(knobs)
    env.macro(metrics)
