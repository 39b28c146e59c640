"""Rare errors late in a completion: DEEP-GRPO, its root and uniform controls, and plain GRPO, side by side.

    python examples/benchmarks/late_errors.py --task late1 --seeds 0 1 2 --cpu_seconds 120 --output out/late1

Every seed has its own warm start, from which all arms begin; they share the learning rate, the batch and the held-out
problems. Prints accuracy at equal CPU seconds, at equal generated tokens and at equal optimiser steps (linear
interpolation between evaluations), the mean over seeds with a 95 % t-interval, and each arm's paired difference to
GRPO. The three costs disagree: name the one you quote.
"""

import argparse
import json
import statistics
from dataclasses import asdict
from pathlib import Path

import torch
import transformers
from arms import train_arm
from tasks import find_task

from trl_explore.compare.costs import comparison_table
from trl_explore.compare.settings import Arm, Budget
from trl_explore.tasks.warm_start import warm_start

METRICS = {"greedy": "eval/greedy_accuracy", "pass@1": "eval/pass_at_1", "pass@16": "eval/pass_at_16"}


def make_arms(max_pivots):
    common = dict(max_pivots_per_batch=max_pivots, segment_delimiters=[";"])
    # On a CPU, branches of similar length sample faster in calls of their own; whole completions do not.
    parts = dict(sampling_batch_size=64)
    return [
        Arm("GRPO", "grpo"),
        Arm("DEEP-GRPO", "deep_grpo", {**common, **parts}),
        Arm("root control", "deep_grpo", {**common, "pivot_selection": "root"}),
        Arm("uniform control", "deep_grpo", {**common, **parts, "pivot_selection": "uniform"}),
    ]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", default="late1")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", default=None, help="names of the arms to run; default: all")
    parser.add_argument("--cpu_seconds", type=float, default=120.0)
    parser.add_argument("--max_steps", type=int, default=100_000)
    parser.add_argument("--learning_rate", type=float, default=3e-4)
    parser.add_argument("--max_pivots", type=int, default=32)
    parser.add_argument("--evaluate_every", type=int, default=40)
    parser.add_argument("--num_eval", type=int, default=256)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", default="out/late_errors")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    task = find_task(args.task)
    output = Path(args.output)
    output.mkdir(parents=True, exist_ok=True)
    arms = [arm for arm in make_arms(args.max_pivots) if args.arms is None or arm.name in args.arms]
    runs = []
    for seed in args.seeds:
        start = warm_start(task, seed=seed)
        for arm in arms:
            run = train_arm(
                arm,
                task,
                start,
                output_dir=output / f"{arm.name}-{seed}",
                seed=seed,
                budget=Budget(cpu_seconds=args.cpu_seconds, steps=args.max_steps),
                evaluate_every=args.evaluate_every,
                num_eval=args.num_eval,
                num_samples=16,
                k=(1, 16),
                options=dict(learning_rate=args.learning_rate),
            )
            runs.append(asdict(run))
            (output / "runs.json").write_text(json.dumps(runs))
            last = run.points[-1]
            print({k: round(v, 3) for k, v in last.items()}, arm.name, seed, flush=True)
    for cost in ("cpu_seconds", "tokens", "step"):
        print("\n" + comparison_table(runs, cost, METRICS))
    print("\nper step, median over the run")
    for arm in arms:
        steps = [step for run in runs if run["arm"] == arm.name for step in run["steps"]]
        keys = ("pivots/tried", "pivots/informative_fraction", "pivots/recovered_fraction", "pivots/token_ratio")
        found = {k: statistics.median(s[k] for s in steps if k in s) for k in keys if any(k in s for s in steps)}
        cpu = sum(run["steps"][-1]["cpu_seconds"] / run["steps"][-1]["step"] for run in runs if run["arm"] == arm.name)
        shares = {k: round(v, 3) for k, v in found.items()}
        print(f"  {arm.name:16s} CPU s/step {cpu / len(args.seeds):.3f}  {shares}")


if __name__ == "__main__":
    main()
