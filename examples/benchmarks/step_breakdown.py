"""What a generated token costs with every method beside plain GRPO, and where a step spends its time.

    python examples/benchmarks/step_breakdown.py                          # the embedded task `doors`, CPU
    python examples/benchmarks/step_breakdown.py vault --methods tree_grpo sesa
    python examples/benchmarks/step_breakdown.py rare_hop                 # an agent's task: BranPO
    python examples/benchmarks/step_breakdown.py doors --path_cache_tokens 0
    python examples/benchmarks/step_breakdown.py --long_prompts           # 384 tokens, six layers, random weights
    python examples/benchmarks/step_breakdown.py --half_billion           # Qwen2.5-0.5B's shape, random weights, CUDA
    python examples/benchmarks/step_breakdown.py --model smollm2 --prompt_tokens 30 100 400   # a pretrained model

All start from one model, which plain GRPO trained for `--grpo_steps`, and take turns, so that a machine that drifts
slows all: figures are medians over the steps of all rounds, ratios are within a round, with smallest and largest.
Seconds are CPU seconds of the process, on a GPU those of the wall. Trees have `--expansion_width` children per node.

With `--model`, every prompt length has a table. A line below it says how much faster the loss and its gradients are
computed with shared prefixes (eight completions of a prompt), next to the ratio of tokens.

Passes are those of a step without gradients, which sampling needs. "By passes alone" is the ratio if nothing else cost
a method more per token than it costs GRPO; on a GPU, which runs behind, it says nothing and is left out.
"""

import argparse
import copy
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from shared_prefix import seconds_of
from tasks import find_task
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, Qwen2Config

from trl_explore.compare.run import CostCallback, task_trainer
from trl_explore.compare.settings import Arm, Budget
from trl_explore.methods import METHODS
from trl_explore.pretrained.smollm2 import find_pretrained
from trl_explore.rows.layout import pack_rows
from trl_explore.runs.embedded import common_options, task_options
from trl_explore.sampling.generation import language_model
from trl_explore.tasks.tiny_model import build_tokenizer
from trl_explore.tasks.warm_start import warm_start

