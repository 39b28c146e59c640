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
# Fields that few users change: no example, no benchmark and no other text of the site names them. By method.
RARELY_NEEDED = {
    "attn_rl": ("influence_quantile",),
    "branpo": ("branch_depth_solved",),
    "deep_grpo": ("estimator_buffer_size", "estimator_min_samples"),
    "evol_rl": ("embedding_batch_size",),
    "exploration": ("max_sampling_rounds", "count_bonus_scope"),
    "g2rl": ("reward_clip",),
    "tree_grpo": ("uct_coef", "q_decay_min"),
}
RARE_HEADING = "| **Rarely needed** | | |"


def knobs(method: str) -> str:
    """
    Return the table of the fields that a method adds, from its configuration's docstring. Rarely needed fields are at
    the end. The file is read, not imported: the site is built without torch and TRL.
    """
    usual, rare = ["| knob | default | meaning |", "| --- | --- | --- |"], []
    for name, (brackets, text) in field_entries(_docstring(METHODS[method].config)).items():
        default = re.search("defaults to (`.+`)", brackets)
        text = REFERENCE.sub(r"`\1`", text)
        rows = rare if name in RARELY_NEEDED.get(method, ()) else usual
        rows.append(f"| `{name}` | {default[1] if default else '`None`'} | {text} |")
    if rare:
        usual.append(RARE_HEADING)
    return "\n".join([*usual, *rare])


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
