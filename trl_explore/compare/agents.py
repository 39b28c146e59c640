"""Comparing trainers on an embedded task for agents: the same environments, data and budget for every arm."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import PrinterCallback, TrainerCallback

from trl_explore.compare.arms import Arm, Budget, CostCallback, Run, common_options
from trl_explore.compare.clocks import comparison_table
from trl_explore.compare.plots import learning_curves
from trl_explore.methods import METHODS


class Points(TrainerCallback):
    """
    Notes the cost beside every evaluation: the mean reward of sampled trajectories.

    Args:
        costs ([`~trl_explore.compare.arms.CostCallback`]):
            What counts the cost.
    """

    def __init__(self, costs: CostCallback) -> None:
        self.costs = costs
        self.points: list[dict[str, float]] = []

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        self.points.append({**asdict(self.costs.cost), "eval/success": metrics["eval_reward"]})


def train_agent(
    arm: Arm,
    task: Any,
    start: str | Path,
    *,
    output_dir: str | Path,
    seed: int,
    budget: Budget,
    evaluate_every: int,
    reward_funcs: Any,
    num_eval: int = 64,
    options: Mapping[str, Any] | None = None,
) -> Run:
    """
    Train one arm and evaluate it on held-out tasks along the way, at temperature 1.

    Args:
        arm ([`~trl_explore.compare.arms.Arm`]):
            Method and options.
        task (`Any`):
            Embedded task with an `environment_factory`.
        start (`str` or `Path`):
            Folder of the warm-started model.
        output_dir (`str` or `Path`):
            Where checkpoints go.
        seed (`int`):
            Seed of data, sampling and training.
        budget ([`~trl_explore.compare.arms.Budget`]):
            When to stop.
        evaluate_every (`int`):
            Optimiser steps between evaluations; beginning and end are always evaluated.
        reward_funcs (`Callable` or `list`):
            As for TRL; an empty list where the environment knows its reward.
        num_eval (`int`, *optional*, defaults to `64`):
            Held-out tasks.
        options (`dict`, *optional*):
            Configuration fields for every arm, over [`~trl_explore.compare.arms.common_options`].

    Returns:
        [`~trl_explore.compare.arms.Run`]: What it had learned at which cost; `eval/success` is the mean reward.
    """
    method = METHODS[arm.method]
    costs = CostCallback(budget)
    points = Points(costs)
    evaluation = dict(eval_strategy="steps", eval_steps=evaluate_every, eval_on_start=True)
    evaluation |= dict(per_device_eval_batch_size=64, num_generations_eval=4)
    settings = {**common_options(task, seed=seed), **evaluation, "max_steps": budget.steps, **(options or {})}
    trainer = method.trainer_class(
        model=str(start),
        reward_funcs=reward_funcs,
        args=method.config_class(output_dir=str(output_dir), **{**settings, **arm.options}),
        train_dataset=task.build_dataset(2000, seed=seed),
        eval_dataset=task.evaluation_set(num_eval),
        callbacks=[costs, points],
        environment_factory=task.environment_factory,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    if points.points[-1]["step"] < costs.cost.step:
        trainer.evaluate()
    return Run(arm.name, seed, points.points, costs.history)


def report(runs: list[dict[str, Any]], label: str, folder: str | Path) -> None:
    """
    Print the runs at equal tokens, CPU seconds and steps, and draw their curves where matplotlib is installed.

    Args:
        runs (`list[dict]`):
            What [`train_missing`] returned.
        label (`str`):
            What `eval/success` is called in the tables.
        folder (`str` or `Path`):
            Where the picture goes.
    """
    for clock in ("tokens", "cpu_seconds", "step"):
        print("\n" + comparison_table(runs, clock, {label: "eval/success"}))
    try:
        clocks = ("tokens", "cpu_seconds")
        print(f"\n{learning_curves(runs, Path(folder) / 'curves.png', metrics=['eval/success'], clocks=clocks)}")
    except ImportError:
        print("\nno picture: pip install matplotlib")


def train_missing(
    arms: Sequence[Arm], seeds: Sequence[int], kept: Path, train: Any, shown: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """
    Train the arms and seeds that a file does not hold yet; an interrupted comparison goes on where it stopped.

    Args:
        arms (`Sequence[Arm]`):
            Arms.
        seeds (`Sequence[int]`):
            Seeds.
        kept (`Path`):
            JSON file of the runs so far.
        train (`Callable[[Arm, int], Run]`):
            Trains one arm on one seed.
        shown (`Sequence[str]`, *optional*):
            Beginnings of the names of logged metrics to print after each run.

    Returns:
        `list[dict]`: The runs of these arms and seeds, as [`~trl_explore.compare.clocks.comparison_table`] takes them.
    """
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
