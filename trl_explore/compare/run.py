"""One run of a comparison: its trainer, its cost and its learning curve. Checkpoints contain the cost and the curve.

Costs are the generated tokens, trained tokens, CPU seconds of the process, wall seconds and optimizer steps of
training. Evaluations do not count.
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

from transformers import PrinterCallback, TrainerCallback, TrainerState, TrainingArguments
from trl import GRPOConfig

from trl_explore.compare.agents import (
    EVALUATION_SEED,
    agent_end_samples,
    agent_evaluation,
    agent_evaluation_options,
)
from trl_explore.compare.settings import Arm, Budget, Comparison, Cost, run_arguments
from trl_explore.errors import UsageError
from trl_explore.evaluation.callbacks import PassAtKCallback
from trl_explore.evaluation.metrics import NoRewardError
from trl_explore.rows.streams import loss_mask
from trl_explore.runs.arguments import RunArguments, trainer_arguments
from trl_explore.runs.inputs import load_train_and_eval
from trl_explore.runs.methods import find_method
from trl_explore.runs.tasks import EmbeddedTask
from trl_explore.sampling.count import TokenCount
from trl_explore.saving.checkpoints import last_complete_checkpoint
from trl_explore.saving.interrupt import InterruptCallback
from trl_explore.saving.whole_files import whole_file
from trl_explore.tasks import TeachableTask
from trl_explore.trainers.base import ExplorationTrainer, count_sampled, watch

HELD_OUT_SEED = 0
TINY_MODEL_BATCH = 512  # completions at a time in evaluations of a tiny model
RECORD = "comparison.json"
TRAINING = ("entropy", "frac_reward_zero_std")  # training metrics, of which a point has means since the last point

Evaluate = Callable[["Moment"], Mapping[str, Any]]
Moment = Literal["start", "middle", "end"]  # moment of a run at which the model is evaluated


class Interrupted(Exception):
    """Raised when Ctrl-C stopped a run before its end. The run's checkpoint has been saved."""


# --------------------------------------------------------------------------------------------------- costs and curves


@dataclass
class Run:
    """Outcome of one arm on one seed."""

    arm: str
    seed: int
    points: list[dict[str, Any]]  # per evaluation: its metrics and the cost so far
    steps: list[dict[str, float]]  # per generation batch: TRL's logs and the cost so far
    interrupted: bool = False  # Ctrl-C ended the training

    def save(self, path: Path) -> None:
        """Write the run as JSON; if writing fails, `path` keeps its former content."""
        with whole_file(path) as part:
            part.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> "Run":
        """Read a file that [`~Run.save`] wrote."""
        return cls(**json.loads(path.read_text()))


def of_step(logs: Mapping[str, Any] | None) -> bool:
    """Return whether a log belongs to a training step that generated completions. Logs of other training steps, of
    evaluations and of the end of training do not."""
    return logs is not None and "completions/mean_length" in logs and "train_runtime" not in logs


class CostCallback(TrainerCallback):
    """
    Count the cost of training steps, and stop training when the budget is spent.

    The callback reads TRL's logs of every step, so `logging_steps` must be 1. It checks the budget only after steps
    that generate completions. Call `count_sampled` with the trainer before training.

    Args:
        budget ([`~trl_explore.compare.settings.Budget`]):
            When to stop training.
    """

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.cost = Cost()
        self.history: list[dict[str, float]] = []
        self._started = (0.0, 0.0)  # CPU time and wall time at the beginning of the step
        self._tokens: TokenCount | None = None
        self._known_tokens = 0  # value of the trainer's count when its tokens were last added to `cost`

    def count_sampled(self, trainer: Any) -> None:
        """Count the tokens that a trainer samples in training; it may be any GRPOTrainer, with or without vLLM."""
        self._tokens = count_sampled(trainer)

    def count_trained(self, trainer: Any) -> None:
        """Count the tokens in every loss of a trainer in one process, including extra streams of an explorer."""
        watch(trainer, "loss", self._trained)

    def _trained(self, model: Any, rows: Any, loss: Any) -> None:
        if model.training:
            self.cost.trained_tokens += float(loss_mask(rows).sum())

    def on_train_begin(self, args, state, control, **kwargs):
        if self._tokens is None:
            raise RuntimeError("A CostCallback counts no tokens before `count_sampled(trainer)`: call it first.")
        # The tokens of a resumed run before its checkpoint are already in the cost, so do not add them again.
        self._known_tokens = self._tokens.total

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
            # This stops training after the step, so a save that is due at this step still happens.
            control.should_training_stop = True


