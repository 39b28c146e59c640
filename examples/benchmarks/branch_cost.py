"""Measure the seconds of a training step of BranPO, divided by the seconds of a step of GRPO (Table 8 of the paper).

    python examples/benchmarks/branch_cost.py
    python examples/benchmarks/branch_cost.py --prompts 16 --steps 12 --rounds 5

Both trainers answer the multi-hop questions of the embedded task with its warm-started tiny model and a KL term. GRPO
samples 8 trajectories per prompt. BranPO samples 4, and branches from them. The trainers alternate in one process, so
that a slowdown of the machine affects both. The table has the mean seconds of rollout, log-probabilities and update.
The first step of every round warms up and is left out. Below the table are the ratio (median, minimum and maximum over
the rounds) and the means of BranPO's metrics.
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
TRAINERS = {
    "GRPO": (GRPOTrainer, GRPOConfig, {"num_generations": 8}),
    "BranPO": (BranPOTrainer, BranPOConfig, {"num_generations": 4}),
}
METRICS = ("branch/contrastive_fraction", "branch/redundant_fraction", "branch/depth", "branch/token_ratio")


class Stopwatch:
    """
    Measure the seconds of each part of every training step.

    If a part calls another part, the seconds of the inner part do not count for the outer part.

    Args:
        trainer ([`~trl.GRPOTrainer`]):
            The trainer. Some of its methods are replaced by methods that also measure their time.
    """

    def __init__(self, trainer):
        self.steps = []  # per finished step, seconds by part
        self.parts = defaultdict(float)  # seconds by part of the current step
        self.inner_seconds = []  # for each running part, from the outermost: seconds of the parts that it has called
        # The loss calls this method with gradients. These calls belong to the update. The calls without gradients
        # compute the old and the reference log-probabilities.
        self.time(trainer, "_get_per_token_logps_and_entropies", "log-probabilities", is_skipped=torch.is_grad_enabled)
        self.time(trainer, "_generate_single_turn", "rollout")
        self.time(trainer, "_tool_call_loop", "rollout")
        if isinstance(trainer, BranPOTrainer):
            self.time(trainer.forks, "sample_branches", "rollout")
        self.time(trainer, "_generate_and_score_completions", "other")
        self.time(trainer, "training_step", "update")

    def time(self, owner, method, part, is_skipped=lambda: False):
        """Measure the calls of a method of `owner` as a part, except for calls during which `is_skipped` is true."""
        function = getattr(owner, method)

        def timed(*args, **kwargs):
            if is_skipped():
                return function(*args, **kwargs)
            self.inner_seconds.append(0.0)
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds = time.perf_counter() - start
                self.parts[part] += seconds - self.inner_seconds.pop()
                if self.inner_seconds:
                    self.inner_seconds[-1] += seconds
                else:  # the outermost part is over, and so is the step
                    self.steps.append({**self.parts, "step": sum(self.parts.values())})
                    self.parts.clear()

        setattr(owner, method, timed)


def run(trainer_class, config_class, options, args):
    """Train one trainer. Return the seconds by part and TRL's logs of every step except the first."""
    start = warm_start(MULTI_HOP, seed=args.seed)
    with tempfile.TemporaryDirectory() as folder:
        fields = common_options(MULTI_HOP, seed=args.seed)
        fields |= dict(output_dir=folder, beta=0.001, max_tool_calling_iterations=MULTI_HOP.max_searches)
        fields |= options
        fields["per_device_train_batch_size"] = args.prompts * options["num_generations"]
        fields["max_steps"] = args.steps + 1
        trainer = trainer_class(
            model=str(start),
            reward_funcs=MULTI_HOP.reward,
            args=config_class(**fields),
            train_dataset=MULTI_HOP.build_dataset(2000, seed=args.seed),
            environment_factory=MULTI_HOP.environment_factory,
        )
        trainer.remove_callback(PrinterCallback)
        watch = Stopwatch(trainer)
        trainer.train()
    logs = [log for log in trainer.state.log_history if "step_time" in log]
    return watch.steps[1:], logs[1:]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=16, help="prompts per step")
    parser.add_argument("--steps", type=int, default=8, help="measured steps of each trainer in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    steps, logs = {name: [] for name in TRAINERS}, {name: [] for name in TRAINERS}
    ratios = []
    for _ in range(args.rounds):
        means = {}
        for name, (trainer_class, config_class, options) in TRAINERS.items():
            timed, logged = run(trainer_class, config_class, options, args)
            means[name] = statistics.fmean(step["step"] for step in timed)
            steps[name] += timed
            logs[name] += logged
        ratios.append(means["BranPO"] / means["GRPO"])
    print("seconds   " + "".join(f"{part:>18s}" for part in PARTS))
    for name in TRAINERS:
        line = f"{name:10s}"
        for part in PARTS:
            seconds = statistics.fmean(step.get(part, 0.0) for step in steps[name])
            line += f"{seconds:18.3f}"
        print(line)
    print(
        f"a step of BranPO takes {statistics.median(ratios):.2f} times as long ({min(ratios):.2f}-{max(ratios):.2f})"
    )
    for metric in METRICS:
        values = [log[metric] for log in logs["BranPO"] if metric in log]
        mean = f"{statistics.fmean(values):.3f}" if values else "-"  # without a contrastive branch, there is no depth
        print(f"{metric:30s}{mean:>8s}")


if __name__ == "__main__":
    main()
