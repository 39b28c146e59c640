"""Measure the cost of a generated token with every method relative to GRPO, and the parts of a training step.

    python examples/benchmarks/step_breakdown.py                          # the embedded task `doors`, CPU
    python examples/benchmarks/step_breakdown.py vault --methods tree_grpo sesa
    python examples/benchmarks/step_breakdown.py rare_hop                 # a task for agents: BranPO
    python examples/benchmarks/step_breakdown.py doors --path_cache_tokens 0
    python examples/benchmarks/step_breakdown.py --long_prompts           # 384 tokens, six layers, random weights
    python examples/benchmarks/step_breakdown.py --half_billion           # Qwen2.5-0.5B's shape, random weights, CUDA
    python examples/benchmarks/step_breakdown.py --model smollm2 --prompt_tokens 30 100 400   # a pretrained model

All methods start from one model, which GRPO has trained for `--grpo_steps` steps. They alternate in one process, so
that a slowdown of the machine affects all of them. Seconds are CPU seconds of the process, or on a GPU wall seconds.

Columns of the table:

- `microseconds per token`: median over the steps of all rounds.
- `times GRPO's`: ratio to GRPO in the same round. Median over the rounds, with the smallest and the largest.
- `tokens per step`: generated tokens, median over the steps.
- `passes`: forward passes without gradients per step. Sampling needs most of them.
- `by passes alone`: ratio to GRPO if only the time of these forward passes differed from GRPO's. Empty on a GPU, which
  works asynchronously, so that the time of a single pass is not known.
- `prompt passes`: for tree search, number of encoded prefix tokens divided by the number of prefix tokens of all rows.
- `cache, MB`: largest size of the kept keys and values.

The lines below the table have the parts of a step, in percent. With `--model`, there is a table for every prompt
length. The line below it compares the time of the log-probabilities of eight completions of a prompt and their
gradients, with and without `shared_prefix_training`. The `token ratio` is the number of tokens of the rows divided by
the number of computed tokens.
"""

import argparse
import copy
import itertools
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from shared_prefix import measure
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

