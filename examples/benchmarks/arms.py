"""Train the arms of a comparison with a tiny model, and report their learning curves and costs.

An arm is a method with its configuration fields. Several scripts in `examples/` and `examples/benchmarks/` use this
module.
"""

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
    """
    Learning curve of a run that is evaluated at regular steps.

    Args:
        costs ([`~trl_explore.compare.run.CostCallback`]):
            Counts the cost of the run.
        evaluation ([`~trl_explore.evaluation.callbacks.PassAtKCallback`], *optional*):
            Callback that evaluates the model. Add it to the trainer before this callback. None for agents: then the
            trainer's own evaluation adds the points.
        bar (`tqdm`, *optional*):
            Progress bar that shows how many tokens of the budget are spent.
    """

    def __init__(self, costs: CostCallback, evaluation: PassAtKCallback | None, bar: Any) -> None:
        super().__init__(costs, "tokens", costs.budget.tokens, bar)
        self.evaluation, self.num_added = evaluation, 0

    def _add_evaluations(self) -> None:
        """Add the evaluations since the last call. Call this after TRL has logged the step: before that, the cost
        lacks the tokens of the step."""
        if self.evaluation is None:
            return
        new_entries = self.evaluation.history[self.num_added :]
        for entry in new_entries:
            self.note(entry)
        self.num_added += len(new_entries)

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        if self.evaluation is None:
            self.note({"eval/success": metrics["eval_reward"]})

    def on_save(self, args, state, control, **kwargs):
        self._add_evaluations()
        self.write(args, state)

    def on_step_begin(self, args, state, control, **kwargs):
        self._add_evaluations()

    def on_train_end(self, args, state, control, **kwargs):
        self._add_evaluations()


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
    """
    Train one arm on one seed, and evaluate the model on held-out problems before, during and after training.

    Args:
        arm ([`~trl_explore.compare.settings.Arm`]):
            The arm. Its options override `options`.
        task ([`~trl_explore.tasks.Task`]):
            The task.
        start (`str` or `Path`):
            Folder of the model with which training begins.
        output_dir (`str` or `Path`):
            Folder of the checkpoints.
        seed (`int`):
            Seed of the run.
        budget ([`~trl_explore.compare.settings.Budget`]):
            When to stop training.
        evaluate_every (`int`):
            Optimizer steps between evaluations.
        num_eval (`int`, *optional*, defaults to `128`):
            Number of held-out problems.
        num_samples (`int`, *optional*, defaults to `8`):
            Samples per held-out problem. Agents ignore it: their metric `eval/success` is the mean reward of four
            samples per problem.
        k (`tuple[int, ...]`, *optional*, defaults to `(1, 8)`):
            Values of k for pass@k. Agents ignore it.
        num_train (`int`, *optional*):
            Number of training problems. None: the task decides.
        evaluation_options (`dict`, *optional*):
            Further arguments of `PassAtKCallback`. Agents ignore them.
        options (`Mapping`, *optional*):
            Configuration fields that override `common_options`.
        progress (`tqdm`, *optional*):
            Progress bar that shows how many tokens of the budget are spent.
        callbacks (`Sequence`, *optional*):
            Callbacks, or functions that create a callback from the trainer.
        resume (`bool`, *optional*, defaults to `False`):
            If `True`, continue from the newest checkpoint in `output_dir`, if there is one.

    Returns:
        [`~trl_explore.compare.run.Run`]: The learning curve, and logs and cost of every step.
    """
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
    # The callback prints 50 metrics per step, which would hide the progress bar.
    trainer.remove_callback(PrinterCallback)
    with few_threads(trainer.model, trainer.accelerator.device):
        trainer.train(resume_from_checkpoint=curve.restore(output_dir) if resume else None)
        if agent and curve.points[-1]["step"] < costs.cost.step:  # no evaluation was due at the last step
            trainer.evaluate()
    return Run(arm.name, seed, curve.points, costs.history)


def train_missing(
    arms: Sequence[Arm], seeds: Sequence[int], kept: Path, train: Callable[[Arm, int], Run], shown: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """
    Train all arms of agents on all seeds, except for the runs in a file, and return the runs of these arms and seeds.

    Every finished run is written to the file. So an interrupted comparison continues with the first missing run.

    Args:
        arms (`Sequence[Arm]`):
            The arms.
        seeds (`Sequence[int]`):
            The seeds.
        kept (`Path`):
            JSON file with the finished runs.
        train (`Callable`):
            Function of an arm and a seed that trains it and returns the run.
        shown (`Sequence[str]`, *optional*, defaults to `()`):
            Prefixes of the names of metrics. After each run, the values of these metrics at the last step are printed.
    """
    kept.parent.mkdir(parents=True, exist_ok=True)
    runs = json.loads(kept.read_text()) if kept.is_file() else []
    finished = {(run["arm"], run["seed"]) for run in runs}
    for seed in seeds:
        for arm in arms:
            if (arm.name, seed) in finished:
                continue
            run = train(arm, seed)
            runs.append(asdict(run))
            finished.add((arm.name, seed))
            kept.write_text(json.dumps(runs))
            successes = [round(point["eval/success"], 3) for point in run.points]
            last = {}
            for name, value in run.steps[-1].items():
                if name.startswith(tuple(shown)):
                    last[name] = round(value, 3)
            print(arm.name, seed, successes, last, flush=True)
    names = {arm.name for arm in arms}
    return [run for run in runs if run["arm"] in names and run["seed"] in seeds]


def report(runs: list[dict[str, Any]], label: str, folder: str | Path) -> None:
    """
    Print tables of an agent's runs at equal tokens, CPU seconds and optimizer steps, and draw the learning curves.

    Args:
        runs (`list[dict]`):
            The runs, as [`train_missing`] returns them.
        label (`str`):
            Name of the metric `eval/success` in the tables.
        folder (`str` or `Path`):
            Folder of the picture `curves.png`.
    """
    for cost in ("tokens", "cpu_seconds", "step"):
        print("\n" + comparison_table(runs, cost, {label: "eval/success"}))
    try:
        costs = ("tokens", "cpu_seconds")
        print(f"\n{learning_curves(runs, Path(folder) / 'curves.png', metrics=['eval/success'], costs=costs)}")
    except ImportError:
        print("\nno picture: pip install matplotlib")
