"""
An agent that walks over a frozen lake: GRPO beside SESA's agent mode. Offline, on a CPU:

    python examples/sesa_agent.py --tokens 3e5 --seeds 0 1 2

A tiny model learns from demonstrations how to play, with blind spots for some holes. Both trainers get the same
environments, and as many generated tokens as asked for. Prints the share of held-out games won (sampled at temperature
1) at equal tokens, CPU seconds and optimiser steps, the mean over seeds with a 95 % t-interval.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import torch
import transformers
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from trl_explore.clocks import comparison_table
from trl_explore.comparison import Budget, CostCallback, Run, common_options
from trl_explore.plots import learning_curves
from trl_explore.tasks.lake_agent import LAKE_AGENT
from trl_explore.tasks.warm_start import warm_start
from trl_explore.trainers import SESAConfig, SESATrainer


class Points(TrainerCallback):
    """Notes the cost beside every evaluation."""

    def __init__(self, costs):
        self.costs, self.points = costs, []

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        self.points.append({**asdict(self.costs.cost), "eval/success": metrics["eval_reward"]})


def train(name, trainer_class, config_class, options, *, seed, start, args):
    costs = CostCallback(Budget(tokens=args.tokens))
    points = Points(costs)
    common = common_options(LAKE_AGENT, seed=seed)
    common |= dict(
        output_dir=f"{args.output}/{name}-{seed}",
        per_device_train_batch_size=64,
        num_generations=8,
        learning_rate=args.learning_rate,
        beta=args.beta,
        max_tool_calling_iterations=LAKE_AGENT.max_turns,
        max_steps=100_000,
        per_device_eval_batch_size=64,
        num_generations_eval=4,
        eval_strategy="steps",
        eval_steps=args.evaluate_every,
        eval_on_start=True,
    )
    trainer = trainer_class(
        model=str(start),
        reward_funcs=[],  # the environment knows what a game is worth
        args=config_class(**{**common, **options}),
        train_dataset=LAKE_AGENT.build_dataset(2000, seed=seed),
        eval_dataset=LAKE_AGENT.evaluation_set(64),
        callbacks=[costs, points],
        environment_factory=LAKE_AGENT.environment_factory,
    )
    trainer.train()
    if points.points[-1]["step"] < costs.cost.step:
        trainer.evaluate()
    return Run(name, seed, points.points, costs.history)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--tokens", type=float, default=3e5)
    parser.add_argument("--arms", nargs="+", default=None, help="names of the arms to run; default: all")
    parser.add_argument("--beta", type=float, default=0.0, help="KL coefficient of all arms")
    parser.add_argument("--learning_rate", type=float, default=3e-4)
    parser.add_argument("--branch_depth", type=int, default=2)
    parser.add_argument("--num_actions", type=int, default=3)
    parser.add_argument("--evaluate_every", type=int, default=20)
    parser.add_argument("--output", default="out/sesa_agent")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    agent = {**LAKE_AGENT.sesa_options, "branch_depth": args.branch_depth, "num_actions": args.num_actions}
    # Beyond the paper: unlikely moves that turn out wrong pull a policy apart, unless they are weighted down.
    weighted = dict(off_policy_correction=True, off_policy_scope="negative", off_policy_cap=1.0)
    arms = {
        "GRPO": (GRPOTrainer, GRPOConfig, {}),
        "SESA agent": (SESATrainer, SESAConfig, agent),
        "SESA agent, weighted": (SESATrainer, SESAConfig, {**agent, **weighted}),
    }
    arms = {name: arm for name, arm in arms.items() if args.arms is None or name in args.arms}
    Path(args.output).mkdir(parents=True, exist_ok=True)
    kept = Path(args.output) / "runs.json"  # an interrupted comparison goes on where it stopped
    runs = json.loads(kept.read_text()) if kept.is_file() else []
    for seed in args.seeds:
        start = warm_start(LAKE_AGENT, seed=seed)
        for name, arm in arms.items():
            if any((run["arm"], run["seed"]) == (name, seed) for run in runs):
                continue
            run = train(name, *arm, seed=seed, start=start, args=args)
            runs.append(asdict(run))
            kept.write_text(json.dumps(runs))
            shown = {k: v for k, v in run.steps[-1].items() if k.startswith(("agent/", "sketch/", "cpu_", "step"))}
            print(name, seed, [round(p["eval/success"], 3) for p in run.points], flush=True)
            print({k: round(v, 3) for k, v in shown.items()}, flush=True)
    runs = [run for run in runs if run["arm"] in arms and run["seed"] in args.seeds]
    for clock in ("tokens", "cpu_seconds", "step"):
        print("\n" + comparison_table(runs, clock, {"success": "eval/success"}))
    try:
        path = learning_curves(
            runs, f"{args.output}/curves.png", metrics=["eval/success"], clocks=("tokens", "cpu_seconds")
        )
    except ImportError:
        path = "no picture: pip install matplotlib"
    print(f"\n{path}")


if __name__ == "__main__":
    main()
