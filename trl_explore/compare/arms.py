"""Train one method from a warm start on a budget, and note what it had learned at which cost.

The quick-start and the benchmarks are made of this. Costs are generated and trained tokens, process CPU seconds, wall
seconds and optimiser steps of training; evaluation counts towards none of them.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from trl_explore.methods import METHODS
from trl_explore.rows.streams import loss_mask
from trl_explore.saving.whole_files import whole_file
from trl_explore.tasks import Task


@dataclass(frozen=True)
class Arm:
    """
    One side of a comparison.

    Args:
        name (`str`):
            Label in tables and plots.
        method (`str`):
            A name of `trl_explore.methods.METHODS`, such as `"grpo"` or `"tree_grpo"`.
        options (`dict`):
            Configuration fields that differ from the comparison's common ones.
    """

    name: str
    method: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Budget:
    """
    When to stop; whichever is reached first.

    Args:
        tokens (`float`, *optional*):
            Generated tokens, of extra streams too.
        cpu_seconds (`float`, *optional*):
            CPU seconds of training steps.
        steps (`int`, *optional*):
            Optimiser steps.
        seconds (`float`, *optional*):
            Wall seconds of training steps.
    """

    tokens: float = float("inf")
    cpu_seconds: float = float("inf")
    steps: int = 100_000
    seconds: float = float("inf")

    def is_spent(self, cost: "Cost") -> bool:
        """Whether `cost` has reached any of them."""
        spent = any(vars(cost)[name] >= vars(self)[name] for name in ("tokens", "cpu_seconds", "seconds"))
        return spent or cost.step >= self.steps


@dataclass
class Cost:
    """What training has used so far: `step`, generated `tokens`, those in the loss, `cpu_seconds`, wall `seconds`."""

    step: int = 0
    tokens: float = 0.0
    trained_tokens: float = 0.0
    cpu_seconds: float = 0.0
    seconds: float = 0.0


class CostCallback(TrainerCallback):
    """
    Counts the cost of training steps and stops at a budget.

    Reads TRL's logs, so `logging_steps` must be 1 and a generation batch one optimiser step.

    Args:
        budget ([`Budget`]):
            When to stop.
        progress (`tqdm`, *optional*):
            A bar over the tokens of the budget, moved at every step.
    """

    def __init__(self, budget: Budget, progress: Any = None) -> None:
        self.budget = budget
        self.cost = Cost()
        self.history: list[dict[str, float]] = []
        self.progress = progress
        self._started = (0.0, 0.0)

    def count_trained(self, trainer: Any) -> None:
        """
        Count the tokens of every pass through a trainer's loss, those of extra streams too.

        Args:
            trainer ([`~trl.GRPOTrainer`]):
                The trainer, in one process.
        """
        compute_loss = trainer._compute_loss

        def counted(model: Any, rows: Any) -> Any:
            if model.training:
                self.cost.trained_tokens += float(loss_mask(rows).sum())
            return compute_loss(model, rows)

        trainer._compute_loss = counted

    def on_step_begin(self, args, state, control, **kwargs):
        self._started = (time.process_time(), time.perf_counter())

    def on_step_end(self, args, state, control, **kwargs):
        self.cost.step = state.global_step
        self.cost.cpu_seconds += time.process_time() - self._started[0]
        self.cost.seconds += time.perf_counter() - self._started[1]

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs is None or "completions/mean_length" not in logs or "train_runtime" in logs:
            return
        # Methods that sample other tokens than they train on say how many.
        main = logs["completions/mean_length"] * args.generation_batch_size
        main = logs.get("tree/sampled_tokens", logs.get("sketch/sampled_tokens", main))
        self.cost.tokens += main + logs.get("pivots/sampled_tokens", 0.0) + logs.get("branch/sampled_tokens", 0.0)
        self.history.append({**asdict(self.cost), **{k: v for k, v in logs.items() if v is not None}})
        if self.progress is not None:
            self.progress.update(min(self.cost.tokens, self.budget.tokens) - self.progress.n)
            self.progress.set_postfix(step=self.cost.step, reward=f"{logs['reward']:.2f}", refresh=False)
        if self.budget.is_spent(self.cost):
            # The end of training is evaluated once; a save that is due at this step still happens.
            control.should_training_stop = True


@dataclass
class Run:
    """
    Outcome of one arm on one seed.

    Args:
        arm (`str`):
            Name of the arm.
        seed (`int`):
            Seed of training.
        points (`list[dict]`):
            One entry per evaluation: its metrics and the cost so far.
        steps (`list[dict]`):
            One entry per training step: TRL's logs and the cost so far.
        interrupted (`bool`):
            Whether Ctrl-C ended the training.
    """

    arm: str
    seed: int
    points: list[dict[str, float]]
    steps: list[dict[str, float]]
    interrupted: bool = False

    def save(self, path: Path) -> None:
        """Writes the run as JSON, whole or not at all."""
        with whole_file(path) as part:
            part.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> "Run":
        """Reads what [`~Run.save`] wrote."""
        return cls(**json.loads(path.read_text()))


def common_options(task: Task, *, seed: int) -> dict[str, Any]:
    """
    Training options for the tiny model that all arms share (128 rows per step: 16 prompts with 8 completions).

    Args:
        task ([`~trl_explore.tasks.Task`]):
            The embedded task.
        seed (`int`):
            Seed of data order and sampling.

    Returns:
        `dict`: Fields of [`~trl.GRPOConfig`].
    """
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


RECORD = "comparison.json"
TRAINING = ("entropy", "frac_reward_zero_std")  # what a curve says of the steps between two evaluations


class PointCallback(TrainerCallback):
    """
    Notes the cost beside every evaluation of a [`~trl_explore.evaluation.callbacks.PassAtKCallback`].

    The record goes into every checkpoint, so that a resumed run keeps its curve and what is left of its budget.
    """

    def __init__(self, evaluation: Any, costs: CostCallback) -> None:
        self.evaluation, self.costs = evaluation, costs
        self.points: list[dict[str, float]] = []
        self.noted = 0

    def note(self) -> None:
        for entry in self.evaluation.history[self.noted :]:
            self.points.append({**asdict(self.costs.cost), **entry})
        self.noted = len(self.evaluation.history)

    def on_save(self, args, state, control, **kwargs):
        self.note()
        record = {"cost": asdict(self.costs.cost), "points": self.points, "steps": self.costs.history}
        (Path(args.output_dir) / f"checkpoint-{state.global_step}" / RECORD).write_text(json.dumps(record))

    def restore(self, checkpoint: str) -> None:
        record = json.loads((Path(checkpoint) / RECORD).read_text())
        self.costs.cost = Cost(**record["cost"])
        self.costs.history, self.points = record["steps"], record["points"]
        bar = self.costs.progress
        if bar is not None:  # tokens per second and the time left are of what is sampled from now on
            bar.initial = bar.n = bar.last_print_n = min(self.costs.cost.tokens, self.costs.budget.tokens)

    def on_step_begin(self, args, state, control, **kwargs):
        self.note()

    def on_train_end(self, args, state, control, **kwargs):
        self.note()


def train_arm(
    arm: Arm,
    task: Task,
    start: str | Path,
    *,
    output_dir: str | Path,
    seed: int,
    budget: Budget,
    evaluate_every: int,
    num_eval: int = 128,
    num_samples: int = 8,
    k: tuple[int, ...] = (1, 8),
    num_train: int = 4000,
    evaluation_options: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    progress: Any = None,
    callbacks: list[TrainerCallback | Callable[[Any], TrainerCallback]] | None = None,
    resume: bool = False,
) -> Run:
    """
    Train one arm and evaluate it on held-out problems along the way.

    Args:
        arm ([`Arm`]):
            Method and options.
        task ([`~trl_explore.tasks.Task`]):
            The embedded task.
        start (`str` or `Path`):
            Folder of the warm-started model.
        output_dir (`str` or `Path`):
            Where checkpoints go.
        seed (`int`):
            Seed of data, sampling and training.
        budget ([`Budget`]):
            When to stop.
        evaluate_every (`int`):
            Optimiser steps between evaluations; beginning and end are always evaluated.
        num_eval (`int`, *optional*, defaults to `128`):
            Held-out problems.
        num_samples (`int`, *optional*, defaults to `8`):
            Samples per held-out problem.
        k (`tuple[int, ...]`, *optional*, defaults to `(1, 8)`):
            Values of k for pass@k.
        num_train (`int`, *optional*, defaults to `4000`):
            Training problems.
        evaluation_options (`dict`, *optional*):
            Further arguments of [`~trl_explore.evaluation.callbacks.PassAtKCallback`], such as `coverage_k`.
        options (`dict`, *optional*):
            Configuration fields for every arm, over [`common_options`].
        progress (`tqdm`, *optional*):
            A bar over the token budget.
        callbacks (`list[TrainerCallback or Callable]`, *optional*):
            Further callbacks, or functions that make one for the trainer that they are given.
        resume (`bool`, *optional*, defaults to `False`):
            Whether to continue from the newest checkpoint in `output_dir`, if there is one.

    Returns:
        [`Run`]: What it had learned at which cost.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback

    from trl_explore.evaluation.callbacks import PassAtKCallback
    from trl_explore.runs.threads import few_threads
    from trl_explore.saving.checkpoints import last_complete_checkpoint

    method = METHODS[arm.method]
    reward: Any = task.reward
    settings = {**common_options(task, seed=seed), "max_steps": budget.steps, **(options or {}), **arm.options}
    costs = CostCallback(budget, progress)
    trainer = method.trainer_class(
        model=AutoModelForCausalLM.from_pretrained(start),
        reward_funcs=reward,
        args=method.config_class(output_dir=str(output_dir), **settings),
        train_dataset=task.build_dataset(num_train, seed=seed),
        processing_class=AutoTokenizer.from_pretrained(start),
        callbacks=[costs, *(c for c in callbacks or [] if isinstance(c, TrainerCallback))],
    )
    for callback in callbacks or []:
        if not isinstance(callback, TrainerCallback):
            trainer.add_callback(callback(trainer))
    evaluation = PassAtKCallback(
        trainer,
        task.evaluation_set(num_eval),
        num_samples=num_samples,
        k=k,
        every=evaluate_every,
        batch_size=512,
        seed=1234,
        **(evaluation_options or {}),
    )
    points = PointCallback(evaluation, costs)
    trainer.add_callback(evaluation)
    trainer.add_callback(points)
    trainer.remove_callback(PrinterCallback)  # a line of 50 metrics per step would bury the progress bar
    checkpoint = last_complete_checkpoint(output_dir)[0] if resume else None
    if checkpoint is not None:
        points.restore(checkpoint)
    model: Any = trainer.model
    with few_threads(model, trainer.accelerator.device):
        trainer.train(resume_from_checkpoint=checkpoint)
    return Run(arm=arm.name, seed=seed, points=points.points, steps=costs.history)
