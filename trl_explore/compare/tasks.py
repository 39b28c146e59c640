"""What `trl-explore compare` knows about the embedded tasks: shared options, metrics, held-out problems."""

from typing import Any

from trl_explore.compare.arms import common_options
from trl_explore.names import unknown_name
from trl_explore.runs.inputs import UsageError
from trl_explore.tasks import AGENTS, LAKE_AGENT, MULTI_HOP, RARE_HOP, TASKS, PathTask

ALL_TASKS: dict[str, Any] = TASKS | AGENTS
# Which rounds of tool calls an agent's task allows.
ROUNDS = {LAKE_AGENT.name: LAKE_AGENT.max_turns} | {t.name: t.max_searches for t in (MULTI_HOP, RARE_HOP)}
AGENT_ROWS = 64  # per step: 8 prompts with 8 trajectories


def find_task(name: str) -> Any:
    """
    Look an embedded task up, those for agents included.

    Args:
        name (`str`):
            Its name.

    Returns:
        [`~trl_explore.tasks.TeachableTask`]: The task.

    Raises:
        UsageError: With the nearest name, if there is no such task.
    """
    if name not in ALL_TASKS:
        raise UsageError(f"task: {unknown_name('task', name, ALL_TASKS)}")
    return ALL_TASKS[name]


def task_options(task: Any) -> dict[str, Any]:
    """
    Training options that all arms on a task share.

    Args:
        task ([`~trl_explore.tasks.TeachableTask`]):
            The task.

    Returns:
        `dict`: Fields of [`~trl.GRPOConfig`], without those that the comparison sets itself.
    """
    options = common_options(task, seed=0)
    for name in ("seed", "logging_steps", "save_strategy", "disable_tqdm"):
        del options[name]
    if task.name in AGENTS:
        options |= {"per_device_train_batch_size": AGENT_ROWS, "max_tool_calling_iterations": ROUNDS[task.name]}
    if isinstance(task, PathTask):  # one prompt; without a KL term, lists of candidates break on some seeds
        options |= {"num_generations": 16, "learning_rate": 1e-4, "beta": 0.02}
    return options


def task_metrics(task: Any) -> tuple[str, ...]:
    """
    What is worth reporting about a task.

    Args:
        task ([`~trl_explore.tasks.TeachableTask`]):
            The task.

    Returns:
        `tuple[str, ...]`: Names of metrics.
    """
    if task.name in AGENTS:
        return ("reward",)
    if isinstance(task, PathTask):
        return ("pass_at_1", "coverage_at_32")
    return ("greedy_accuracy", "pass_at_1", "pass_at_8")


def task_num_eval(task: Any) -> int:
    """
    How many held-out problems tell arms apart, for a bearable price.

    Args:
        task ([`~trl_explore.tasks.TeachableTask`]):
            The task.

    Returns:
        `int`: Number of problems.
    """
    if isinstance(task, PathTask):
        return 8  # copies of the one prompt
    return 64 if task.name in AGENTS else 128