PARALLEL = {"tree_grpo": "parallel_expansions", "sesa": "parallel_sketches"}
# Of random models: an eighth of a completion for a step, a node and a sketch.
RANDOM = {
    "deep_grpo": lambda length: dict(segmentation="fixed", segment_length=length // 8, max_pivots_per_batch=16),
    "tree_grpo": lambda length: dict(node_length=length // 8),
    "sesa": lambda length: dict(max_sketch_length=length // 8),
    "g2rl": lambda length: {},
}
# Of a pretrained model that was not taught a task: its completions have no lines to cut at.
PRETRAINED = RANDOM | {
    # One round: with the default, a step samples ten times GRPO's tokens.
    "tree_rl": lambda length: dict(num_rounds=1),
    "attn_rl": lambda length: dict(step_length=length // 8),
    "evol_rl": lambda length: dict(correctness="reward", embedding_model="ngrams"),
}
ENDS = dict(eos_token_id=1, pad_token_id=0)
LONG_PROMPTS = Qwen2Config(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=256,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=4,
    **ENDS,
)
HALF_BILLION = Qwen2Config(
    vocab_size=151_936,
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    max_position_embeddings=4096,
    tie_word_embeddings=True,
    **ENDS,
)


def tiny_trainer(task: Any, start: str | Path, arm: Arm, config: Any, **more: Any) -> Any:
    """Return a trainer of the tiny model on a task."""
    return task_trainer(arm, task, start, config, num_train=512, **more)


def random_trainer(shape: Qwen2Config, prompt: str, arm: Arm, config: Any, **more: Any) -> Any:
    """A trainer of random weights, in bfloat16 with LoRA on a GPU. Rewards are a coin per completion."""
    from peft import LoraConfig

    def coin(completion_ids, **kwargs):
        return [float(sum(ids) % 4 == 0) for ids in completion_ids]

    torch.manual_seed(0)
    on_gpu = config.bf16
    shape = copy.deepcopy(shape)  # a trainer writes into it
    model = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16 if on_gpu else torch.float32)
    return METHODS[arm.method].trainer_class(
        model=model.cuda() if on_gpu else model,
        reward_funcs=coin,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": [prompt] * 512}),
        processing_class=build_tokenizer(),
        peft_config=LoraConfig(r=16, target_modules="all-linear") if on_gpu else None,
        **more,
    )


def prompt_of(tokenizer: Any, length: int) -> str:
    """A text of so many tokens."""
    text = "Use 11, 4, 17 to make 24. " * length
    return tokenizer.decode(tokenizer(text).input_ids[:length])


def pretrained_trainer(folder: str, prompt: str, arm: Arm, config: Any, **more: Any) -> Any:
    """A trainer of a pretrained model. The reward is 1 if the sum of the token ids is a multiple of 4."""

    def coin(completion_ids, **kwargs):
        return [float(sum(ids) % 4 == 0) for ids in completion_ids]

    config.model_init_kwargs = {"dtype": "float32"}
    return METHODS[arm.method].trainer_class(
        model=folder,
        reward_funcs=coin,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": [prompt] * 512}),
        **more,
    )


def print_shared_prefixes(folder: str, prompt_length: int, completion_length: int, *, rounds: int, bf16: bool) -> None:
    """Prints the seconds of the loss and its gradients for eight completions of a prompt, plain and packed."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with tempfile.TemporaryDirectory() as output:
        config = METHODS["exploration"].config_class(
            output_dir=output,
            use_cpu=not torch.cuda.is_available(),
            bf16=bf16,
            report_to=[],
            shared_prefix_training="on",
        )
        arm = Arm("Exploration", "exploration")
        trainer = pretrained_trainer(folder, prompt_of(tokenizer, prompt_length), arm, config)
        shared = torch.randint(3, len(tokenizer), (prompt_length,)).tolist()
        rows = [shared + torch.randint(3, len(tokenizer), (completion_length,)).tolist() for _ in range(8)]
        ids = torch.tensor(rows, device=trainer.accelerator.device)
        ones, end = torch.ones_like(ids), slice(prompt_length, None)
        start = slice(None, prompt_length)
        ratio = pack_rows(ids[:, start], ones[:, start], ids[:, end], ones[:, end]).token_ratio
        speedups = []
        for number in range(rounds + 1):
            with trainer.accelerator.autocast():
                plain = seconds_of(trainer, "off", ids, prompt_length)[0]
                packed = seconds_of(trainer, "on", ids, prompt_length)[0]
            if number > 0:  # the first is a warm-up
                speedups.append(plain / packed)
    speedup = statistics.median(speedups)
    print(
        f"shared prefixes, prompt {prompt_length}, completion {completion_length}: {speedup:.2f} times faster "
        f"[{min(speedups):.2f}, {max(speedups):.2f}], token ratio {ratio:.2f}, share of it {speedup / ratio:.2f}"
    )


class Passes:
    """Counts forward passes of a trainer's model without gradients, and their CPU seconds."""

    def __init__(self, trainer: Any) -> None:
        self.number, self.seconds, self._start = 0, 0.0, 0.0
        model = language_model(trainer.model)
        model.register_forward_pre_hook(self._begins)
        model.register_forward_hook(self._ends)

    def _begins(self, *args: Any) -> None:
        self._start = time.process_time()

    def _ends(self, *args: Any) -> None:
        if not torch.is_grad_enabled():
            self.number += 1
            self.seconds += time.process_time() - self._start


def trained(make: Any, arm: Arm, options: dict[str, Any], *, save_to: Path | None = None) -> list[dict[str, float]]:
    """Costs and logs of each step but the first, which is a warm-up."""
    costs = CostCallback(Budget(steps=options["max_steps"]))
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        config = METHODS[arm.method].config_class(output_dir=folder, **{**options, **arm.options})
        trainer = make(arm, config, callbacks=[costs])
        trainer.remove_callback(PrinterCallback)
        costs.count_sampled(trainer)
        passes = Passes(trainer)
        trainer.train()
        if save_to is not None:
            trainer.save_model(str(save_to))
    clock = "seconds" if torch.cuda.is_available() else "cpu_seconds"
    steps = []
    for before, after in zip(costs.history, costs.history[1:], strict=False):
        tokens = after["tokens"] - before["tokens"]
        steps.append({**after, "step": after[clock] - before[clock], "tokens": tokens})
    all_tokens = costs.history[-1]["tokens"]
    for step in steps:
        step |= {"passes": passes.number / len(costs.history), "pass_price": passes.seconds / all_tokens}
    return steps


def arms_of(task: Any, args: argparse.Namespace) -> list[Arm]:
    """GRPO, the methods that suit the task, and those with more in parallel."""
    if args.model is not None:
        own: dict[str, Any] = {name: options(args.completion_tokens) for name, options in PRETRAINED.items()}
    elif task is None:
        own = {name: options(512 if args.half_billion else 64) for name, options in RANDOM.items()}
    else:
        own = {name: row.options(task) for name, row in METHODS.items() if not row.plain}
        own = {name: options for name, options in own.items() if options is not None}
    # As many rows for all, also where an agent's methods have fewer than GRPO.
    arms = [Arm("GRPO", "grpo", own.get("branpo", {}))]
    for name, options in own.items():
        if args.methods and name not in args.methods:
            continue
        options = {**options, **own.get("branpo", {}), "path_cache_tokens": args.path_cache_tokens}
        if name == "tree_grpo":
            options["expansion_width"] = args.expansion_width
        arms.append(Arm(METHODS[name].title, name, options))
        if args.shared_prefixes:
            shared = {**options, "shared_prefix_training": "on"}
            arms.append(Arm(f"{METHODS[name].title}, shared prefixes", name, shared))
        for number in args.parallel if name in PARALLEL and options.get("mode", "two_stage") == "two_stage" else ():
            arms.append(Arm(f"{METHODS[name].title}, {number} parallel", name, {**options, PARALLEL[name]: number}))
    return arms


def report(arms: list[Arm], rounds: list[dict[str, list[dict[str, float]]]]) -> None:
    """Prints a table over methods, then the shares of a step."""
    print(
        "\n| | microseconds per token | times GRPO's | tokens per step | passes | by passes alone | prompt passes | "
        "cache, MB |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    base = [statistics.median(1e6 * s["step"] / s["tokens"] for s in found["GRPO"]) for found in rounds]
    for arm in arms:
        steps = [step for found in rounds for step in found[arm.name]]
        price = {name: [1e6 * s["step"] / s["tokens"] for s in steps] for name, steps in
                 ((i, found[arm.name]) for i, found in enumerate(rounds))}  # fmt: skip
        more = [1e6 * (found[arm.name][0]["pass_price"] - found["GRPO"][0]["pass_price"]) for found in rounds]
        floor = statistics.median(1 + price / whole for price, whole in zip(more, base, strict=True))
        ratios = [statistics.median(price[i]) / base[i] for i in range(len(rounds))]
        spread = f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"
        every = [value for values in price.values() for value in values]
        encoded = [s["tree/encoded_fraction"] for s in steps if "tree/encoded_fraction" in s]
        cache = [s["generation/cache_megabytes"] for s in steps if "generation/cache_megabytes" in s]
        print(
            f"| {arm.name} | {statistics.median(every):.1f} | {spread if arm.name != 'GRPO' else 1} "
            f"| {statistics.median(s['tokens'] for s in steps):,.0f} "
            f"| {statistics.mean(s['passes'] for s in steps):.1f} "
            f"| {'' if torch.cuda.is_available() else f'{floor:.2f}'} "
            f"| {f'{statistics.median(encoded):.3f}' if encoded else ''} "
            f"| {f'{max(cache):.1f}' if cache else ''} |"
        )
    for arm in arms:
        steps = [step for found in rounds for step in found[arm.name]]
        names = sorted({name for step in steps for name in step if name.endswith("_seconds") and "/" in name})
        shares = {n: statistics.median(100 * s.get(n, 0.0) / s["step_time"] for s in steps) for n in names}
        print(f"{arm.name}: percent of a step: " + ", ".join(f"{name} {share:.1f}" for name, share in shares.items()))


def in_turns(make: Any, arms: list[Arm], options: dict[str, Any], args: argparse.Namespace) -> list[dict[str, Any]]:
    """The steps of every arm in every round; within a round, arms take turns."""
    rounds = []
    for number in range(args.rounds):
        own = {
            **options,
            "logging_steps": 1,
            "disable_tqdm": True,
            "max_steps": args.steps,
            "seed": args.seed + number,
        }
        rounds.append({arm.name: trained(make, arm, own) for arm in arms})
    return rounds


def measure_pretrained(args: argparse.Namespace) -> None:
    """Prints a table for every prompt length, with bfloat16 computation and float32 weights."""
    folder = find_pretrained(args.model)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    options = dict(
        num_generations=8,
        per_device_train_batch_size=args.rows,
        max_completion_length=args.completion_tokens,
        learning_rate=1e-6,
        gradient_checkpointing=False,
        use_cpu=not torch.cuda.is_available(),
        bf16=True,
        report_to=[],
        save_strategy="no",
    )
    arms = arms_of(None, args)
    for length in args.prompt_tokens:
        print(f"\nprompts of {length} tokens, {args.rows} rows of at most {args.completion_tokens} new tokens")
        make = partial(pretrained_trainer, folder, prompt_of(tokenizer, length))
        report(arms, in_turns(make, arms, options, args))
        print_shared_prefixes(folder, length, args.completion_tokens, rounds=args.rounds, bf16=True)


def main() -> None:
    """Trains all arms in turn, and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", nargs="?", default="doors")
    parser.add_argument("--long_prompts", action="store_true")
    parser.add_argument("--half_billion", action="store_true")
    parser.add_argument("--model", help="smollm2, or the folder or Hub name of a pretrained model")
    parser.add_argument("--prompt_tokens", nargs="*", type=int, default=[30, 100, 400], help="with --model")
    parser.add_argument("--completion_tokens", type=int, default=32, help="with --model")
    parser.add_argument("--rows", type=int, default=32, help="per step, with --model; 8 for a prompt")
    parser.add_argument("--methods", nargs="*", choices=[name for name, row in METHODS.items() if not row.plain])
    parser.add_argument(
        "--parallel", nargs="*", type=int, default=[], help="also so many expansions, chains of sketches"
    )
    parser.add_argument(
        "--shared_prefixes", action="store_true", help="also every method with `shared_prefix_training='on'`"
    )
    parser.add_argument("--expansion_width", type=int, default=4)
    parser.add_argument("--path_cache_tokens", type=int, default=65536)
    parser.add_argument("--grpo_steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.utils.logging.set_verbosity_error()
    if args.model is not None:
        measure_pretrained(args)
        return
    task = None if args.half_billion or args.long_prompts else find_task(args.task)
    arms = arms_of(task, args)
    with tempfile.TemporaryDirectory() as folder:
        if task is None:
            options: dict[str, Any] = dict(num_generations=8, learning_rate=1e-6, report_to=[], save_strategy="no")
            if args.half_billion:
                make: Any = partial(random_trainer, HALF_BILLION, "1+2=" * 16)
                options |= dict(per_device_train_batch_size=8, gradient_accumulation_steps=8)
                options |= dict(max_completion_length=512, bf16=True)
            else:
                make = partial(random_trainer, LONG_PROMPTS, "1+2=" * 96)
                options |= dict(per_device_train_batch_size=64, max_completion_length=64, gradient_checkpointing=False)
                options |= dict(use_cpu=True, bf16=False)
        else:
            options = {**common_options(task, seed=args.seed), **task_options(task)}
            make = partial(tiny_trainer, task, warm_start(task, seed=args.seed))
            if args.grpo_steps:
                faster = {**options, "learning_rate": 1e-3, "scale_rewards": "none", "max_steps": args.grpo_steps}
                trained(make, arms[0], faster, save_to=Path(folder))
                make = partial(tiny_trainer, task, folder)
        rounds = in_turns(make, arms, options, args)
        report(arms, rounds)
    if torch.cuda.is_available():
        print(f"peak memory of the last run {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
