"""
Tasks of the benchmarks, for the tiny model. The package trl_explore ships only the tasks that its documentation uses.

`trl-explore` and its files name one of them by its import path, from the root of the repository:

    trl-explore compare --task examples.benchmarks.tasks:VAULT --tokens 2e5

`trl-explore tasks examples.benchmarks.tasks:VAULT` shows a problem. The scripts of the benchmarks take short names,
`--task vault`.
"""

from typing import Any

from trl_explore.names import unknown_name
from trl_explore.tasks import AGENTS as EMBEDDED_AGENTS
from trl_explore.tasks import TASKS as EMBEDDED

from .countdown import COUNTDOWN, CountdownTask
from .dialects import DIALECT, PLANS, DialectTask
from .frozen_lake import FROZEN_LAKE, MAZE, FrozenLakeEnvironment, FrozenLakeTask
from .lake_agent import LAKE_AGENT, LakeAgentTask
from .multihop import LATE_HOP, RARE_HOP
from .path_exploration import PATHS, PathTask, paper_places
from .sokoban import SOKOBAN, SokobanEnvironment, SokobanTask
from .sudoku import SUDOKU, SudokuTask
from .vaults import VAULT, VaultTask

__all__ = [
    "AGENTS",
    "COUNTDOWN",
    "DIALECT",
    "FROZEN_LAKE",
    "LAKE_AGENT",
    "LATE_HOP",
    "MAZE",
    "PATHS",
    "PLANS",
    "RARE_HOP",
    "SOKOBAN",
    "SUDOKU",
    "TASKS",
    "VAULT",
    "CountdownTask",
    "DialectTask",
    "FrozenLakeEnvironment",
    "FrozenLakeTask",
    "LakeAgentTask",
    "PathTask",
    "SokobanEnvironment",
    "SokobanTask",
    "SudokuTask",
    "VaultTask",
    "find_task",
    "paper_places",
]

TASKS: dict[str, Any] = {
    task.name: task for task in (VAULT, DIALECT, PLANS, PATHS, COUNTDOWN, SUDOKU, FROZEN_LAKE, MAZE, SOKOBAN)
}
AGENTS: dict[str, Any] = {task.name: task for task in (LAKE_AGENT, RARE_HOP, LATE_HOP)}


def find_task(name: str) -> Any:
    """Return the task with a name: a task of this package, or an embedded task."""
    known = {**EMBEDDED, **TASKS, **EMBEDDED_AGENTS, **AGENTS}
    if name not in known:
        raise SystemExit(unknown_name("task", name, known))
    return known[name]
