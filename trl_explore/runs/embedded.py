"""Fields, metrics and held-out problems of a run on a task with a tiny model. Attributes of the task override them."""

from typing import Any

from trl_explore.tasks import AGENTS, TASKS, Task, is_agent

ALL_TASKS: dict[str, Any] = TASKS | AGENTS
AGENT_ROWS = 64  # per step: 8 prompts with 8 trajectories
AGENT_SAMPLES = 4  # per held-out task in an evaluation, if no larger k is asked for


def common_options(task: Task, *, seed: int) -> dict[str, Any]:
    """Return the training options of a tiny model: 128 rows per step, which are 16 prompts with 8 completions."""
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
    """Return the training options for all arms on a task, without the options that a comparison sets itself."""
    options = common_options(task, seed=0)
    for name in ("seed", "logging_steps", "save_strategy", "disable_tqdm"):
        del options[name]
    if is_agent(task):
        options["per_device_train_batch_size"] = AGENT_ROWS
    return {**options, **getattr(task, "options", {})}


def task_metrics(task: Any) -> tuple[str, ...]:
    """Return the metrics that a comparison on a task shows."""
    default = ("reward",) if is_agent(task) else ("greedy_accuracy", "pass_at_1", "pass_at_8")
    return getattr(task, "metrics", default)


def task_num_eval(task: Any) -> int:
    """Return the number of held-out problems of an evaluation, a compromise between precision and time."""
    return getattr(task, "num_eval", 64 if is_agent(task) else 128)
