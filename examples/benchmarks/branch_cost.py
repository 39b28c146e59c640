"""What contrastive branches cost: seconds of a step for rollouts, log-probabilities and updates (the paper's Table 8).

    python examples/benchmarks/branch_cost.py
    python examples/benchmarks/branch_cost.py --prompts 16 --steps 12 --rounds 5

GRPO rolls out 8 trajectories per prompt, BranPO 4 and their branches, on the multi-hop questions of the embedded task
with its warm-started tiny model and a KL term. Rounds of the two alternate in one process, so that a machine that
drifts slows both; figures are means over the steps of all rounds but the first of each, ratios are per pair of rounds.
"""

import argparse
import statistics
import tempfile
import time
from collections import defaultdict

import torch
import transformers
from transformers import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from trl_explore.runs.embedded import common_options
from trl_explore.tasks.multihop import MULTI_HOP
from trl_explore.tasks.warm_start import warm_start
from trl_explore.trainers import BranPOConfig, BranPOTrainer

PARTS = ("rollout", "log-probabilities", "update", "step")


class Stopwatch:
    """Seconds per part and step; a part inside another one counts for itself only."""

    def __init__(self, trainer):
        self.steps, self.parts, self.open = [], defaultdict(float), []
        # Where the old and reference log-probabilities come from, no gradient is wanted.
        self.time(trainer, "_get_per_token_logps_and_entropies", "log-probabilities", torch.is_grad_enabled)
        self.time(trainer, "_generate_single_turn", "rollout")
        self.time(trainer, "_tool_call_loop", "rollout")
        if isinstance(trainer, BranPOTrainer):
            self.time(trainer.forks, "sample_branches", "rollout")
        self.time(trainer, "_generate_and_score_completions", "other")
        self.time(trainer, "training_step", "update")

    def time(self, trainer, method, part, skipped=lambda: False):
        function = getattr(trainer, method)

        def timed(*args, **kwargs):
            if skipped():
                return function(*args, **kwargs)
            inner = [0.0]
            self.open.append(inner)
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds = time.perf_counter() - start
                self.open.pop()
                self.parts[part] += seconds - inner[0]
                if self.open:
                    self.open[-1][0] += seconds
                else:
                    self.steps.append({**self.parts, "step": sum(self.parts.values())})
                    self.parts.clear()

        setattr(trainer, method, timed)


def run(trainer_class, config_class, options, args):
    start = warm_start(MULTI_HOP, seed=args.seed)
    with tempfile.TemporaryDirectory() as folder:
        common = common_options(MULTI_HOP, seed=args.seed)
        common |= dict(output_dir=folder, beta=0.001, max_tool_calling_iterations=MULTI_HOP.max_searches)
        rows = args.prompts * options["num_generations"]
        trainer = trainer_class(
            model=str(start),
            reward_funcs=MULTI_HOP.reward,
            args=config_class(
                **{**common, **options, "per_device_train_batch_size": rows, "max_steps": args.steps + 1}
            ),
            train_dataset=MULTI_HOP.build_dataset(2000, seed=args.seed),
            environment_factory=MULTI_HOP.environment_factory,
        )
        trainer.remove_callback(PrinterCallback)
        watch = Stopwatch(trainer)
        trainer.train()
    return watch.steps[1:], [log for log in trainer.state.log_history if "step_time" in log][1:]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    ways = {
        "GRPO": (GRPOTrainer, GRPOConfig, {"num_generations": 8}),
        "BranPO": (BranPOTrainer, BranPOConfig, {"num_generations": 4}),
    }
    steps, logs, ratios = {name: [] for name in ways}, {name: [] for name in ways}, []
    for _ in range(args.rounds):
        means = {}
        for name, way in ways.items():
            timed, logged = run(*way, args)
            means[name] = statistics.fmean(step["step"] for step in timed)
            steps[name] += timed
            logs[name] += logged
        ratios.append(means["BranPO"] / means["GRPO"])
    print("seconds   " + "".join(f"{part:>18s}" for part in PARTS))
    for name in ways:
        print(f"{name:10s}" + "".join(f"{statistics.fmean(s.get(p, 0.0) for s in steps[name]):18.3f}" for p in PARTS))
    print(
        f"a step of BranPO takes {statistics.median(ratios):.2f} times as long ({min(ratios):.2f}-{max(ratios):.2f})"
    )
    for key in ("branch/contrastive_fraction", "branch/redundant_fraction", "branch/depth", "branch/token_ratio"):
        values = [log[key] for log in logs["BranPO"] if key in log]
        print(f"{key:30s}{statistics.fmean(values):8.3f}")


if __name__ == "__main__":
    main()
