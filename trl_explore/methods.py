"""Table of all methods. Lists of methods are made from it. This module must load neither torch nor TRL.

A method's row is in the file `method.py` of the method's folder. `plain_methods.py` has the rows of GRPO.
"""

from collections.abc import Callable
from typing import Any

from trl_explore.agent_trees.method import AGENT_TREE_GRPO
from trl_explore.auto.method import AUTO, EXPLORERS, SHARED_OPTIONS
from trl_explore.branches.method import BRANPO
from trl_explore.chains.method import ATTN_RL, TREE_RL
from trl_explore.gradients.method import G2RL
from trl_explore.label_free.method import EVOL_RL
from trl_explore.method_row import OURS, Method, Remark
from trl_explore.pivots.method import DEEP_GRPO
from trl_explore.plain_methods import EXPLORATION, GRPO
from trl_explore.sketches.method import SESA
from trl_explore.step_groups.method import GIGPO
from trl_explore.trees.method import TREE_GRPO

__all__ = [
    "EXPLORERS",
    "METHODS",
    "OURS",
    "ROWS",
    "SHARED_OPTIONS",
    "FromRow",
    "Method",
    "Remark",
    "logged_by_a_method",
]

# Lists, tables and pictures keep this order.
ROWS = (
    DEEP_GRPO,
    TREE_GRPO,
    SESA,
    G2RL,
    BRANPO,
    GIGPO,
    AGENT_TREE_GRPO,
    EVOL_RL,
    TREE_RL,
    ATTN_RL,
    AUTO,
    EXPLORATION,
    GRPO,
)
METHODS: dict[str, Method] = {row.name: row for row in ROWS}


class FromRow:
    """Attribute of a trainer class that is read from the row of its `method`."""

    def __init__(self, read: Callable[[Method], Any]) -> None:
        self.read = read

    def __get__(self, trainer: Any, owner: Any) -> Any:
        if owner.method not in METHODS:
            raise ValueError(
                f"{owner.__name__} has `method={owner.method!r}`, which is no method of trl-explore. Leave that line "
                "out of the class, so that it has the method of its parent class, or add a row: "
                f"`trl_explore.methods.METHODS[{owner.method!r}] = trl_explore.methods.Method(...)`"
            )
        return self.read(METHODS[owner.method])


def logged_by_a_method(name: str) -> bool:
    """Return whether only a method of this package logs a metric of this name."""
    return any(row.logs_alone(name) for row in METHODS.values())