class Curve(TrainerCallback):
    """
    Collect the points of a run's learning curve, and store them and the run's cost in every checkpoint.

    A resumed run continues its curve and spends only the rest of its budget. Add this callback after `costs`.

    Args:
        costs ([`~trl_explore.compare.run.CostCallback`]):
            Counts the cost of the run.
        unit (`str`):
            Cost that the budget limits, a field of [`~trl_explore.compare.settings.Cost`].
        amount (`float`):
            Budget of the run in that cost.
        bar (`tqdm`, *optional*):
            Progress bar that shows how much of the budget is spent.
    """

    def __init__(self, costs: CostCallback, unit: str, amount: float, bar: Any = None) -> None:
        self.costs, self.unit, self.amount = costs, unit, amount
        self.bar = bar
        self.bar_start = 0 if bar is None else bar.n
        self.points: list[dict[str, Any]] = []

    def note(self, metrics: Mapping[str, Any]) -> None:
        """Add a point: the metrics and the cost so far."""
        self.points.append({**asdict(self.costs.cost), **metrics})

    def finished(self, state: TrainerState) -> bool:
        """Return whether the run is complete. `restore` removes the checkpoint of a complete run, because resuming it
        would train beyond the budget."""
        return False

    def write(self, args: TrainingArguments, state: TrainerState) -> None:
        """Write cost and curve into the newest checkpoint."""
        record = {"finished": self.finished(state), "cost": asdict(self.costs.cost), "points": self.points}
        assert args.output_dir is not None  # transformers sets it
        path = Path(args.output_dir) / f"checkpoint-{state.global_step}" / RECORD
        with whole_file(path) as part:
            part.write_text(json.dumps({**record, "steps": self.costs.history}))

    def restore(self, folder: str | Path) -> str | None:
        """
        Restore cost and curve from the newest checkpoint that can be resumed.

        This removes newer checkpoints that are complete but have no record, or whose record says that the run was
        finished.

        Returns:
            `str` or `None`: Folder of the checkpoint. None if there is no such checkpoint.
        """
        while (checkpoint := last_complete_checkpoint(folder)[0]) is not None:
            found = None
            record = Path(checkpoint) / RECORD
            # The record is missing if the process was killed between saving the checkpoint and writing the record.
            if record.is_file():
                found = json.loads(record.read_text())
            if found and not found.get("finished"):
                self.costs.cost = Cost(**found["cost"])
                self.costs.history, self.points = found["steps"], found["points"]
                if self.bar is not None:
                    # tqdm leaves out `initial` when it computes its rate, so the rate counts work of this process.
                    self.bar.initial += self._position() - self.bar.n
                    self.bar.n = self.bar.last_print_n = self._position()
                return checkpoint
            shutil.rmtree(checkpoint)
        return None

    def _position(self) -> int:
        """Return the position of the progress bar that corresponds to the cost so far."""
        return self.bar_start + int(min(getattr(self.costs.cost, self.unit), self.amount))

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.bar is not None and of_step(logs):
            reward = logs["reward"]  # None if no completion of the batch has a reward
            text = "-" if reward is None else f"{reward:.2f}"
            self.bar.set_postfix(step=state.global_step, reward=text, refresh=False)
            self.bar.update(self._position() - self.bar.n)


class Milestones(Curve):
    """
    Learning curve of a comparison's run. The callback evaluates and saves at even shares of the budget.

    Args:
        comparison ([`~trl_explore.compare.settings.Comparison`]):
            The comparison.
        costs ([`~trl_explore.compare.run.CostCallback`]):
            Counts the cost of the run. Add it to the trainer first.
        interrupt ([`~trl_explore.saving.interrupt.InterruptCallback`]):
            Stops the run on Ctrl-C. Add it to the trainer before this callback.
        evaluate (`Callable`):
            Function of the moment (`"start"`, `"middle"` or `"end"`) that returns the model's metrics.
        bar (`tqdm`):
            Progress bar, or None.
    """

    def __init__(
        self, comparison: Comparison, costs: CostCallback, interrupt: InterruptCallback, evaluate: Evaluate, bar: Any
    ) -> None:
        super().__init__(costs, comparison.cost, comparison.amount, bar)
        self.comparison, self.interrupt, self.evaluate = comparison, interrupt, evaluate

    def _num_due(self, cost: Mapping[str, float]) -> int:
        """Return how many evaluations are due up to a cost. The evaluation before training does not count."""
        return int(min(1.0, cost[self.unit] / self.amount) * self.comparison.evaluations)

    @property
    def due(self) -> bool:
        """True if the next evaluation is due."""
        return not self.points or self._num_due(asdict(self.costs.cost)) > self._num_due(self.points[-1])

    def finished(self, state: TrainerState) -> bool:
        return self.comparison.budget.is_spent(self.costs.cost) or state.global_step >= state.max_steps

    def measure(self, state: TrainerState) -> None:
        """Evaluate the model and add a point, which also has the means of training metrics since the last point."""
        moment: Moment = "start"
        since = 0
        if self.points:
            moment, since = "middle", self.points[-1]["step"]
        if self.finished(state):
            moment = "end"
        steps = [entry for entry in self.costs.history if entry["step"] > since]
        training = {}
        if steps:
            for name in TRAINING:
                training[f"train/{name}"] = fmean(entry[name] for entry in steps)
        self.note({**training, **self.evaluate(moment)})

    def on_train_begin(self, args, state, control, **kwargs):
        if self.due:
            self.measure(state)

    def on_log(self, args, state, control, logs=None, **kwargs):
        super().on_log(args, state, control, logs)
        if of_step(logs):
            control.should_save = control.should_save or self.due or self.finished(state)

    def on_save(self, args, state, control, **kwargs):
        self.write(args, state)  # now already, so that a run that is killed during the evaluation can be resumed
        if self.due and not self.interrupt.interrupted:
            self.measure(state)
            self.write(args, state)

    def on_train_end(self, args, state, control, **kwargs):
        # A run that ends at `max_steps`, or is interrupted at its last step, has not been evaluated at its end yet.
        if self.finished(state) and self.points[-1]["step"] < self.costs.cost.step:
            self.measure(state)


