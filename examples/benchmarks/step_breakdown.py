"""Where a step of DEEP-GRPO or of tree search spends its time, beside plain GRPO on the same model and data.

    python examples/benchmarks/step_breakdown.py                      # the quick-start's tiny model, CPU
    python examples/benchmarks/step_breakdown.py --method tree_grpo
    python examples/benchmarks/step_breakdown.py --half_billion       # Qwen2.5-0.5B's shape with random weights, CUDA

Rounds of the two trainers alternate in one process, so that a machine that drifts slows both; figures are medians over
the steps of all rounds, ratios are per pair of rounds. `own work` is what the method itself does (segmenting,
estimator, pivots, splicing rows; selecting, expanding, backing up), in percent of the step.
"""

import argparse
import statistics
import tempfile
import time

import torch
import transformers
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from trl_explore.compare.tasks import common_options
from trl_explore.tasks import get_task
from trl_explore.tasks.tiny_model import build_tokenizer
from trl_explore.tasks.warm_start import warm_start
from trl_explore.trainers import DeepGRPOConfig, DeepGRPOTrainer, TreeGRPOConfig, TreeGRPOTrainer

LABELS = {
    "deep_grpo": {
        "main generation": "generation/main_seconds",
        "branch generation": "generation/extra_seconds",
        "own work": "pivots/own_seconds",
    },
    "tree_grpo": {
        "sampling nodes": "tree/sampling_seconds",
        "scoring leaves": "tree/scoring_seconds",
        "own work": "tree/own_seconds",
    },
}
TRAINERS = {"deep_grpo": (DeepGRPOTrainer, DeepGRPOConfig), "tree_grpo": (TreeGRPOTrainer, TreeGRPOConfig)}


class StepClock(TrainerCallback):
    """Wall seconds of each optimiser step; the first of a run is a warm-up."""

    def __init__(self):
        self.seconds = []

    def on_step_begin(self, args, state, control, **kwargs):
        self.start = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self.start)


def tiny_setting(args):
    """The quick-start: warm-started tiny model, 16 prompts x 8, pivots as the quick-start has them."""
    task = get_task("chain")
    start = warm_start(task, seed=args.seed)
    config = common_options(task, seed=args.seed)
    method = {
        "deep_grpo": dict(max_pivots_per_batch=16, segment_delimiters=[";"]),
        "tree_grpo": dict(node_length=7),
    }[args.method]
    method["sampling_batch_size"] = args.sampling_batch_size
    make = lambda: AutoModelForCausalLM.from_pretrained(start)  # noqa: E731
    return (
        make,
        AutoTokenizer.from_pretrained(start),
        task.build_dataset(2000, seed=1),
        task.reward,
        config,
        method,
        None,
    )


def half_billion_setting(args):
    """Qwen2.5-0.5B's shape, bf16, LoRA, 8 prompts x 8 of up to 512 tokens. Rewards are a coin per completion."""
    from peft import LoraConfig

    shape = dict(vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24)
    heads = dict(num_attention_heads=14, num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True)
    model_config = Qwen2Config(**shape, **heads, eos_token_id=1, pad_token_id=0)

    def make():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(model_config, dtype=torch.bfloat16).cuda()

    def coin(completion_ids, **kwargs):
        return [float(sum(ids) % 4 == 0) for ids in completion_ids]

    tokenizer = build_tokenizer()
    data = Dataset.from_dict({"prompt": ["1+2=" * 16] * 512})
    config = dict(
        per_device_train_batch_size=8,
        gradient_accumulation_steps=8,
        num_generations=8,
        max_completion_length=512,
        learning_rate=1e-6,
        bf16=True,
        report_to=[],
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        seed=args.seed,
    )
    method = {
        "deep_grpo": dict(segmentation="fixed", segment_length=50, max_pivots_per_batch=args.max_pivots),
        "tree_grpo": dict(node_length=64),
    }[args.method]
    method["sampling_batch_size"] = args.sampling_batch_size
    return make, tokenizer, data, coin, config, method, LoraConfig(r=16, target_modules="all-linear")


def run(trainer_class, config_class, setting, options, steps):
    make, tokenizer, data, reward, config, _, peft_config = setting
    clock = StepClock()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_class(
            model=make(),
            reward_funcs=reward,
            args=config_class(output_dir=folder, **{**config, **options, "max_steps": steps}),
            train_dataset=data,
            processing_class=tokenizer,
            peft_config=peft_config,
            callbacks=[clock],
        )
        trainer.train()
    logs = [entry for entry in trainer.state.log_history if "step_time" in entry and "train_runtime" not in entry]
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else float("nan")
    return clock.seconds[1:], logs[1:], peak


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--half_billion", action="store_true")
    parser.add_argument("--method", choices=TRAINERS, default="deep_grpo")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--max_pivots", type=int, default=16)
    parser.add_argument("--sampling_batch_size", type=int, default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.utils.logging.set_verbosity_error()
    setting = (half_billion_setting if args.half_billion else tiny_setting)(args)
    seconds, logs, peaks = {"grpo": [], "method": []}, [], {}
    ratios = []
    for _ in range(args.rounds):
        plain, _, peaks["grpo"] = run(GRPOTrainer, GRPOConfig, setting, {}, args.steps)
        ours, our_logs, peaks["method"] = run(*TRAINERS[args.method], setting, setting[5], args.steps)
        seconds["grpo"] += plain
        seconds["method"] += ours
        logs += our_logs
        ratios.append(statistics.median(ours) / statistics.median(plain))

    step = statistics.median(seconds["method"])
    print(f"\nstep GRPO            {statistics.median(seconds['grpo']):8.3f} s   (n={len(seconds['grpo'])})")
    spread = f"{min(ratios):.2f}-{max(ratios):.2f}"
    print(f"step {args.method:15s} {step:8.3f} s   ratio {statistics.median(ratios):.2f} ({spread})")
    for label, key in LABELS[args.method].items():
        value = statistics.median([entry.get(key, 0.0) for entry in logs])
        print(f"  {label:18s} {value:8.3f} s   {100 * value / step:5.1f} % of the step")
    own = LABELS[args.method]["own work"]
    shares = [100 * entry[own] / entry["step_time"] for entry in logs]
    print(f"  own work / step      median {statistics.median(shares):.2f} %, largest {max(shares):.2f} %")
    counted = [key for key in logs[0] if key.startswith(own.split("/")[0]) and "seconds" not in key]
    for key in counted:
        values = [entry[key] for entry in logs if key in entry]
        print(f"  {key:28s} {statistics.median(values):8.3f}")
    if torch.cuda.is_available():
        print(f"peak memory          GRPO {peaks['grpo']:.2f} GiB, {args.method} {peaks['method']:.2f} GiB")


if __name__ == "__main__":
    main()
