"""What a comparison knows about the embedded tasks: options that arms share, metrics, held-out problems."""

from typing import Any

from trl_explore.errors import UsageError
from trl_explore.names import unknown_name
from trl_explore.tasks import AGENTS, LAKE_AGENT, LATE_HOP, MULTI_HOP, RARE_HOP, TASKS, PathTask, Task

ALL_TASKS: dict[str, Any] = TASKS | AGENTS
# Which rounds of tool calls an agent's task allows.
ROUNDS = {LAKE_AGENT.name: LAKE_AGENT.max_turns} | {t.name: t.max_searches for t in (MULTI_HOP, RARE_HOP, LATE_HOP)}
AGENT_ROWS = 64  # per step: 8 prompts with 8 trajectories
AGENT_SAMPLES = 4  # per held-out task in an evaluation, if no larger k is asked for


def find_task(name: str) -> Any:
    """An embedded task by its name, those for agents included."""
    if name not in ALL_TASKS:
        raise UsageError(f"task: {unknown_name('task', name, ALL_TASKS)}")
    return ALL_TASKS[name]


def common_options(task: Task, *, seed: int) -> dict[str, Any]:
    """Options of the tiny model that all arms share: 128 rows per step, 16 prompts with 8 completions."""
    return dict(
        per_device_train_batch_size=128,
        num_generations=8,
        max_completion_length=task.max_completion_length,
        learning_rate=3e-4,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        beta=0.0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        seed=seed,
    )


def task_options(task: Any) -> dict[str, Any]:
    """Training options that all arms on a task share, without those that the comparison sets itself."""
    options = common_options(task, seed=0)
    for name in ("seed", "logging_steps", "save_strategy", "disable_tqdm"):
        del options[name]
    if task.name in AGENTS:
        options |= {"per_device_train_batch_size": AGENT_ROWS, "max_tool_calling_iterations": ROUNDS[task.name]}
    if isinstance(task, PathTask):  # one prompt; without a KL term, lists of candidates break on some seeds
        options |= {"num_generations": 16, "learning_rate": 1e-4, "beta": 0.02}
    return options


def task_metrics(task: Any) -> tuple[str, ...]:
    """What is worth reporting about a task."""
    if task.name in AGENTS:
        return ("reward",)
    if isinstance(task, PathTask):
        return ("pass_at_1", "coverage_at_32")
    return ("greedy_accuracy", "pass_at_1", "pass_at_8")


def task_num_eval(task: Any) -> int:
    """How many held-out problems tell arms apart, for a bearable price; `paths` has copies of one prompt."""
    return 8 if isinstance(task, PathTask) else 64 if task.name in AGENTS else 128
