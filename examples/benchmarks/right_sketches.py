"""What a sketch for every row costs, and how that depends on how many sketches are right.

    python examples/benchmarks/right_sketches.py --accepted 1 4 8

In `plans`, an item understands some of sixteen dialects, and a sketch names one. Here it understands 1, 4 or 8 of them
and all else stays: the same items, demonstrations and settings. SESA with a sketch for every row, or with sketches for
half of them, beside GRPO at equal generated tokens, with 95 % t-intervals over seeds. Where one sketch is right, at
most one of eight rows with different sketches can be; if that is the harm, it goes away with more right sketches.
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
    parser.add_argument("--accepted", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--tokens", type=float, default=1.2e5)
    parser.add_argument("--learning_rate", type=float, default=6e-4)
    parser.add_argument("--evaluate_every", type=int, default=20)
    parser.add_argument("--num_eval", type=int, default=128)
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
            own = [run for run in runs if run["arm"] == arm.name]
            along = {
                name: statistics.mean(mean_along(r["points"], "tokens", args.tokens, key) for r in own)
                for name, key in METRICS.items()
            }
            last = [step for run in own for step in run["steps"][-len(run["steps"]) // 4 :]]
            shares = {
                name: statistics.mean(s[name] for s in last if name in s)
                for name in SHOWN
                if any(name in s for s in last)
            }
            print(f"{arm.name}: along the curve", {name: round(100 * value, 1) for name, value in along.items()})
            print(
                "  in the last quarter of the steps",
                {name: round(value, 3) for name, value in shares.items()},
                flush=True,
            )


if __name__ == "__main__":
    main()
