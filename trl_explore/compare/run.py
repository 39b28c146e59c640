"""One run of a comparison: its trainer, its evaluations at even shares of the budget, its checkpoints."""

import itertools
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from transformers import PrinterCallback, TrainerCallback

from trl_explore.cli.train import trainer_arguments
from trl_explore.compare.arms import RECORD, TRAINING, Arm, Cost, CostCallback, Run
from trl_explore.compare.settings import Comparison, run_arguments
from trl_explore.evaluation.callbacks import PassAtKCallback, undisturbed
from trl_explore.methods import METHODS
from trl_explore.runs.inputs import UsageError, load_train_and_eval
from trl_explore.saving.checkpoints import last_complete_checkpoint
from trl_explore.saving.interrupt import InterruptCallback
from trl_explore.saving.whole_files import whole_file
from trl_explore.tasks import AGENTS, LAKE_AGENT
from trl_explore.tasks.tiny_model import build_tokenizer

NUM_TRAIN, NUM_TRAIN_AGENT = 4000, 2000  # problems of an embedded task; there are not many more boards
EVALUATION_SEED = 1234
HELD_OUT_SEED = 0

Evaluate = Callable[[], Mapping[str, Any]]


class Interrupted(Exception):
    """Ctrl-C ended a run; its checkpoint is on disk."""


class Milestones(TrainerCallback):
    """
    Evaluates and saves at even shares of the budget. Cost and curve so far go into every checkpoint.

    Args:
        comparison ([`~trl_explore.compare.settings.Comparison`]):
            Budget and number of evaluations.
        costs ([`~trl_explore.compare.arms.CostCallback`]):
            What counts the cost; called before this.
        interrupt ([`~trl_explore.saving.interrupt.InterruptCallback`]):
            Whether Ctrl-C was pressed; called before this.
        evaluate (`Callable`):
            Measures the current model.
        bar (`tqdm`):
            Progress over the budgets of all runs.
    """

    def __init__(
        self, comparison: Comparison, costs: CostCallback, interrupt: InterruptCallback, evaluate: Evaluate, bar: Any
    ) -> None:
        self.comparison, self.costs, self.interrupt, self.evaluate = comparison, costs, interrupt, evaluate
        self.bar, self.bar_start = bar, bar.n
        self.points: list[dict[str, Any]] = []

    def share(self, cost: Mapping[str, float]) -> int:
        """How many of the evaluations after the first are due at a cost."""
        spent = min(1.0, cost[self.comparison.cost] / self.comparison.amount)
        return int(spent * self.comparison.evaluations)

    @property
    def due(self) -> bool:
        """Whether the next evaluation is."""
        return not self.points or self.share(vars(self.costs.cost)) > self.share(self.points[-1])

    def finished(self, state: Any) -> bool:
        """Whether the run is at its end, rather than interrupted."""
        return self.comparison.budget.is_spent(self.costs.cost) or state.global_step >= state.max_steps

    def note(self) -> None:
        """Puts the current model on the curve, with what the steps since the point before were like."""
        since = self.points[-1]["step"] if self.points else 0
        steps = [entry for entry in self.costs.history if entry["step"] > since]
        training = {f"train/{name}": fmean(entry[name] for entry in steps) for name in TRAINING if steps}
        self.points.append({**asdict(self.costs.cost), **training, **self.evaluate()})

    def restore(self, folder: Path) -> str | None:
        """
        Goes back to the newest checkpoint from which there is something left to train, and removes newer ones.

        Args:
            folder (`Path`):
                Folder of the run.

        Returns:
            `str` or `None`: The checkpoint, if there is one.
        """
        while (checkpoint := last_complete_checkpoint(folder)[0]) is not None:
            record = Path(checkpoint) / RECORD  # missing where the process was killed between the two
            found = json.loads(record.read_text()) if record.is_file() else None
            if found and not found["finished"]:
                self.costs.cost = Cost(**found["cost"])
                self.costs.history, self.points = found["steps"], found["points"]
                self.bar.initial += self._position() - self.bar.n  # no progress that an estimate may count
                self.bar.n = self._position()
                return checkpoint
            shutil.rmtree(checkpoint)
        return None

    def on_train_begin(self, args, state, control, **kwargs):
        if self.due:
            self.note()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs is None or "completions/mean_length" not in logs or "train_runtime" in logs:
            return
        self.bar.set_postfix(step=state.global_step, reward=f"{logs['reward']:.2f}", refresh=False)
        self.bar.update(self._position() - self.bar.n)
        control.should_save = control.should_save or self.due or self.finished(state)

    def on_save(self, args, state, control, **kwargs):
        path = Path(args.output_dir) / f"checkpoint-{state.global_step}" / RECORD
        self._write(path, state)
        if self.due and not self.interrupt.interrupted:
            self.note()
            self._write(path, state)

    def on_train_end(self, args, state, control, **kwargs):
        if self.finished(state) and self.points[-1]["step"] < self.costs.cost.step:
            self.note()

    def _position(self) -> int:
        spent = min(vars(self.costs.cost)[self.comparison.cost], self.comparison.amount)
        return self.bar_start + int(spent)

    def _write(self, path: Path, state: Any) -> None:
        record = {"finished": self.finished(state), "cost": asdict(self.costs.cost), "points": self.points}
        with whole_file(path) as part:
            part.write_text(json.dumps({**record, "steps": self.costs.history}))