# ------------------------------------------------------------------------------------------------ trainers of the runs


def task_trainer(
    arm: Arm,
    task: TeachableTask,
    start: str | Path,
    config: GRPOConfig,
    *,
    num_train: int | None = None,
    rows: Any = None,
    **more: Any,
) -> Any:
    """
    Build the trainer of an arm on a task with a tiny model.

    Args:
        arm ([`~trl_explore.compare.settings.Arm`]):
            The arm, whose method determines the trainer's class.
        task ([`~trl_explore.tasks.TeachableTask`]):
            The task.
        start (`str` or `Path`):
            Folder of the model.
        config ([`~trl.GRPOConfig`]):
            Configuration of the trainer.
        num_train (`int`, *optional*):
            Number of training problems. By default the task decides.
        rows (*optional*):
            Evaluation data set of an agent. Other tasks are evaluated by a callback and ignore it.
        **more:
            Further arguments of the trainer.
    """
    run_task = EmbeddedTask(task)
    given = run_task.trainer_arguments(seed=config.seed, evaluates=False)
    if num_train is not None:
        given["train_dataset"] = task.build_dataset(num_train, seed=config.seed)
    if run_task.is_agent:
        given["eval_dataset"] = rows
    trainer_class = find_method(arm.method).trainer_class
    return trainer_class(model=str(start), args=config, processing_class=run_task.tokenizer(), **given, **more)


def held_out_split(comparison: Comparison, arguments: RunArguments) -> tuple[Any, list[dict[str, Any]]]:
    """
    Return training rows and held-out rows of a user's data set.

    The held-out rows are the first `num_eval` rows of the split `dataset_test_split`, or all its rows if there are
    fewer. If the comparison does not name this split, random rows are removed from the training split.

    Raises:
        UsageError: If the training split is streamed or has too few rows.
    """
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
    """
    Build the trainer of one run, and the function that evaluates its model.

    Args:
        comparison ([`~trl_explore.compare.settings.Comparison`]):
            The comparison.
        arm ([`~trl_explore.compare.settings.Arm`]):
            The arm.
        seed (`int`):
            Seed of the run.
        folder (`Path`):
            Folder of the run's checkpoints.
        start (`str`, *optional*):
            Folder of the warm start. None if the run begins without a warm start.

    Returns:
        `tuple[GRPOTrainer, Callable]`: The trainer, and a function of the moment (`"start"`, `"middle"` or `"end"`)
        that returns the model's metrics.
    """
    arguments = run_arguments(comparison, arm, seed=seed, folder=str(folder))
    config, task = arguments[1], comparison.task
    is_agent = task is not None and task.is_agent
    options: dict[str, Any] = {}  # arguments of `PassAtKCallback`
    if is_agent:
        for name, value in agent_evaluation_options(comparison.num_samples).items():
            setattr(config, name, value)
    if task is None:
        train, rows = held_out_split(comparison, arguments)
        trainer = find_method(arm.method).trainer_class(**{**trainer_arguments(arguments), "train_dataset": train})
    else:
        rows, options["answer_fn"] = task.held_out_rows(comparison.num_eval), task.answer_fn
        if task.has_tiny_model:
            options["batch_size"] = TINY_MODEL_BATCH
            trainer = task_trainer(arm, task.task, str(start), config, rows=rows)
        else:
            given = {**trainer_arguments(arguments, start=start), "eval_dataset": rows if is_agent else None}
            trainer = find_method(arm.method).trainer_class(**given)
    usual: Callable[[], dict[str, Any]]
    success: dict[str, Any] = {
        "success_threshold": comparison.success_threshold,
        "success_reward": comparison.success_reward,
    }
    if is_agent:
        usual = agent_evaluation(trainer, len(rows), comparison.values_of_k("pass"), **success)
    else:
        usual = sampled_metrics(comparison, trainer, rows, **options)
    take_many: Callable[[], dict[str, Any]] | None = None
    if comparison.samples_at_ends is not None and is_agent:
        take_many = agent_end_samples(trainer, len(rows), comparison.samples_at_ends, **success)
    elif comparison.samples_at_ends is not None:
        take_many = end_samples(comparison, trainer, rows, **options)
    # All runs of a seed start from the same model, so only the first arm takes many samples at the start.
    moments = ("start", "end") if arm == comparison.arms[0] else ("end",)

    def evaluate(moment: Moment) -> dict[str, Any]:
        try:
            metrics = usual()
            if take_many is not None and moment in moments:
                metrics |= take_many()
        except NoRewardError as error:
            problem = _describe_missing_rewards(comparison, num_rows=len(rows))
            raise UsageError(problem) from error
        return metrics

    return trainer, evaluate


