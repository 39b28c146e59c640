"""What `trl-explore compare` knows about the embedded tasks: which methods suit one, and with which options."""

from typing import Any

from trl_explore.compare.arms import common_options
from trl_explore.names import unknown_name
from trl_explore.runs.inputs import UsageError
from trl_explore.tasks import MULTI_HOP, RARE_HOP, TASKS, ChainTask, PathTask, SketchedTask
from trl_explore.tasks.lake_agent import LAKE_AGENT
from trl_explore.tasks.vaults import FactTask

AGENTS: dict[str, Any] = {task.name: task for task in (LAKE_AGENT, MULTI_HOP, RARE_HOP)}
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


def suited_options(task: Any, method: str) -> dict[str, Any] | None:
    """
    Options of a method that fit a task and the tiny model that was taught it.

    Args:
        task ([`~trl_explore.tasks.TeachableTask`]):
            The task.
        method (`str`):
            A name of `trl_explore.cli.train.METHODS`.

    Returns:
        `dict` or `None`: Fields of the method's configuration; `None` where the method does not suit the task.
    """
    agent = task.name in AGENTS
    if method == "branpo":
        # As in the paper: half the rollouts of GRPO, and branches.
        return {"num_generations": 4, "per_device_train_batch_size": AGENT_ROWS // 2} if agent else None
    if method == "sesa":
        if task is LAKE_AGENT:
            return {**LAKE_AGENT.sesa_options, "num_actions": 3, "branch_depth": 2}
        return task.sesa_options if isinstance(task, SketchedTask) else None
    if method in ("deep_grpo", "tree_grpo") and agent:
        return None
    if method == "deep_grpo":
        few = {"max_pivots_per_batch": 16, "sampling_batch_size": 64}
        if isinstance(task, ChainTask):
            return {**few, "segment_delimiters": [";"]}
        length = task.step_length if isinstance(task, FactTask) else max(1, task.max_completion_length // 6)
        return {**few, "segmentation": "fixed", "segment_length": length}
    if method == "tree_grpo" and isinstance(task, ChainTask | FactTask):
        return {"node_length": task.step_length}
    return {}


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
