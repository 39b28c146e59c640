"""One run: its trainer, what it costs, its curve, and both in its checkpoints.

Costs are generated and trained tokens, process CPU seconds, wall seconds and optimiser steps of training; evaluation
counts towards none.
"""

import itertools
import json
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from transformers import PrinterCallback, TrainerCallback

from trl_explore.compare.agents import (
    EVALUATION_SEED,
    agent_end_samples,
    agent_evaluation,
    agent_evaluation_options,
)
from trl_explore.compare.settings import Arm, Budget, Comparison, Cost, run_arguments
from trl_explore.errors import UsageError
from trl_explore.evaluation.callbacks import PassAtKCallback
from trl_explore.rows.streams import loss_mask
from trl_explore.runs.arguments import RunArguments, trainer_arguments
from trl_explore.runs.inputs import load_train_and_eval
from trl_explore.runs.methods import find_method
from trl_explore.runs.tasks import EmbeddedTask
from trl_explore.sampling.count import TokenCount
from trl_explore.saving.checkpoints import last_complete_checkpoint
from trl_explore.saving.interrupt import InterruptCallback
from trl_explore.saving.whole_files import whole_file
from trl_explore.trainers.base import ExplorationTrainer, count_sampled, watch

HELD_OUT_SEED = 0
TINY_MODEL_BATCH = 512  # completions at a time in evaluations of a tiny model
RECORD = "comparison.json"
TRAINING = ("entropy", "frac_reward_zero_std")  # what a curve says of the steps between two evaluations

Evaluate = Callable[["Moment"], Mapping[str, Any]]
Moment = Literal["start", "middle", "end"]  # of a run's training


class Interrupted(Exception):
    """Ctrl-C ended a run; its checkpoint is on disk."""


# --------------------------------------------------------------------------------------------------- costs and curves


@dataclass
class Run:
    """Outcome of one arm on one seed."""

    arm: str
    seed: int
    points: list[dict[str, Any]]  # per evaluation: its metrics and the cost so far
    steps: list[dict[str, float]]  # per training step: TRL's logs and the cost so far
    interrupted: bool = False  # Ctrl-C ended the training

    def save(self, path: Path) -> None:
        """Writes the run as JSON, whole or not at all."""
        with whole_file(path) as part:
            part.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> "Run":
        """Reads what [`~Run.save`] wrote."""
        return cls(**json.loads(path.read_text()))


def of_step(logs: Mapping[str, Any] | None) -> bool:
    """Whether a log is of a training step; others are of an evaluation or of the whole training."""
    return logs is not None and "completions/mean_length" in logs and "train_runtime" not in logs


class CostCallback(TrainerCallback):
    """
    Counts the cost of training steps and stops at a budget.

    It reads TRL's logs of every step, so `logging_steps` must be 1. Before training, call `count_sampled` with the
    trainer.
    """

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.cost = Cost()
        self.history: list[dict[str, float]] = []
        self._started = (0.0, 0.0)
        self._tokens: TokenCount | None = None
        self._known_tokens = 0  # of the trainer's count, those that `cost` has

    def count_sampled(self, trainer: Any) -> None:
        """Count the tokens that a GRPO trainer samples in training, of any class and by whatever way it samples."""
        self._tokens = count_sampled(trainer)

    def count_trained(self, trainer: Any) -> None:
        """Counts the tokens of every pass through the loss of a trainer in one process, those of streams too."""
        watch(trainer, "loss", self._trained)

    def _trained(self, model: Any, rows: Any, loss: Any) -> None:
        if model.training:
            self.cost.trained_tokens += float(loss_mask(rows).sum())

    def on_train_begin(self, args, state, control, **kwargs):
        if self._tokens is None:
            raise RuntimeError("A CostCallback counts no tokens before `count_sampled(trainer)`: call it first.")
        self._known_tokens = self._tokens.total  # of a resumed run, `cost` is that of its checkpoint

    def on_step_begin(self, args, state, control, **kwargs):
        self._started = (time.process_time(), time.perf_counter())

    def on_step_end(self, args, state, control, **kwargs):
        self.cost.step = state.global_step
        self.cost.cpu_seconds += time.process_time() - self._started[0]
        self.cost.seconds += time.perf_counter() - self._started[1]

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not of_step(logs):
            return
        assert self._tokens is not None
        self.cost.tokens += self._tokens.total - self._known_tokens
        self._known_tokens = self._tokens.total
        self.history.append({**asdict(self.cost), **{k: v for k, v in logs.items() if v is not None}})
        if self.budget.is_spent(self.cost):
            # The end of training is evaluated once; a save that is due at this step still happens.
            control.should_training_stop = True


