"""
Can sequential sampling revive a collapsed policy (SESA, sections 2.2 and 5.1)? Offline, on a CPU, in some minutes:

    python examples/sesa_recovery.py --task paths --seed 0

1. Plain GRPO trains a warm-started tiny model until the samples of a prompt agree: pass@16 / pass@1 near 1.
2. From that checkpoint, GRPO and SESA go on side by side, for the same number of generated tokens.
3. Both curves go into one picture and one table.

On `paths` there is one prompt with 20 right answers, and coverage@32 counts how many of them 32 samples still name.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import torch
import transformers
from benchmarks.arms import train_arm
from benchmarks.tasks import find_task
from transformers import TrainerCallback

from trl_explore.compare.plots import learning_curves
from trl_explore.compare.settings import Arm, Budget
from trl_explore.tasks.warm_start import warm_start


class StopWhenCollapsed(TrainerCallback):
    """Ends training at the first evaluation at which samples of a prompt agree, and saves that model."""

    def __init__(self, ratio, folder):
        self.ratio, self.folder, self.step = ratio, folder, None

    def on_log(self, args, state, control, logs=None, **kwargs):
        one, many = (logs or {}).get("eval/pass_at_1"), (logs or {}).get("eval/pass_at_16")
        if self.step is None and one and many / one < self.ratio:
            self.step = state.global_step
            control.should_training_stop = True

    def on_train_end(self, args, state, control, model=None, processing_class=None, **kwargs):
        model.save_pretrained(self.folder)
        processing_class.save_pretrained(self.folder)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", default="paths")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--collapse_ratio", type=float, default=1.1, help="pass@16 / pass@1 that counts as collapsed")
    parser.add_argument("--collapse_tokens", type=float, default=3e6, help="most tokens until then")
    parser.add_argument("--tokens", type=float, default=3e5, help="tokens of each arm afterwards")
    parser.add_argument("--learning_rate", type=float, default=1e-4)
    parser.add_argument("--evaluate_every", type=int, default=20)
    parser.add_argument("--output", default="out/sesa_recovery")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    task = find_task(args.task)
    one_prompt = args.task == "paths"
    output = Path(args.output)
    output.mkdir(parents=True, exist_ok=True)
    metrics = ["eval/pass_at_1", "eval/pass_at_16"] + (["eval/coverage_at_32"] if one_prompt else [])

    def train(arm, start, tokens, folder, callbacks=()):
        return train_arm(
            arm,
            task,
            start,
            output_dir=output / folder,
            seed=args.seed,
            budget=Budget(tokens=tokens),
            evaluate_every=args.evaluate_every,
            num_eval=8 if one_prompt else 128,
            num_samples=32 if one_prompt else 16,
            k=(1, 16),
            evaluation_options=dict(coverage_k=(32,), answer_fn=str.strip) if one_prompt else None,
            options=dict(learning_rate=args.learning_rate, num_generations=16),
            callbacks=callbacks,
        )

    collapsed = output / "collapsed"
    stop = StopWhenCollapsed(args.collapse_ratio, collapsed)
    before = train(
        Arm("GRPO until collapse", "grpo"), warm_start(task, seed=args.seed), args.collapse_tokens, "a", [stop]
    )
    if stop.step is None:
        print(f"pass@16 / pass@1 did not fall below {args.collapse_ratio}: what follows starts from a living policy")
    arms = [Arm("GRPO goes on", "grpo"), Arm("SESA takes over", "sesa", task.sesa_options)]
    runs = [before] + [train(arm, collapsed, args.tokens, arm.method) for arm in arms]

    last = before.points[-1]
    for run in runs[1:]:  # one time axis for all three
        run.points = [
            {**p, "tokens": p["tokens"] + last["tokens"], "step": p["step"] + last["step"]} for p in run.points
        ]
    (output / "runs.json").write_text(json.dumps([asdict(run) for run in runs]))
    print(f"{'':22s} tokens    " + "  ".join(f"{name.removeprefix('eval/'):>14s}" for name in metrics) + "   ratio")
    for run in runs:
        for point in (run.points[0], run.points[-1]):
            values = "  ".join(f"{100 * point[name]:14.1f}" for name in metrics)
            ratio = point["eval/pass_at_16"] / max(point["eval/pass_at_1"], 1e-9)
            print(f"{run.arm:22s} {point['tokens']:9,.0f} {values}  {ratio:6.2f}")
    try:
        path = learning_curves(
            [asdict(run) for run in runs], output / "recovery.png", metrics=metrics, costs=("tokens",),
            title=f"recovery from collapse on {task.name}",
        )  # fmt: skip
    except ImportError:
        path = "no picture: pip install matplotlib"
    print(path)


if __name__ == "__main__":
    main()