def held_out_split(comparison: Comparison, arguments: Any) -> tuple[Any, list[dict[str, Any]]]:
    """
    Training rows and held-out rows of a user's data set.

    Args:
        comparison ([`~trl_explore.compare.settings.Comparison`]):
            How many rows to hold out.
        arguments (`tuple`):
            What [`~trl_explore.compare.settings.run_arguments`] returned.

    Returns:
        `tuple`: The training data set, and rows of the split that `dataset_test_split` names; where it names none,
        rows that are taken out of the training split.
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
    Construct one run's trainer and what evaluates it.

    Args:
        comparison ([`~trl_explore.compare.settings.Comparison`]):
            What to run.
        arm ([`~trl_explore.compare.arms.Arm`]):
            The arm.
        seed (`int`):
            The seed.
        folder (`Path`):
            Where checkpoints go.
        start (`str` or `None`):
            Folder of an embedded task's model.

    Returns:
        `tuple`: The trainer, and a function that measures its model on the held-out problems.
    """
    trainer_class = METHODS[arm.method].trainer_class
    arguments = run_arguments(comparison, arm, seed=seed, folder=str(folder))
    task = comparison.task
    if task is None:
        train, rows = held_out_split(comparison, arguments)
        trainer = trainer_class(**{**trainer_arguments(*arguments), "train_dataset": train})
        return trainer, sampled_metrics(comparison, trainer, rows)
    agent = task.name in AGENTS
    training = arguments[1]
    rows = task.evaluation_set(comparison.num_eval)
    if agent:
        training.per_device_eval_batch_size, training.num_generations_eval = 64, 4
    trainer = trainer_class(
        model=str(start),
        reward_funcs=[] if task is LAKE_AGENT else task.reward,  # its environment knows what a game is worth
        args=training,
        train_dataset=task.build_dataset(NUM_TRAIN_AGENT if agent else NUM_TRAIN, seed=seed),
        eval_dataset=rows if agent else None,
        processing_class=build_tokenizer(tools=agent),
        environment_factory=task.environment_factory if agent else None,
    )
    if agent:
        return trainer, lambda: agent_metrics(trainer)
    return trainer, sampled_metrics(comparison, trainer, rows, batch_size=512, answer_fn=str.strip)


def sampled_metrics(comparison: Comparison, trainer: Any, rows: Any, **options: Any) -> Evaluate:
    """
    Metrics over several samples per held-out prompt.

    Args:
        comparison ([`~trl_explore.compare.settings.Comparison`]):
            Which metrics.
        trainer ([`~trl.GRPOTrainer`]):
            The trainer.
        rows (`Iterable[dict]`):
            Held-out prompts.
        options (`Any`):
            Further arguments of [`~trl_explore.evaluation.callbacks.PassAtKCallback`].

    Returns:
        `Callable`: Measures the current model; returned beside the metrics is what
        [`~trl_explore.evaluation.callbacks.PassAtKCallback.successes`] has.
    """
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


def agent_metrics(trainer: Any) -> dict[str, float]:
    """
    Mean reward of an agent's trajectories on the held-out tasks; training goes on as if nothing had happened.

    Args:
        trainer ([`~trl.GRPOTrainer`]):
            The trainer.

    Returns:
        `dict[str, float]`: `eval/reward`.
    """
    should_log = trainer.control.should_log  # logging the evaluation would take it as carried out
    with undisturbed(trainer.model, seed=EVALUATION_SEED):
        metrics = trainer.evaluate()
    trainer.control.should_log = should_log
    return {"eval/reward": metrics["eval_reward"]}


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
    Train one arm on one seed, from the beginning or from where it was interrupted.

    Args:
        comparison ([`~trl_explore.compare.settings.Comparison`]):
            What to run.
        arm ([`~trl_explore.compare.arms.Arm`]):
            The arm.
        seed (`int`):
            The seed.
        folder (`Path`):
            Where checkpoints go.
        start (`str` or `None`):
            As for [`build_run`].
        bar (`tqdm`):
            Progress over the budgets of all runs.
        interrupt ([`~trl_explore.saving.interrupt.InterruptCallback`], *optional*):
            What stops the run early. Defaults to Ctrl-C.

    Returns:
        [`~trl_explore.compare.arms.Run`]: Curve and cost.

    Raises:
        Interrupted: After Ctrl-C; the checkpoint is saved.
    """
    trainer, evaluate = build_run(comparison, arm, seed=seed, folder=folder, start=start)
    costs, interrupt = CostCallback(comparison.budget), interrupt or InterruptCallback()
    milestones = Milestones(comparison, costs, interrupt, evaluate, bar)
    costs.count_trained(trainer)
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
