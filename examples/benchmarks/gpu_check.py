"""Train five methods and GRPO for a few steps on one device, and print seconds per step and peak memory.

    python examples/benchmarks/gpu_check.py                     # a CUDA device, bf16, a Qwen2 of 80 million parameters
    python examples/benchmarks/gpu_check.py --only tree_grpo    # one method, if the time of a command is limited
    python examples/benchmarks/gpu_check.py --device cpu --tiny # the same code with a tiny model

The model has random weights, the prompts are made up, and the reward is the parity of the completion's token ids. So
the model learns nothing useful. BranPO needs an agent, so it and its baseline `grpo_agent` have a trivial tool. Two
entries are TreeGRPO with another option: `tree_grpo_parallel` expands four nodes of a tree at a time, and
`tree_grpo_packed` computes shared prefixes once. On a GPU, the latter compiles its attention. A few graphs serve all
lengths.

The results are stored in the folder `--output`. Another run with the same settings trains only the methods that are
missing there. The table shows all methods in the folder.
"""

import argparse
import gc
import json
import re
import statistics
import time
from pathlib import Path

import torch
import transformers
from datasets import Dataset
from transformers import Qwen2Config, Qwen2ForCausalLM, TrainerCallback
from trl import GRPOConfig

from trl_explore.compare.run import CostCallback
from trl_explore.compare.settings import Budget
from trl_explore.methods import METHODS
from trl_explore.tasks.tiny_model import VOCAB_SIZE, build_tokenizer

# Entries of the table, and the baseline of each. BranPO's baseline is also an agent, because an agent's trajectory of
# several turns cannot be compared with a single completion.
BASELINES = {
    "grpo": "grpo",
    "deep_grpo": "grpo",
    "sesa": "grpo",
    "g2rl": "grpo",
    "tree_grpo": "grpo",
    "tree_grpo_parallel": "grpo",
    "tree_grpo_packed": "grpo",
    "grpo_agent": "grpo_agent",
    "branpo": "grpo_agent",
}


def parity(completion_ids, **columns):
    """Return a reward per completion: 1 if the sum of its token ids is odd, otherwise 0."""
    return [float(sum(ids) % 2) for ids in completion_ids]


def look() -> str:
    """
    Look around.

    Returns:
        Names of the objects in sight.
    """
    return "nothing"


class StepClock(TrainerCallback):
    """Measure the wall seconds of each optimizer step, including all work of the GPU."""

    def __init__(self):
        self.seconds = []

    def on_step_begin(self, args, state, control, **kwargs):
        self.started = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        if args.device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self.started)


def build_model(args):
    """Return a Qwen2 model with random weights."""
    shape = dict(hidden_size=768, intermediate_size=2304, num_hidden_layers=12, num_attention_heads=12)
    if args.tiny:
        shape = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2)
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        **shape,
    )
    torch.manual_seed(args.seed)
    return Qwen2ForCausalLM(config)


def calls_on_its_own(tokenizer):
    """Return sampling options with which a random model calls the tool: as soon as it samples `!`, biases on the next
    tokens complete the call."""
    call = tokenizer("!look ")["input_ids"]
    beginnings = [call[:end] for end in range(2, len(call) + 1)]
    return dict(sequence_bias=[[beginning, 100.0] for beginning in beginnings])