class Curve(TrainerCallback):
    """The points of a run. They go with its cost into every checkpoint, so that a resumed run keeps its curve and what
    is left of its budget, `amount` of `unit`, which a bar shows. It is called after `costs`."""

    def __init__(self, costs: CostCallback, unit: str, amount: float, bar: Any = None) -> None:
        self.costs, self.unit, self.amount = costs, unit, amount
        self.bar, self.bar_start = bar, 0 if bar is None else bar.n
        self.points: list[dict[str, Any]] = []

    def note(self, metrics: Mapping[str, Any]) -> None:
        """Puts a measurement beside the cost so far."""
        self.points.append({**asdict(self.costs.cost), **metrics})

    def finished(self, state: Any) -> bool:
        """Whether a checkpoint leaves nothing to train."""
        return False

    def write(self, args: Any, state: Any) -> None:
        """Adds the record to the newest checkpoint."""
        record = {"finished": self.finished(state), "cost": asdict(self.costs.cost), "points": self.points}
        path = Path(args.output_dir) / f"checkpoint-{state.global_step}" / RECORD
        with whole_file(path) as part:
            part.write_text(json.dumps({**record, "steps": self.costs.history}))

    def restore(self, folder: str | Path) -> str | None:
        """Goes back to the newest checkpoint from which something is left to train, and removes newer ones."""
        while (checkpoint := last_complete_checkpoint(folder)[0]) is not None:
            record = Path(checkpoint) / RECORD  # missing where the process was killed between the two
            found = json.loads(record.read_text()) if record.is_file() else None
            if found and not found.get("finished"):
                self.costs.cost = Cost(**found["cost"])
                self.costs.history, self.points = found["steps"], found["points"]
                if self.bar is not None:  # its rate and the time left are of what is sampled from now on
                    self.bar.initial += self._position() - self.bar.n
                    self.bar.n = self.bar.last_print_n = self._position()
                return checkpoint
            shutil.rmtree(checkpoint)
        return None

    def _position(self) -> int:
        return self.bar_start + int(min(vars(self.costs.cost)[self.unit], self.amount))

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.bar is not None and of_step(logs):
            self.bar.set_postfix(step=state.global_step, reward=f"{logs['reward']:.2f}", refresh=False)
            self.bar.update(self._position() - self.bar.n)


