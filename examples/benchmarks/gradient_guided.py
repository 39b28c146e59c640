"""Do gradient-guided rewards help, and what do they do to the geometry of a group? G2RL beside plain GRPO.

    python examples/benchmarks/gradient_guided.py --task chain --seeds 0 1 2 --tokens 6e5 --beta 0.02

Every seed has its own warm start, from which all arms begin; they share the learning rate, the batch of prompts and
the held-out problems. Prints accuracy at equal generated tokens, CPU seconds and optimiser steps (interpolated between
evaluations), the mean over seeds with a 95 % t-interval, each arm's paired difference to GRPO, and the geometry of the
first and the last quarter of training (the paper's Fig. 3).
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
from trl_explore.compare.plots import learning_curves
from trl_explore.compare.settings import Arm, Budget
from trl_explore.tasks.warm_start import warm_start
from trl_explore.trainers.geometry_callback import GeometryCallback

METRICS = {"greedy": "eval/greedy_accuracy", "pass@1": "eval/pass_at_1", "pass@8": "eval/pass_at_8"}
GEOMETRY = ("mean_cosine", "negative_pairs", "mean_novelty")
ARMS = [
    Arm("GRPO", "grpo"),
    Arm("G2RL", "g2rl"),
    Arm("G2RL, centered", "g2rl", {"novelty_transform": "centered"}),
    Arm("G2RL, mixed groups", "g2rl", {"min_correct": 1, "min_wrong": 1}),
]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", default="chain")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", default=None, help="names of the arms to run; default: all")
    parser.add_argument("--tokens", type=float, default=1.5e6)
    parser.add_argument("--learning_rate", type=float, default=3e-4)
    parser.add_argument(
        "--beta", type=float, default=0.0, help="KL coefficient of all arms; the paper's runs have one"
    )
    parser.add_argument("--evaluate_every", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", default="out/gradient_guided")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    task = find_task(args.task)
    output = Path(args.output) / args.task
    output.mkdir(parents=True, exist_ok=True)
    arms = [arm for arm in ARMS if args.arms is None or arm.name in args.arms]
    kept = output / "runs.json"  # an interrupted benchmark goes on where it stopped
    runs = json.loads(kept.read_text()) if kept.is_file() else []
    for seed in args.seeds:
        start = warm_start(task, seed=seed)
        for arm in arms:
            if any((run["arm"], run["seed"]) == (arm.name, seed) for run in runs):
                continue
            run = train_arm(
                arm,
                task,
                start,
                output_dir=output / f"{arm.name}-{seed}",
                seed=seed,
                budget=Budget(tokens=args.tokens),
                evaluate_every=args.evaluate_every,
                num_eval=256,
                options=dict(learning_rate=args.learning_rate, beta=args.beta),
                # Plain GRPO does not know its geometry. Its time includes what measuring it costs, every tenth batch.
                callbacks=[lambda trainer: GeometryCallback(trainer, every=10)] if arm.method == "grpo" else [],
            )
            runs.append(asdict(run))
            kept.write_text(json.dumps(runs))
            print({k: round(v, 3) for k, v in run.points[-1].items()}, arm.name, seed, flush=True)
    runs = [run for run in runs if run["arm"] in {arm.name for arm in arms} and run["seed"] in args.seeds]
    for cost in ("tokens", "cpu_seconds", "step"):
        print("\n" + comparison_table(runs, cost, METRICS))
    print("\ngeometry, first and last quarter of training: mean over seeds")
    for arm in arms:
        line = ""
        for name in GEOMETRY:
            quarters = []
            for run in (run for run in runs if run["arm"] == arm.name):
                values = [s[f"geometry/{name}"] for s in run["steps"] if f"geometry/{name}" in s]
                part = max(1, len(values) // 4)
                quarters.append((statistics.mean(values[:part]), statistics.mean(values[-part:])))
            first, last = (statistics.mean(column) for column in zip(*quarters, strict=True))
            line += f"  {name} {first:.3f} -> {last:.3f}"
        print(f"  {arm.name:20s}{line}")
    try:
        path = learning_curves(runs, output / "curves.png", costs=("tokens", "cpu_seconds"))
    except ImportError:
        path = "no picture: pip install matplotlib"
    print(f"\n{path}")


if __name__ == "__main__":
    main()
