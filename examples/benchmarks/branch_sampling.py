"""Do contrastive branches help an agent whose failures lie at the tail? BranPO beside GRPO, offline on a CPU.

    python examples/benchmarks/branch_sampling.py --seeds 0 1 2 --tokens 6e5

A tiny model learns from demonstrations how to answer questions over several searches; they end badly in known places.
As in the paper, GRPO rolls out 8 trajectories per prompt and BranPO 4 with branches. Controls: GRPO with BranPO's 4,
no redundant step masking, a fixed schedule (one response back, whatever the difficulty). Prints the share of held-out
questions answered right (sampled at temperature 1) at equal generated tokens, CPU seconds and optimiser steps, the
mean over seeds with a 95 % t-interval, differences to GRPO paired by seed.
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
FIXED = {"num_branches_solved": 2, "branch_depth_hard": 1, "branch_depth": 1, "redundancy_tries": 0}
ARMS = [
    Arm("GRPO", "grpo"),
    Arm("BranPO", "branpo", FEW),
    Arm("GRPO, 4 rollouts", "grpo", FEW),
    Arm("BranPO, no masking", "branpo", {**FEW, "redundancy_tries": 0}),
    Arm("BranPO, fixed schedule", "branpo", {**FEW, **FIXED}),
]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--tokens", type=float, default=6e5)
    parser.add_argument("--arms", nargs="+", default=None, help="names of the arms to run; default: all")
    parser.add_argument("--beta", type=float, default=0.0, help="KL coefficient of all arms")
    parser.add_argument("--learning_rate", type=float, default=3e-4)
    parser.add_argument(
        "--right",
        type=float,
        nargs="+",
        default=MULTI_HOP.right_probabilities,
        help="probabilities of demonstrations to end well, dealt out over the relations that can come last",
    )
    parser.add_argument("--prompts", type=int, default=8, help="prompts per step")
    parser.add_argument("--evaluate_every", type=int, default=20)
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