class Milestones(Curve):
    """A comparison's curve: evaluates and saves at even shares of the budget. `interrupt` is called before it."""

    def __init__(
        self, comparison: Comparison, costs: CostCallback, interrupt: InterruptCallback, evaluate: Evaluate, bar: Any
    ) -> None:
        super().__init__(costs, comparison.cost, comparison.amount, bar)
        self.comparison, self.interrupt, self.evaluate = comparison, interrupt, evaluate

    def share(self, cost: Mapping[str, float]) -> int:
        """How many of the evaluations after the first are due at a cost."""
        return int(min(1.0, cost[self.unit] / self.amount) * self.comparison.evaluations)

    @property
    def due(self) -> bool:
        """Whether the next evaluation is."""
        return not self.points or self.share(vars(self.costs.cost)) > self.share(self.points[-1])

    def finished(self, state: Any) -> bool:
        return self.comparison.budget.is_spent(self.costs.cost) or state.global_step >= state.max_steps

    def measure(self, state: Any) -> None:
        """Puts the current model on the curve, with what the steps since the point before were like."""
        since = self.points[-1]["step"] if self.points else 0
        steps = [entry for entry in self.costs.history if entry["step"] > since]
        training = {f"train/{name}": fmean(entry[name] for entry in steps) for name in TRAINING if steps}
        moment: Moment = "end" if self.finished(state) else "middle" if self.points else "start"
        self.note({**training, **self.evaluate(moment)})

    def on_train_begin(self, args, state, control, **kwargs):
        if self.due:
            self.measure(state)

    def on_log(self, args, state, control, logs=None, **kwargs):
        super().on_log(args, state, control, logs)
        if of_step(logs):
            control.should_save = control.should_save or self.due or self.finished(state)

    def on_save(self, args, state, control, **kwargs):
        self.write(args, state)
        if self.due and not self.interrupt.interrupted:
            self.measure(state)
            self.write(args, state)

    def on_train_end(self, args, state, control, **kwargs):
        if self.finished(state) and self.points[-1]["step"] < self.costs.cost.step:
            self.measure(state)


# ------------------------------------------------------------------------------------------------ trainers of the runs


def task_trainer(
    arm: Arm, task: Any, start: str | Path, config: Any, *, num_train: int | None = None, rows: Any = None, **more: Any
) -> Any:
    """The trainer of an arm on a task with a tiny model; `rows` are those that an agent is evaluated on."""
    of_run = EmbeddedTask(task)
    given = of_run.trainer_arguments(seed=config.seed, evaluates=False)
    if num_train is not None:
        given["train_dataset"] = task.build_dataset(num_train, seed=config.seed)
    if of_run.is_agent:
        given["eval_dataset"] = rows
    trainer_class = find_method(arm.method).trainer_class
    return trainer_class(model=str(start), args=config, processing_class=of_run.tokenizer(), **given, **more)


def held_out_split(comparison: Comparison, arguments: RunArguments) -> tuple[Any, list[dict[str, Any]]]:
    """Training rows and held-out rows of a user's data set: the split that `dataset_test_split` names, or rows that
    are taken out of the training split."""
    script, _, _, mixture = arguments
    named = "dataset_test_split" in comparison.subject
    train, test = load_train_and_eval(script, mixture, needs_eval=named)
    if test is not None:
        return train, list(itertools.islice(test, comparison.num_eval))
    if script.dataset_streaming or len(train) <= comparison.num_eval:
        size = "streamed" if script.dataset_streaming else f"{len(train)} rows long"
        raise UsageError(
            f"num_eval={comparison.num_eval}: the split {script.dataset_train_split!r} is {size}, so held-out rows "
            "cannot be taken from it; lower num_eval, or name another split as dataset_test_split"
        )
    parts = train.train_test_split(test_size=comparison.num_eval, seed=HELD_OUT_SEED)
    return parts["train"], list(parts["test"])


def build_run(comparison: Comparison, arm: Arm, *, seed: int, folder: Path, start: str | None) -> tuple[Any, Evaluate]:
    """The trainer of one run, and what measures its model; `start` is the folder of a model that was taught a task."""
    arguments = run_arguments(comparison, arm, seed=seed, folder=str(folder))
    config, task = arguments[1], comparison.task
    agent, count = task is not None and task.is_agent, comparison.samples_at_ends
    options: dict[str, Any] = {}  # of the callback that measures
    if agent:
        vars(config).update(agent_evaluation_options(comparison.num_samples))
    if task is None:
        train, rows = held_out_split(comparison, arguments)
        trainer = find_method(arm.method).trainer_class(**{**trainer_arguments(arguments), "train_dataset": train})
    else:
        rows, options["answer_fn"] = task.held_out_rows(comparison.num_eval), task.answer_fn
        if task.has_tiny_model:
            options["batch_size"] = TINY_MODEL_BATCH
            trainer = task_trainer(arm, task.task, str(start), config, rows=rows)
        else:
            given = {**trainer_arguments(arguments, start=start), "eval_dataset": rows if agent else None}
            trainer = find_method(arm.method).trainer_class(**given)
    usual: Callable[[], dict[str, Any]]
    if agent:
        usual = agent_evaluation(trainer, len(rows), comparison.values_of_k("pass"))
    else:
        usual = sampled_metrics(comparison, trainer, rows, **options)
    if count is None:
        return trainer, lambda moment: usual()
    if agent:
        many = agent_end_samples(trainer, len(rows), count)
    else:
        many = end_samples(comparison, trainer, rows, **options)
    # More samples at the end of a run, and at the start of the first arm's: all runs of a seed start alike.
    ends = ("start", "end") if arm == comparison.arms[0] else ("end",)
    return trainer, lambda moment: {**usual(), **(many() if moment in ends else {})}


