"""Compare how many different right answers SESA and GRPO keep, at equal generated tokens.

    python examples/benchmarks/sequential_sampling.py --task paths --seeds 0 1 2 --tokens 6e5
    python examples/benchmarks/sequential_sampling.py --task countdown --seeds 0 1 2 --tokens 1e6

For each seed, a tiny model is trained on demonstrations, and all arms start from this model. They have the same
learning rate, batch of prompts and held-out problems.

On `paths`, which has one prompt with 20 right answers among 200, the metric is coverage@32: the share of the right
answers among 32 samples. On other tasks, it is the ratio of pass@16 to pass@1.

The tables compare the arms at equal generated tokens, CPU seconds and optimizer steps, interpolated between
evaluations: means over the seeds, and differences to GRPO paired by seed, with 95 % t-intervals.

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

# An addition to the paper: a wrong candidate gets a small weight if it is unlikely for the plain prompt. With full
# weight, such candidates can make training diverge.
WEIGHTED = {"off_policy_correction": True, "off_policy_scope": "negative", "off_policy_cap": 1.0}


def make_arms(task):
    """Return the arms for a task."""
    options = task.sesa_options
    return [
        Arm("GRPO", "grpo"),
        Arm("SESA, lists", "sesa", {**options, "mode": "sequential"}),
        Arm("SESA, weighted lists", "sesa", {**options, **WEIGHTED, "mode": "sequential"}),
        Arm("SESA, sketches", "sesa", {**options, "mode": "two_stage"}),
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="paths", help="short name of a task")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", default=None, help="names of the arms to run; default: all")
    parser.add_argument("--tokens", type=float, default=6e5, help="generated tokens of every run")
    parser.add_argument("--learning_rate", type=float, default=3e-4)
    parser.add_argument("--beta", type=float, default=0.0, help="KL coefficient of all arms")
    parser.add_argument("--num_generations", type=int, default=16)
    parser.add_argument("--evaluate_every", type=int, default=20, help="optimizer steps between evaluations")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", default="out/sequential_sampling")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    task = find_task(args.task)
    one_prompt = args.task == "paths"
    output = Path(args.output) / args.task
    output.mkdir(parents=True, exist_ok=True)
    metrics = {"greedy": "eval/greedy_accuracy", "pass@1": "eval/pass_at_1", "pass@16": "eval/pass_at_16"}
    if one_prompt:
        metrics["coverage@32"] = "eval/coverage_at_32"
    arms = [arm for arm in make_arms(task) if args.arms is None or arm.name in args.arms]
    kept = output / "runs.json"
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
                num_eval=8 if one_prompt else 128,
                num_samples=32 if one_prompt else 16,
                k=(1, 16),
                evaluation_options=dict(coverage_k=(32,), answer_fn=str.strip) if one_prompt else None,
                options=dict(learning_rate=args.learning_rate, beta=args.beta, num_generations=args.num_generations),
            )
            runs.append(asdict(run))
            kept.write_text(json.dumps(runs))
            last = {name: round(value, 3) for name, value in run.points[-1].items()}
            print(last, arm.name, seed, flush=True)
    runs = [run for run in runs if run["arm"] in {arm.name for arm in arms} and run["seed"] in args.seeds]
    for cost in ("tokens", "cpu_seconds", "step"):
        print("\n" + comparison_table(runs, cost, metrics))
    print("\npass@16 / pass@1 along each run")
    for run in runs:
        ratios = []
        for point in run["points"]:
            if point["eval/pass_at_1"]:
                ratios.append(f"{point['eval/pass_at_16'] / point['eval/pass_at_1']:.2f}")
        print(f"  {run['arm']:16s} seed {run['seed']}  " + " ".join(ratios))
    print("\nper step, median over the run")
    for arm in arms:
        arm_runs = [run for run in runs if run["arm"] == arm.name]
        steps = [step for run in arm_runs for step in run["steps"]]
        seconds = sum(run["steps"][-1]["cpu_seconds"] for run in arm_runs) / len(steps)
        medians = []
        for metric in steps[0]:
            if metric.startswith("sketch/"):
                median = statistics.median(step[metric] for step in steps if metric in step)
                medians.append(f"{metric.removeprefix('sketch/')} {median:.3g}")
        print(f"  {arm.name:16s} CPU s {seconds:.3f}  " + " ".join(medians))
    try:
        names = list(metrics.values())
        path = learning_curves(runs, output / "curves.png", metrics=names, costs=("tokens", "cpu_seconds"))
    except ImportError:
        path = "no picture: pip install matplotlib"
    print(f"\n{path}")


if __name__ == "__main__":
    main()
