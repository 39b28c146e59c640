"""
An agent that walks over a frozen lake: GRPO beside SESA's agent mode. Offline, on a CPU:

    python examples/sesa_agent.py --tokens 3e5 --seeds 0 1 2

A tiny model learns from demonstrations how to play, with blind spots for some holes. Both trainers get the same
environments, and as many generated tokens as asked for. Prints the share of held-out games won (sampled at temperature
1) at equal tokens, CPU seconds and optimiser steps, the mean over seeds with a 95 % t-interval.
"""

import argparse
from functools import cache
from pathlib import Path

import torch
import transformers
from benchmarks.arms import report, train_arm, train_missing
from benchmarks.tasks import LAKE_AGENT

from trl_explore.compare.settings import Arm, Budget
from trl_explore.tasks.warm_start import warm_start


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--tokens", type=float, default=3e5)
    parser.add_argument("--arms", nargs="+", default=None, help="names of the arms to run; default: all")
    parser.add_argument("--beta", type=float, default=0.0, help="KL coefficient of all arms")
    parser.add_argument("--learning_rate", type=float, default=3e-4)
    parser.add_argument("--branch_depth", type=int, default=2)
    parser.add_argument("--num_actions", type=int, default=3)
    parser.add_argument("--evaluate_every", type=int, default=20)
    parser.add_argument("--output", default="out/sesa_agent")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    agent = {**LAKE_AGENT.sesa_options, "branch_depth": args.branch_depth, "num_actions": args.num_actions}
    # Beyond the paper: unlikely moves that turn out wrong pull a policy apart, unless they are weighted down.
    weighted = dict(off_policy_correction=True, off_policy_scope="negative", off_policy_cap=1.0)
    arms = [
        Arm("GRPO", "grpo"),
        Arm("SESA agent", "sesa", agent),
        Arm("SESA agent, weighted", "sesa", {**agent, **weighted}),
    ]
    arms = [arm for arm in arms if args.arms is None or arm.name in args.arms]
    start = cache(lambda seed: warm_start(LAKE_AGENT, seed=seed))
    options = dict(learning_rate=args.learning_rate, beta=args.beta, per_device_train_batch_size=64)
    runs = train_missing(
        arms,
        args.seeds,
        Path(args.output) / "runs.json",
        lambda arm, seed: train_arm(
            arm,
            LAKE_AGENT,
            start(seed),
            output_dir=f"{args.output}/{arm.name}-{seed}",
            seed=seed,
            budget=Budget(tokens=args.tokens),
            evaluate_every=args.evaluate_every,
            num_eval=64,
            options={**options, "max_tool_calling_iterations": LAKE_AGENT.max_turns},
        ),
        shown=("agent/", "sketch/", "cpu_"),
    )
    report(runs, "success", args.output)


if __name__ == "__main__":
    main()