def sampled_metrics(comparison: Comparison, trainer: Any, rows: Any, **options: Any) -> Callable[[], dict[str, Any]]:
    """Measures what a comparison asks for over several samples per held-out prompt, and which of them succeeded."""
    k, maj_k, coverage_k = (comparison.values_of_k(kind) for kind in ("pass", "maj", "coverage"))
    evaluation = PassAtKCallback(
        trainer,
        rows,
        num_samples=comparison.num_samples,
        k=k or (1,),
        maj_k=maj_k,
        coverage_k=coverage_k,
        greedy="greedy_accuracy" in comparison.metrics,
        success_threshold=comparison.success_threshold,
        success_reward=comparison.success_reward,
        seed=EVALUATION_SEED,
        **options,
    )

    def evaluate() -> dict[str, Any]:
        metrics = evaluation.evaluate()
        return {**metrics, **evaluation.successes}

    return evaluate


def end_samples(comparison: Comparison, trainer: Any, rows: Any, **options: Any) -> Callable[[], dict[str, list[int]]]:
    """Counts how many of a comparison's `samples_at_ends` succeed, by problem."""
    evaluation = PassAtKCallback(
        trainer,
        rows,
        num_samples=comparison.samples_at_ends or 1,
        k=(1,),
        greedy=False,
        success_threshold=comparison.success_threshold,
        success_reward=comparison.success_reward,
        seed=EVALUATION_SEED,
        **options,
    )

    def evaluate() -> dict[str, list[int]]:
        evaluation.evaluate()
        return {"end_correct": evaluation.successes["correct"]}

    return evaluate


# ------------------------------------------------------------------------------------------------------------ training


def train_run(
    comparison: Comparison,
    arm: Arm,
    *,
    seed: int,
    folder: Path,
    start: str | None,
    bar: Any,
    interrupt: InterruptCallback | None = None,
) -> Run:
    """Train one arm of a comparison on one seed, from the beginning (`start` as for [`build_run`]) or from where it
    was interrupted. After Ctrl-C, by default, the checkpoint is saved and Interrupted raised."""
    trainer, evaluate = build_run(comparison, arm, seed=seed, folder=folder, start=start)
    costs, interrupt = CostCallback(comparison.budget), interrupt or InterruptCallback()
    milestones = Milestones(comparison, costs, interrupt, evaluate, bar)
    costs.count_sampled(trainer)
    costs.count_trained(trainer)
    if isinstance(trainer, ExplorationTrainer):
        # The budget ends a run long before `max_steps`, so a share that falls over training falls over the budget.
        trainer.end_by_budget(lambda: comparison.budget.share_spent(costs.cost))
    for callback in (costs, interrupt, milestones):
        trainer.add_callback(callback)
    trainer.remove_callback(PrinterCallback)
    try:
        trainer.train(resume_from_checkpoint=milestones.restore(folder))
    finally:
        interrupt.restore()
    if not milestones.finished(trainer.state):
        raise Interrupted
    return Run(arm.name, seed, milestones.points, costs.history)
