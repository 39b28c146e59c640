"""Rare errors late in a completion: DEEP-GRPO, its root and uniform controls, and plain GRPO, side by side.

    python examples/benchmarks/late_errors.py --task late1 --seeds 0 1 2 --cpu_seconds 120 --output out/late1

Every seed has its own warm start, from which all arms begin; they share the learning rate, the batch and the held-out
problems. Prints accuracy at equal CPU seconds, at equal generated tokens and at equal optimiser steps (linear
interpolation between evaluations), the mean over seeds with a 95 % t-interval, and each arm's paired difference to
GRPO. The three clocks disagree: name the one you quote.
"""

import argparse
import json
import statistics
from dataclasses import asdict
from pathlib import Path

import torch
import transformers

from trl_explore.comparison import Arm, Budget, train_arm
from trl_explore.tasks import get_task
from trl_explore.tasks.warm_start import warm_start

METRICS = {"greedy": "eval/greedy_accuracy", "pass@1": "eval/pass_at_1", "pass@16": "eval/pass_at_16"}
T_95 = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}  # two-sided, n - 1 degrees of freedom


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


def at(points, clock, value, metric):
    """Metric where the clock shows `value`, between the two nearest evaluations; None past the last one."""
    for before, after in zip(points, points[1:], strict=False):
        if before[clock] <= value <= after[clock]:
            share = (value - before[clock]) / max(after[clock] - before[clock], 1e-9)
            return before[metric] + share * (after[metric] - before[metric])
    return None


def with_interval(values):
    mean = statistics.mean(values)
    if len(values) < 2:
        return f"{100 * mean:5.1f}"
    half = T_95[len(values)] * statistics.stdev(values) / len(values) ** 0.5
    return f"{100 * mean:5.1f} ± {100 * half:4.1f}"


def table(runs, clock):
    seeds = sorted({run["seed"] for run in runs})
    names = list(dict.fromkeys(run["arm"] for run in runs))
    points = {(run["arm"], run["seed"]): run["points"] for run in runs}
    value = min(p[-1][clock] for p in points.values())
    print(f"\nat equal {clock}: {value:,.0f}      (mean ± 95 % interval over {len(seeds)} seeds; per seed)")
    for name in names:
        cells = []
        for label, metric in METRICS.items():
            values = [at(points[name, seed], clock, value, metric) for seed in seeds]
            base = [at(points[names[0], seed], clock, value, metric) for seed in seeds]
            gap = with_interval([v - b for v, b in zip(values, base, strict=True)]) if name != names[0] else ""
            each = "/".join(f"{100 * v:.0f}" for v in values)
            cells.append(f"{label} {with_interval(values)} ({each}) {f'[vs GRPO {gap}]' if gap else '':24s}")
        print(f"  {name:16s} " + "  ".join(cells))


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
    task = get_task(args.task)
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
    for clock in ("cpu_seconds", "tokens", "step"):
        table(runs, clock)
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
