"""Compare DEEP-GRPO with GRPO and with two controls on a task with rare errors late in a completion.

    python examples/benchmarks/late_errors.py --task late1 --seeds 0 1 2 --cpu_seconds 120 --output out/late1

The controls are DEEP-GRPO with branches from the start of the completion ("root") and from uniformly random pivots.
For each seed, a tiny model is trained on demonstrations, and all arms start from this model. They have the same
learning rate, batch size and held-out problems.

The tables compare the arms at equal CPU seconds, generated tokens and optimizer steps, interpolated linearly between
evaluations: means over the seeds, and differences to GRPO paired by seed, with 95 % t-intervals. The conclusion may
depend on the kind of cost, so name the cost if you quote a number.
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

PIVOT_METRICS = ("pivots/tried", "pivots/informative_fraction", "pivots/recovered_fraction", "pivots/token_ratio")
METRICS = {"greedy": "eval/greedy_accuracy", "pass@1": "eval/pass_at_1", "pass@16": "eval/pass_at_16"}


def make_arms(max_pivots):
    """Return the arms. `max_pivots` is the maximum number of pivots per batch."""
    common = dict(max_pivots_per_batch=max_pivots, segment_delimiters=[";"])
    # On a CPU, several `generate` calls, each for branches of similar length, are faster than one call. The branches
    # of the root control are whole completions, for which this is not faster.
    parts = dict(sampling_batch_size=64)
    return [
        Arm("GRPO", "grpo"),
        Arm("DEEP-GRPO", "deep_grpo", {**common, **parts}),
        Arm("root control", "deep_grpo", {**common, "pivot_selection": "root"}),
        Arm("uniform control", "deep_grpo", {**common, **parts, "pivot_selection": "uniform"}),
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="late1", help="short name of a task")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", default=None, help="names of the arms to run; default: all")
    parser.add_argument("--cpu_seconds", type=float, default=120.0, help="CPU seconds of every run")
    parser.add_argument("--max_steps", type=int, default=100_000)
    parser.add_argument("--learning_rate", type=float, default=3e-4)
    parser.add_argument("--max_pivots", type=int, default=32, help="maximum number of pivots per batch")
    parser.add_argument("--evaluate_every", type=int, default=40, help="optimizer steps between evaluations")
    parser.add_argument("--num_eval", type=int, default=256, help="held-out problems")
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
            last = {name: round(value, 3) for name, value in run.points[-1].items()}
            print(last, arm.name, seed, flush=True)
    for cost in ("cpu_seconds", "tokens", "step"):
        print("\n" + comparison_table(runs, cost, METRICS))
    print("\nper step, median over the run")
    for arm in arms:
        arm_runs = [run for run in runs if run["arm"] == arm.name]
        medians = {}
        for metric in PIVOT_METRICS:
            values = [step[metric] for run in arm_runs for step in run["steps"] if metric in step]
            if values:
                medians[metric] = round(statistics.median(values), 3)
        seconds_per_step = 0
        for run in arm_runs:
            last_step = run["steps"][-1]
            seconds_per_step += last_step["cpu_seconds"] / last_step["step"]
        print(f"  {arm.name:16s} CPU s/step {seconds_per_step / len(args.seeds):.3f}  {medians}")


if __name__ == "__main__":
    main()
