"""Compare G2RL, whose rewards are guided by gradients, with GRPO: accuracy, and angles between gradients.

    python examples/benchmarks/gradient_guided.py --task chain --seeds 0 1 2 --tokens 6e5 --beta 0.02

For each seed, a tiny model is trained on demonstrations, and all arms start from this model. They have the same
learning rate, batch of prompts and held-out problems.

The tables compare the arms at equal generated tokens, CPU seconds and optimizer steps, interpolated between
evaluations: means over the seeds, and differences to GRPO paired by seed, with 95 % t-intervals. The last lines have
the geometry metrics (Fig. 3 of the paper) in the first and in the last quarter of training.

An interrupted benchmark continues with the first missing run.
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="chain", help="short name of a task")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", default=None, help="names of the arms to run; default: all")
    parser.add_argument("--tokens", type=float, default=1.5e6, help="generated tokens of every run")
    parser.add_argument("--learning_rate", type=float, default=3e-4)
    parser.add_argument(
        "--beta", type=float, default=0.0, help="KL coefficient of all arms; in the paper, it is not 0"
    )
    parser.add_argument("--evaluate_every", type=int, default=20, help="optimizer steps between evaluations")
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
    kept = output / "runs.json"
    runs = json.loads(kept.read_text()) if kept.is_file() else []
    for seed in args.seeds:
        start = warm_start(task, seed=seed)
        for arm in arms:
            if any((run["arm"], run["seed"]) == (arm.name, seed) for run in runs):
                continue
            callbacks = []
            if arm.method == "grpo":
                # GRPO does not log its geometry, so measure it in every tenth batch. GRPO's time includes this.
                callbacks.append(lambda trainer: GeometryCallback(trainer, every=10))
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
                callbacks=callbacks,
            )
            runs.append(asdict(run))
            kept.write_text(json.dumps(runs))
            last = {name: round(value, 3) for name, value in run.points[-1].items()}
            print(last, arm.name, seed, flush=True)
    runs = [run for run in runs if run["arm"] in {arm.name for arm in arms} and run["seed"] in args.seeds]
    for cost in ("tokens", "cpu_seconds", "step"):
        print("\n" + comparison_table(runs, cost, METRICS))
    print("\ngeometry, first and last quarter of training: mean over seeds")
    for arm in arms:
        line = ""
        for name in GEOMETRY:
            metric = f"geometry/{name}"
            first_quarters, last_quarters = [], []
            for run in runs:
                if run["arm"] != arm.name:
                    continue
                values = [step[metric] for step in run["steps"] if metric in step]
                quarter = max(1, len(values) // 4)
                first_quarters.append(statistics.mean(values[:quarter]))
                last_quarters.append(statistics.mean(values[-quarter:]))
            line += f"  {name} {statistics.mean(first_quarters):.3f} -> {statistics.mean(last_quarters):.3f}"
        print(f"  {arm.name:20s}{line}")
    try:
        path = learning_curves(runs, output / "curves.png", costs=("tokens", "cpu_seconds"))
    except ImportError:
        path = "no picture: pip install matplotlib"
    print(f"\n{path}")


if __name__ == "__main__":
    main()
