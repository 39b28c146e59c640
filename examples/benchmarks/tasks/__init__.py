"""
Tasks of the benchmarks, for the tiny model. The package trl_explore contains only the tasks of its documentation.

The command `trl-explore` and its configuration files take the import path of a task. Run it in the root of the
repository:

    trl-explore compare --task examples.benchmarks.tasks:VAULT --tokens 2e5

`trl-explore tasks examples.benchmarks.tasks:VAULT` shows a problem of the task. The scripts of the benchmarks take the
short name of a task, for example `--task vault`.
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
    """Return the task with a short name, from this package or from `trl_explore.tasks`."""
    known = {**EMBEDDED, **TASKS, **EMBEDDED_AGENTS, **AGENTS}
    if name not in known:
        raise SystemExit(unknown_name("task", name, known))
    return known[name]
