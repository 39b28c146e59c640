"""Measure whether sketches for every row do harm because few sketches are right.

    python examples/benchmarks/right_sketches.py --accepted 1 4 8

In the task `plans`, an answer is a number, written in one of sixteen dialects. It is right if the item of the problem
understands the dialect. A sketch names one dialect. This script changes only how many dialects an item understands:
1, 4 or 8. Items, demonstrations and settings stay the same.

The arms are GRPO, SESA with a sketch for each of the eight rows of a group, and SESA with sketches for four rows. The
tables compare them at equal generated tokens, with 95 % t-intervals over seeds. If only one sketch is right, at most
one of eight rows with different sketches can be right. If this does the harm, the harm vanishes with more right
sketches.
"""

import argparse
import json
import statistics
from dataclasses import asdict, replace
from pathlib import Path

import transformers
from arms import train_arm
from tasks import PLANS

from trl_explore.compare.costs import comparison_table, mean_along
from trl_explore.compare.settings import Arm, Budget
from trl_explore.tasks.warm_start import warm_start

SETTINGS = PLANS.sesa_options | {"off_policy_correction": True, "off_policy_scope": "negative", "off_policy_cap": 1.0}
ARMS = [
    Arm("GRPO", "grpo"),
    Arm("SESA, every row", "sesa", {**SETTINGS, "max_trajectories": 8}),
    Arm("SESA, half", "sesa", {**SETTINGS, "max_trajectories": 4}),
]
METRICS = {"greedy": "eval/greedy_accuracy", "pass@1": "eval/pass_at_1", "pass@16": "eval/pass_at_16"}
SHOWN = ("sketch/success", "sketch/plain_success", "frac_reward_zero_std")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accepted", type=int, nargs="+", default=[1, 4, 8], help="right dialects per item")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--tokens", type=float, default=1.2e5, help="generated tokens of every run")
    parser.add_argument("--learning_rate", type=float, default=6e-4)
    parser.add_argument("--evaluate_every", type=int, default=20, help="optimizer steps between evaluations")
    parser.add_argument("--num_eval", type=int, default=128, help="held-out problems")
    parser.add_argument("--output", type=Path, default=Path("out/right_sketches"))
    args = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    args.output.mkdir(parents=True, exist_ok=True)
    for accepted in args.accepted:
        task, runs = replace(PLANS, num_accepted=accepted), []
        for seed in args.seeds:
            start = warm_start(task, seed=seed, progress=False)
            for arm in ARMS:
                run = train_arm(
                    arm,
                    task,
                    start,
                    output_dir=args.output / f"{accepted}-{arm.name}-{seed}",
                    seed=seed,
                    budget=Budget(tokens=args.tokens),
                    evaluate_every=args.evaluate_every,
                    num_eval=args.num_eval,
                    num_samples=16,
                    k=(1, 16),
                    options=dict(learning_rate=args.learning_rate),
                )
                runs.append(asdict(run))
                (args.output / f"{accepted}.json").write_text(json.dumps(runs))
        print(f"\n{accepted} of {len(PLANS.weights)} sketches right\n")
        print(comparison_table(runs, "tokens", METRICS))
        for arm in ARMS:
            arm_runs = [run for run in runs if run["arm"] == arm.name]
            along_curve = {}
            for name, key in METRICS.items():
                values = [mean_along(run["points"], "tokens", args.tokens, key) for run in arm_runs]
                along_curve[name] = round(100 * statistics.mean(values), 1)
            last_quarters = []
            for run in arm_runs:
                last_quarters += run["steps"][-len(run["steps"]) // 4 :]
            means = {}
            for name in SHOWN:
                values = [step[name] for step in last_quarters if name in step]
                if values:
                    means[name] = round(statistics.mean(values), 3)
            print(f"{arm.name}: along the curve", along_curve)
            print("  in the last quarter of the steps", means, flush=True)


if __name__ == "__main__":
    main()
