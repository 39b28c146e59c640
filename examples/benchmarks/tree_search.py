"""Compare TreeGRPO with GRPO, with and without training on trees whose outcomes are all equal.

    python examples/benchmarks/tree_search.py --task chain --seeds 0 1 2 --tokens 2.5e6 --output out/tree_search

For each seed, a tiny model is trained on demonstrations, and all arms start from this model. They have the same
learning rate, batch of prompts and held-out problems. A node of 7 tokens (`--node_length`) has one step of an answer
to the task `chain`.

The tables compare the arms at equal generated tokens, CPU seconds and optimizer steps, interpolated between
evaluations: means over the seeds, and differences to GRPO paired by seed, with 95 % t-intervals. The last lines have
the seconds per step, the shares of the parts of a search, and the search's metrics.
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
# Parts of a search whose seconds TreeGRPO logs, as `tree/sampling_seconds`, ...
PARTS = ("sampling", "scoring", "own")


def make_arms(node_length):
    """Return the arms. `node_length` is the number of tokens of a node."""
    search = dict(node_length=node_length)
    return [
        Arm("GRPO", "grpo"),
        Arm("TreeGRPO", "tree_grpo", {**search, "skip_uniform_trees": True}),
        Arm("TreeGRPO, all trees", "tree_grpo", {**search, "skip_uniform_trees": False}),
        Arm("TreeGRPO, uct", "tree_grpo", {**search, "skip_uniform_trees": True, "selection": "uct"}),
    ]


def tree_medians(steps):
    """Return the median of each `tree/` metric over the steps that have it."""
    found = {}
    for step in steps:
        for metric, value in step.items():
            if metric.startswith("tree/"):
                found.setdefault(metric, []).append(value)
    return {metric: statistics.median(values) for metric, values in found.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="chain", help="short name of a task")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", default=None, help="names of the arms to run; default: all")
    parser.add_argument("--tokens", type=float, default=2.5e6, help="generated tokens of every run")
    parser.add_argument("--max_steps", type=int, default=100_000)
    parser.add_argument("--learning_rate", type=float, default=3e-4)
    parser.add_argument("--node_length", type=int, default=7, help="tokens of a node")
    parser.add_argument("--evaluations", type=int, default=10, help="approximate number of evaluations per run")
    parser.add_argument("--num_eval", type=int, default=256, help="held-out problems")
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
            tokens_per_step = 128 * task.max_completion_length
            if arm.method != "grpo":
                tokens_per_step *= 5  # a step of TreeGRPO samples about five times the tokens of a step of GRPO
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
            last = {name: round(value, 3) for name, value in run.points[-1].items()}
            print(last, arm.name, seed, flush=True)
    for cost in ("tokens", "cpu_seconds", "step"):
        print("\n" + comparison_table(runs, cost, METRICS))
    print("\nper step, median over the run")
    for arm in arms:
        arm_runs = [run for run in runs if run["arm"] == arm.name]
        steps = [step for run in arm_runs for step in run["steps"]]
        seconds = sum(run["steps"][-1]["seconds"] for run in arm_runs) / len(steps)
        line = f"  {arm.name:22s} {seconds:.3f} s"
        medians = tree_medians(steps)
        if medians:
            for part in PARTS:
                line += f", {part} {100 * medians[f'tree/{part}_seconds'] / seconds:.1f} %"
        for metric, median in medians.items():
            if "seconds" not in metric:
                line += f", {metric.removeprefix('tree/')} {median:.3g}"
        print(line)
    try:
        path = learning_curves(
            runs, output / "curves.png", costs=("tokens", "cpu_seconds"), title=f"tree search on {task.name}"
        )
    except ImportError:
        path = "no picture: pip install matplotlib"
    print(f"\n{path}")


if __name__ == "__main__":
    main()