# Fields that `--parallel` sets.
PARALLEL = {"tree_grpo": "parallel_expansions", "sesa": "parallel_sketches"}
# Options by method for a model with random weights, as functions of the maximum completion length. A segment, a node
# and a sketch have an eighth of this length.
RANDOM = {
    "deep_grpo": lambda length: dict(segmentation="fixed", segment_length=length // 8, max_pivots_per_batch=16),
    "tree_grpo": lambda length: dict(node_length=length // 8),
    "sesa": lambda length: dict(max_sketch_length=length // 8),
    "g2rl": lambda length: {},
}
# The same for a pretrained model. Steps have a fixed length, because the model was not trained to write an answer in
# lines.
PRETRAINED = RANDOM | {
    # With the default number of rounds, a step samples ten times the tokens of GRPO.
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


def coin(completion_ids, **kwargs):
    """Return a reward per completion: 1 if the sum of its token ids is a multiple of 4, otherwise 0."""
    return [float(sum(ids) % 4 == 0) for ids in completion_ids]


def tiny_trainer(task: Any, start: str | Path, arm: Arm, config: Any, **more: Any) -> Any:
    """Return a trainer of the tiny model in the folder `start` on a task."""
    return task_trainer(arm, task, start, config, num_train=512, **more)


def random_trainer(shape: Qwen2Config, prompt: str, arm: Arm, config: Any, **more: Any) -> Any:
    """Return a trainer of a model with random weights: in bfloat16 with LoRA on a GPU, in float32 on a CPU."""
    from peft import LoraConfig

    torch.manual_seed(0)
    on_gpu = config.bf16
    shape = copy.deepcopy(shape)  # the trainer changes the model's configuration
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
    """Return a text of `length` tokens."""
    text = "Use 11, 4, 17 to make 24. " * length
    return tokenizer.decode(tokenizer(text).input_ids[:length])


def pretrained_trainer(folder: str, prompt: str, arm: Arm, config: Any, **more: Any) -> Any:
    """Return a trainer of a pretrained model with float32 weights."""
    config.model_init_kwargs = {"dtype": "float32"}
    return METHODS[arm.method].trainer_class(
        model=folder,
        reward_funcs=coin,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": [prompt] * 512}),
        **more,
    )


def print_shared_prefixes(folder: str, prompt_length: int, completion_length: int, *, rounds: int, bf16: bool) -> None:
    """Print how much faster the log-probabilities of eight completions of a prompt and their gradients are computed if
    the prompt is computed once."""
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
        ones = torch.ones_like(ids)
        prompt_ids, prompt_mask = ids[:, :prompt_length], ones[:, :prompt_length]
        completion_ids, completion_mask = ids[:, prompt_length:], ones[:, prompt_length:]
        ratio = pack_rows(prompt_ids, prompt_mask, completion_ids, completion_mask).token_ratio
        speedups = []
        for number in range(rounds + 1):
            with trainer.accelerator.autocast():
                plain = measure(trainer, "off", ids, prompt_length)
                packed = measure(trainer, "on", ids, prompt_length)
            if number > 0:  # the first round warms up
                speedups.append(plain.seconds / packed.seconds)
    speedup = statistics.median(speedups)
    print(
        f"shared prefixes, prompt {prompt_length}, completion {completion_length}: {speedup:.2f} times faster "
        f"[{min(speedups):.2f}, {max(speedups):.2f}], token ratio {ratio:.2f}, share of it {speedup / ratio:.2f}"
    )


class Passes:
    """Count the forward passes of a trainer's model without gradients, and their CPU seconds."""

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
    """
    Train one arm.

    Args:
        make (`Callable`):
            Function of an arm, a configuration and `callbacks` that returns a trainer.
        arm ([`~trl_explore.compare.settings.Arm`]):
            The arm.
        options (`dict`):
            Configuration fields. The options of the arm override them.
        save_to (`Path`, *optional*):
            Folder in which to save the trained model.

    Returns:
        `list[dict]`: For each step except the first, which warms up, its logs and these values: `step`, the seconds of
        the step; `tokens`, the tokens generated in the step; `passes`, the mean number of forward passes without
        gradients per step of the run; `pass_price`, their CPU seconds per generated token of the run.
    """
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
    for before, after in itertools.pairwise(costs.history):
        tokens = after["tokens"] - before["tokens"]
        steps.append({**after, "step": after[clock] - before[clock], "tokens": tokens})
    all_tokens = costs.history[-1]["tokens"]
    for step in steps:
        step |= {"passes": passes.number / len(costs.history), "pass_price": passes.seconds / all_tokens}
    return steps


def arms_of(task: Any, args: argparse.Namespace) -> list[Arm]:
    """Return the arms: GRPO, every method that suits the task, and the variants of methods that the flags ask for."""
    by_method: dict[str, Any] = {}
    if args.model is not None:
        for name, options_for in PRETRAINED.items():
            by_method[name] = options_for(args.completion_tokens)
    elif task is None:
        for name, options_for in RANDOM.items():
            by_method[name] = options_for(512 if args.half_billion else 64)
    else:
        for name, row in METHODS.items():
            suitable = None if row.plain else row.options(task)
            if suitable is not None:
                by_method[name] = suitable
    # On a task for agents, BranPO samples fewer rows than GRPO does by default. All arms get its number of rows.
    agent_options = by_method.get("branpo", {})
    arms = [Arm("GRPO", "grpo", agent_options)]
    for name, method_options in by_method.items():
        if args.methods and name not in args.methods:
            continue
        options = {**method_options, **agent_options, "path_cache_tokens": args.path_cache_tokens}
        if name == "tree_grpo":
            options["expansion_width"] = args.expansion_width
        title = METHODS[name].title
        arms.append(Arm(title, name, options))
        if args.shared_prefixes:
            arms.append(Arm(f"{title}, shared prefixes", name, {**options, "shared_prefix_training": "on"}))
        # The other modes of SESA cannot draft several chains of sketches at the same time.
        if name in PARALLEL and options.get("mode", "two_stage") == "two_stage":
            for number in args.parallel:
                arms.append(Arm(f"{title}, {number} parallel", name, {**options, PARALLEL[name]: number}))
    return arms


def token_prices(steps: list[dict[str, float]]) -> list[float]:
    """Return the microseconds per generated token of each step."""
    return [1e6 * step["step"] / step["tokens"] for step in steps]


def report(arms: list[Arm], rounds: list[dict[str, list[dict[str, float]]]]) -> None:
    """Print a table of all arms, and the parts of their steps. `rounds` has the steps by name of the arm."""
    print(
        "\n| | microseconds per token | times GRPO's | tokens per step | passes | by passes alone | prompt passes | "
        "cache, MB |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for arm in arms:
        steps, prices, ratios, pass_ratios = [], [], [], []
        for results in rounds:
            own, grpo = results[arm.name], results["GRPO"]
            grpo_price = statistics.median(token_prices(grpo))
            steps += own
            prices += token_prices(own)
            ratios.append(statistics.median(token_prices(own)) / grpo_price)
            # All steps of a run have the same `pass_price`.
            extra_price = 1e6 * (own[0]["pass_price"] - grpo[0]["pass_price"])
            pass_ratios.append(1 + extra_price / grpo_price)
        encoded = [step["tree/encoded_fraction"] for step in steps if "tree/encoded_fraction" in step]
        cache = [step["generation/cache_megabytes"] for step in steps if "generation/cache_megabytes" in step]
        ratio = "1"
        if arm.name != "GRPO":
            ratio = f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"
        cells = [
            arm.name,
            f"{statistics.median(prices):.1f}",
            ratio,
            f"{statistics.median(step['tokens'] for step in steps):,.0f}",
            f"{statistics.mean(step['passes'] for step in steps):.1f}",
            "" if torch.cuda.is_available() else f"{statistics.median(pass_ratios):.2f}",
            f"{statistics.median(encoded):.3f}" if encoded else "",
            f"{max(cache):.1f}" if cache else "",
        ]
        print(f"| {' | '.join(cells)} |")
    for arm in arms:
        steps = [step for results in rounds for step in results[arm.name]]
        metrics = {name for step in steps for name in step if name.endswith("_seconds") and "/" in name}
        parts = []
        for metric in sorted(metrics):
            share = statistics.median(100 * step.get(metric, 0.0) / step["step_time"] for step in steps)
            parts.append(f"{metric} {share:.1f}")
        print(f"{arm.name}: percent of a step: " + ", ".join(parts))


def in_turns(make: Any, arms: list[Arm], options: dict[str, Any], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Train all arms one after another in each round. Return the steps by name of the arm, for each round."""
    rounds = []
    for number in range(args.rounds):
        round_options = {
            **options,
            "logging_steps": 1,
            "disable_tqdm": True,
            "max_steps": args.steps,
            "seed": args.seed + number,
        }
        rounds.append({arm.name: trained(make, arm, round_options) for arm in arms})
    return rounds


def measure_pretrained(args: argparse.Namespace) -> None:
    """Print a table of a pretrained model for every prompt length. Weights are in float32, and autocast computes in
    bfloat16."""
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
    """Train all arms alternately, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", nargs="?", default="doors", help="short name of a task")
    parser.add_argument("--long_prompts", action="store_true", help="random weights and prompts of 384 tokens")
    parser.add_argument(
        "--half_billion", action="store_true", help="random weights of the shape of Qwen2.5-0.5B, on a GPU"
    )
    parser.add_argument("--model", help="smollm2, or the folder or Hub name of a pretrained model")
    parser.add_argument(
        "--prompt_tokens", nargs="*", type=int, default=[30, 100, 400], help="prompt lengths, with --model"
    )
    parser.add_argument("--completion_tokens", type=int, default=32, help="maximum completion length, with --model")
    parser.add_argument("--rows", type=int, default=32, help="rows per step, with --model; a prompt has 8 rows")
    methods = [name for name, row in METHODS.items() if not row.plain]
    parser.add_argument("--methods", nargs="*", choices=methods, help="default: all methods that suit the task")
    parser.add_argument(
        "--parallel",
        nargs="*",
        type=int,
        default=[],
        help="measure TreeGRPO and SESA also with these values of `parallel_expansions` and `parallel_sketches`",
    )
    parser.add_argument(
        "--shared_prefixes",
        action="store_true",
        help="measure every method also with `shared_prefix_training='on'`",
    )
    parser.add_argument("--expansion_width", type=int, default=4, help="children per node of TreeGRPO")
    parser.add_argument("--path_cache_tokens", type=int, default=65536, help="the field of this name, for all methods")
    parser.add_argument(
        "--grpo_steps", type=int, default=60, help="steps of GRPO on a task before the measurement; 0: none"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="steps of a run; the first one warms up")
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
                first_options = {**options, "learning_rate": 1e-3, "scale_rewards": "none"}
                first_options["max_steps"] = args.grpo_steps
                grpo = arms[0]
                trained(make, grpo, first_options, save_to=Path(folder))
                make = partial(tiny_trainer, task, folder)
        rounds = in_turns(make, arms, options, args)
        report(arms, rounds)
    if torch.cuda.is_available():
        print(f"peak memory of the last run {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
