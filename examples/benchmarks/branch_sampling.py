"""Compare BranPO with GRPO for an agent that mostly fails at the end of its trajectories, offline on a CPU.

    python examples/benchmarks/branch_sampling.py --seeds 0 1 2 --tokens 6e5

The task is to answer questions with several searches. A tiny model first learns from demonstrations, which search well
but often end with a wrong answer. As in the paper, GRPO samples 8 trajectories per prompt, and BranPO samples 4 and
branches from them. There are three controls:

- GRPO with 4 trajectories per prompt
- BranPO without the masking of redundant steps
- BranPO with a fixed schedule: every branch starts before the last response, for easy and for hard prompts

The tables have the share of right answers to held-out questions, sampled at temperature 1. The arms are compared at
equal generated tokens, CPU seconds and optimizer steps: means over the seeds, and differences to GRPO paired by seed,
with 95 % t-intervals.
"""

import argparse
import dataclasses
from functools import cache
from pathlib import Path

import torch
import transformers
from arms import report, train_arm, train_missing

from trl_explore.compare.settings import Arm, Budget
from trl_explore.tasks.multihop import MULTI_HOP
from trl_explore.tasks.warm_start import warm_start

FEW = {"num_generations": 4}
# The same number and depth of branches for every accuracy of a group.
FIXED = {"num_branches_solved": 2, "branch_depth_hard": 1, "branch_depth": 1, "redundancy_tries": 0}
ARMS = [
    Arm("GRPO", "grpo"),
    Arm("BranPO", "branpo", FEW),
    Arm("GRPO, 4 rollouts", "grpo", FEW),
    Arm("BranPO, no masking", "branpo", {**FEW, "redundancy_tries": 0}),
    Arm("BranPO, fixed schedule", "branpo", {**FEW, **FIXED}),
]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--tokens", type=float, default=6e5, help="generated tokens of every run")
    parser.add_argument("--arms", nargs="+", default=None, help="names of the arms to run; default: all")
    parser.add_argument("--beta", type=float, default=0.0, help="KL coefficient of all arms")
    parser.add_argument("--learning_rate", type=float, default=3e-4)
    parser.add_argument(
        "--right",
        type=float,
        nargs="+",
        default=MULTI_HOP.right_probabilities,
        help="probabilities that a demonstration ends with the right answer; the last relations of a question take "
        "these values one after the other",
    )
    parser.add_argument("--prompts", type=int, default=8, help="prompts per step")
    parser.add_argument("--evaluate_every", type=int, default=20, help="optimizer steps between evaluations")
    parser.add_argument("--output", default="out/branch_sampling")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    arms = [arm for arm in ARMS if args.arms is None or arm.name in args.arms]
    task = dataclasses.replace(MULTI_HOP, right_probabilities=tuple(args.right))
    start = cache(lambda seed: warm_start(task, seed=seed))

    def train(arm, seed):
        rows = args.prompts * arm.options.get("num_generations", 8)
        options = dict(learning_rate=args.learning_rate, beta=args.beta, per_device_train_batch_size=rows)
        return train_arm(
            arm,
            task,
            start(seed),
            output_dir=f"{args.output}/{arm.name}-{seed}",
            seed=seed,
            budget=Budget(tokens=args.tokens),
            evaluate_every=args.evaluate_every,
            num_eval=128,
            options={**options, "max_tool_calling_iterations": task.max_searches},
        )

    runs = train_missing(arms, args.seeds, Path(args.output) / "runs.json", train, shown=("agent/", "branch/", "cpu_"))
    report(runs, "right answers", args.output)


if __name__ == "__main__":
    main()
