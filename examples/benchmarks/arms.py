"""Train one arm on one seed of a task with a tiny model, with curve and cost. Examples and benchmarks share this."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import PrinterCallback, TrainerCallback

from trl_explore.compare.agents import AGENT_EVALUATION, EVALUATION_SEED
from trl_explore.compare.costs import comparison_table
from trl_explore.compare.plots import learning_curves
from trl_explore.compare.run import CostCallback, Curve, Run, task_trainer
from trl_explore.compare.settings import Arm, Budget
from trl_explore.evaluation.callbacks import PassAtKCallback
from trl_explore.machine.threads import few_threads
from trl_explore.methods import METHODS
from trl_explore.runs.embedded import common_options
from trl_explore.tasks import Task, is_agent


class SteadyCurve(Curve):
    """An example's curve: every so many steps, by a callback called before or, where agents play, the trainer."""

    def __init__(self, costs: CostCallback, evaluation: PassAtKCallback | None, bar: Any) -> None:
        super().__init__(costs, "tokens", costs.budget.tokens, bar)
        self.evaluation, self.seen = evaluation, 0

    def _look(self) -> None:
        entries = [] if self.evaluation is None else self.evaluation.history[self.seen :]
        for entry in entries:
            self.note(entry)
        self.seen += len(entries)

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        if self.evaluation is None:
            self.note({"eval/success": metrics["eval_reward"]})

    def on_save(self, args, state, control, **kwargs):
        self._look()
        self.write(args, state)

    def on_step_begin(self, args, state, control, **kwargs):
        self._look()

    def on_train_end(self, args, state, control, **kwargs):
        self._look()


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
    num_train: int | None = None,
    evaluation_options: dict[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    progress: Any = None,
    callbacks: Sequence[TrainerCallback | Callable[[Any], TrainerCallback]] = (),
    resume: bool = False,
) -> Run:
    """Train one arm on a task from the model in `start`, evaluating on held-out problems on the way and at
    both ends; of agents, `eval/success` is the mean reward of four samples. `options` are over `common_options`."""
    agent, rows, costs = is_agent(task), task.evaluation_set(num_eval), CostCallback(budget)
    settings = {**common_options(task, seed=seed), "max_steps": budget.steps}
    if agent:
        settings |= {"eval_strategy": "steps", "eval_steps": evaluate_every, "eval_on_start": True, **AGENT_EVALUATION}
    config = METHODS[arm.method].config_class(
        output_dir=str(output_dir), **{**settings, **(options or {}), **arm.options}
    )
    given = [callback for callback in callbacks if isinstance(callback, TrainerCallback)]
    trainer = task_trainer(arm, task, start, config, num_train=num_train, rows=rows, callbacks=[costs, *given])
    costs.count_sampled(trainer)
    for callback in callbacks:
        if not isinstance(callback, TrainerCallback):
            trainer.add_callback(callback(trainer))
    evaluation = None
    if not agent:
        sampling = dict(num_samples=num_samples, k=k, every=evaluate_every, batch_size=512, seed=EVALUATION_SEED)
        evaluation = PassAtKCallback(trainer, rows, **{**sampling, **(evaluation_options or {})})
        trainer.add_callback(evaluation)
    curve = SteadyCurve(costs, evaluation, progress)
    trainer.add_callback(curve)
    trainer.remove_callback(PrinterCallback)  # a line of 50 metrics per step would bury the progress bar
    with few_threads(trainer.model, trainer.accelerator.device):
        trainer.train(resume_from_checkpoint=curve.restore(output_dir) if resume else None)
        if agent and curve.points[-1]["step"] < costs.cost.step:
            trainer.evaluate()
    return Run(arm.name, seed, curve.points, costs.history)


def train_missing(
    arms: Sequence[Arm], seeds: Sequence[int], kept: Path, train: Callable[[Arm, int], Run], shown: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Train the arms and seeds that the JSON file `kept` lacks, and return the runs of all of them; an interrupted
    comparison goes on where it stopped. `shown` are beginnings of metric names to print after each run."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    runs = json.loads(kept.read_text()) if kept.is_file() else []
    for seed in seeds:
        for arm in arms:
            if any((run["arm"], run["seed"]) == (arm.name, seed) for run in runs):
                continue
            run = train(arm, seed)
            runs.append(asdict(run))
            kept.write_text(json.dumps(runs))
            last = {name: round(value, 3) for name, value in run.steps[-1].items() if name.startswith(tuple(shown))}
            print(arm.name, seed, [round(point["eval/success"], 3) for point in run.points], last, flush=True)
    names = {arm.name for arm in arms}
    return [run for run in runs if run["arm"] in names and run["seed"] in seeds]


def report(runs: list[dict[str, Any]], label: str, folder: str | Path) -> None:
    """Prints an example's runs at equal tokens, CPU seconds and steps, `eval/success` under a label; draws curves."""
    for cost in ("tokens", "cpu_seconds", "step"):
        print("\n" + comparison_table(runs, cost, {label: "eval/success"}))
    try:
        costs = ("tokens", "cpu_seconds")
        print(f"\n{learning_curves(runs, Path(folder) / 'curves.png', metrics=['eval/success'], costs=costs)}")
    except ImportError:
        print("\nno picture: pip install matplotlib")
