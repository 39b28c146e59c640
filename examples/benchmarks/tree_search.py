"""Tree search during training beside plain GRPO, with and without the trees that have nothing to compare.

    python examples/benchmarks/tree_search.py --task chain --seeds 0 1 2 --tokens 2.5e6 --output out/tree_search

Every seed has its own warm start, from which all arms begin; they share the learning rate, the batch of prompts and
the held-out problems. Prints accuracy at equal generated tokens, CPU seconds and optimiser steps (interpolated
between evaluations), the mean over seeds with a 95 % t-interval, paired differences to GRPO, and what a search costs.
One node holds one step of the problem (`--node_length 7`).
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

METRICS = {"greedy": "eval/greedy_accuracy", "pass@1": "eval/pass_at_1", "pass@8": "eval/pass_at_8"}
SHARES = ("sampling", "scoring", "own")


def make_arms(node_length):
    search = dict(node_length=node_length)
    return [
        Arm("GRPO", "grpo"),
        Arm("TreeGRPO", "tree_grpo", {**search, "skip_uniform_trees": True}),
        Arm("TreeGRPO, all trees", "tree_grpo", {**search, "skip_uniform_trees": False}),
        Arm("TreeGRPO, uct", "tree_grpo", {**search, "skip_uniform_trees": True, "selection": "uct"}),
    ]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", default="chain")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", default=None, help="names of the arms to run; default: all")
    parser.add_argument("--tokens", type=float, default=2.5e6)
    parser.add_argument("--max_steps", type=int, default=100_000)
    parser.add_argument("--learning_rate", type=float, default=3e-4)
    parser.add_argument("--node_length", type=int, default=7)
    parser.add_argument("--evaluations", type=int, default=10, help="evaluations per run, about")
    parser.add_argument("--num_eval", type=int, default=256)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", default="out/tree_search")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    task = find_task(args.task)
    output = Path(args.output)
    output.mkdir(parents=True, exist_ok=True)
    arms = [arm for arm in make_arms(args.node_length) if args.arms is None or arm.name in args.arms]
    runs = []
    for seed in args.seeds:
        start = warm_start(task, seed=seed)
        for arm in arms:
            # A step of tree search samples about five times the tokens of one of GRPO, so its steps are fewer.
            tokens_per_step = 128 * task.max_completion_length * (1 if arm.method == "grpo" else 5)
            run = train_arm(
                arm,
                task,
                start,
                output_dir=output / f"{arm.name}-{seed}",
                seed=seed,
                budget=Budget(tokens=args.tokens, steps=args.max_steps),
                evaluate_every=max(1, round(args.tokens / tokens_per_step / args.evaluations)),
                num_eval=args.num_eval,
                options=dict(learning_rate=args.learning_rate),
            )
            runs.append(asdict(run))
            (output / "runs.json").write_text(json.dumps(runs))
            print({k: round(v, 3) for k, v in run.points[-1].items()}, arm.name, seed, flush=True)
    for cost in ("tokens", "cpu_seconds", "step"):
        print("\n" + comparison_table(runs, cost, METRICS))
    print("\nper step, median over the run")
    for arm in arms:
        steps = [step for run in runs if run["arm"] == arm.name for step in run["steps"]]
        seconds = sum(run["steps"][-1]["seconds"] for run in runs if run["arm"] == arm.name) / len(steps)
        print(f"  {arm.name:22s} {seconds:.3f} s", end="")
        found = {k: statistics.median(s[k] for s in steps) for k in steps[0] if k.startswith("tree/")}
        for part in SHARES if found else ():
            print(f", {part} {100 * found[f'tree/{part}_seconds'] / seconds:.1f} %", end="")
        print("".join(f", {k.removeprefix('tree/')} {v:.3g}" for k, v in found.items() if "seconds" not in k))
    try:
        path = learning_curves(
            runs, output / "curves.png", costs=("tokens", "cpu_seconds"), title=f"tree search on {task.name}"
        )
    except ImportError:
        path = "no picture: pip install matplotlib"
    print(f"\n{path}")


if __name__ == "__main__":
    main()