def options_of(name, length, batch):
    """Return the configuration fields of an entry. Lengths in tokens are shares of `length`, the maximum completion
    length. The number of pivots is a share of `batch`, the rows per step."""
    tree = dict(expansion_width=4, node_length=length // 4)
    return {
        "deep_grpo": dict(segmentation="fixed", segment_length=length // 8, max_pivots_per_batch=batch // 4),
        "tree_grpo": tree,
        "tree_grpo_parallel": dict(tree, parallel_expansions=4),
        "tree_grpo_packed": dict(tree, shared_prefix_training="on"),
        "sesa": dict(max_sketch_length=length // 4),
    }.get(name, {})


def check(name, args):
    """Train an entry for a few steps, and return its measurements."""
    if args.tiny:
        length, rows, accumulation = 24, 8, 1
    else:
        length, rows, accumulation = args.max_completion_length, 16, 4
    agent = BASELINES[name] == "grpo_agent"
    method = METHODS[re.sub("_(agent|parallel|packed)$", "", name)]
    on_gpu = args.device == "cuda"
    tokenizer = build_tokenizer(tools=agent)
    config: GRPOConfig = method.config_class(
        output_dir=str(Path(args.output) / name),
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=accumulation,
        num_generations=4 if args.tiny else 8,
        max_completion_length=4 * length if agent else length,
        max_tool_calling_iterations=3 if agent else None,
        generation_kwargs=calls_on_its_own(tokenizer) if agent else None,
        max_steps=args.steps,
        learning_rate=1e-6,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        report_to=[],
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        seed=args.seed,
        **options_of(name, length, rows * accumulation),
    )
    prompts = []
    for i in range(16):
        for j in range(16):
            prompts.append([{"role": "user", "content": f"{i}+{j}="}])
    clock, costs = StepClock(), CostCallback(Budget())
    trainer = method.trainer_class(
        model=build_model(args),
        reward_funcs=parity,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        callbacks=[clock, costs],
        tools=[look] if agent else None,
    )
    costs.count_sampled(trainer)
    if on_gpu:
        gc.collect()  # otherwise, memory that an earlier trainer holds in reference cycles would count
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    losses = [entry["loss"] for entry in costs.history]
    failed_calls = None  # without tools, there are no calls
    if agent:
        failed_calls = max(entry.get("tools/failure_frequency", 1.0) for entry in costs.history)
    return {
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "seconds": statistics.median(clock.seconds[1:]),  # the first step also warms up
        "memory": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
        "tokens": costs.cost.tokens,
        "finite": all(abs(loss) < float("inf") for loss in losses),
        "failed_calls": failed_calls,
        "compilations": max(entry.get("packing/compilations", 0.0) for entry in costs.history),
    }


def table(found, steps):
    """Return the measurements of all entries as a Markdown table."""
    lines = [
        f"| {steps} steps | seconds per step | times GRPO | peak GiB | times GRPO | tokens sampled | graphs compiled "
        "| losses finite |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, baseline in BASELINES.items():
        if name not in found:
            continue
        ours, grpo = found[name], found.get(baseline)
        time_ratio, memory, memory_ratio = "-", "-", "-"
        if grpo:
            time_ratio = f"{ours['seconds'] / grpo['seconds']:.2f}"
        if ours["memory"] is not None:
            memory = f"{ours['memory']:.2f}"
            if grpo:
                memory_ratio = f"{ours['memory'] / grpo['memory']:.2f}"
        cells = [name, f"{ours['seconds']:.3f}", time_ratio, memory, memory_ratio, f"{ours['tokens']:.0f}"]
        cells += [f"{ours['compilations']:.0f}", "yes" if ours["finite"] else "NO"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and short completions")
    parser.add_argument("--only", choices=BASELINES, help="train only this entry; the table also has earlier results")
    parser.add_argument("--max_completion_length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=6, help="steps per entry; the first one warms up and is left out")
    parser.add_argument("--output", default="out/gpu-check")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("found no CUDA device: --device cpu --tiny runs the same code on the CPU.")
    if args.device == "cpu":
        torch.set_num_threads(1)  # the fastest number for a tiny model
    transformers.utils.logging.set_verbosity_error()
    setting = {key: value for key, value in vars(args).items() if key not in ("only", "output")}
    file = Path(args.output) / "found.json"
    found = {}
    if file.exists():
        kept = json.loads(file.read_text())
        if kept["setting"] != setting:
            raise SystemExit(f"{file} has results of other settings ({kept['setting']}): choose another --output.")
        found = kept["found"]
    if args.only:
        names = [args.only]
    else:
        names = [name for name in BASELINES if name not in found]
    for name in names:
        found[name] = check(name, args)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"setting": setting, "found": found}, indent=1))
    device = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    sizes = {f"{result['parameters']:,} parameters" for result in found.values()}
    print(f"\n{device}, {', '.join(sizes)}, {'bf16' if args.device == 'cuda' else 'float32'}\n")
    print(table(found, args.steps))


if __name__ == "__main__":
    main()