def _describe_missing_rewards(comparison: Comparison, *, num_rows: int) -> str:
    """Return the error message for an evaluation in which no sample of the held-out rows got a reward."""
    field, value = "reward_funcs", comparison.subject.get("reward_funcs")
    remedy = "choose a reward that scores these rows, or other rows with dataset_test_split"
    if comparison.task is not None:
        field, value = "task", comparison.subject["task"]
        remedy = "choose another task"
    if comparison.success_reward is not None:
        field, value = "success_reward", comparison.success_reward
    return (
        f"{field}={value!r} returned no reward for any sample of the {num_rows} held-out rows, so nothing can be "
        "measured. Correct the columns of these rows that the reward function reads, such as the gold answers; or "
        f"{remedy}"
    )


def sampled_metrics(comparison: Comparison, trainer: Any, rows: Any, **options: Any) -> Callable[[], dict[str, Any]]:
    """
    Return a function that measures the comparison's metrics on held-out prompts, and counts successes per prompt.

    Args:
        comparison ([`~trl_explore.compare.settings.Comparison`]):
            The comparison.
        trainer ([`~trl.GRPOTrainer`]):
            Trainer whose model is measured.
        rows (`Sequence[dict[str, Any]]`):
            Held-out prompts, with the columns that the rewards need.
        **options:
            Further arguments of [`~trl_explore.PassAtKCallback`].
    """
    k, maj_k, coverage_k = (comparison.values_of_k(kind) for kind in ("pass", "maj", "coverage"))
    evaluation = PassAtKCallback(
        trainer,
        rows,
        num_samples=comparison.num_samples,
        k=k or (1,),  # the callback needs at least one k
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
    """Return a function that counts the successes per problem out of `samples_at_ends` samples, which must not be
    None."""
    evaluation = PassAtKCallback(
        trainer,
        rows,
        num_samples=comparison.samples_at_ends or 1,  # `or 1` only for the type checker
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
    """
    Train one arm of a comparison on one seed, or resume the run from its newest checkpoint.

    Args:
        comparison ([`~trl_explore.compare.settings.Comparison`]):
            The comparison.
        arm ([`~trl_explore.compare.settings.Arm`]):
            The arm.
        seed (`int`):
            Seed of the run.
        folder (`Path`):
            Folder of the run's checkpoints.
        start (`str`, *optional*):
            Folder of the warm start. None if the run begins without a warm start.
        bar (`tqdm`):
            Progress bar that shows how much of the budget is spent, or None.
        interrupt ([`~trl_explore.saving.interrupt.InterruptCallback`], *optional*):
            Decides when to save and stop early. By default, Ctrl-C does.

    Raises:
        Interrupted: If `interrupt` stopped the run. The checkpoint has been saved.
    """
    trainer, evaluate = build_run(comparison, arm, seed=seed, folder=folder, start=start)
    costs, interrupt = CostCallback(comparison.budget), interrupt or InterruptCallback()
    milestones = Milestones(comparison, costs, interrupt, evaluate, bar)
    costs.count_sampled(trainer)
    costs.count_trained(trainer)
    if isinstance(trainer, ExplorationTrainer):
        # The budget ends a run long before `max_steps`. So fields that change over training (`explore_share_end`) must
        # follow the budget, not the steps.
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
