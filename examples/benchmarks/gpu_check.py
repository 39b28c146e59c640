"""The papers' five trainers beside GRPOTrainer on one device: do they run, how long is a step, how much memory?

    python examples/benchmarks/gpu_check.py                     # a CUDA device, bf16, a Qwen2 of 80 million parameters
    python examples/benchmarks/gpu_check.py --only tree_grpo    # one at a time, where a call may not take long
    python examples/benchmarks/gpu_check.py --device cpu --tiny # the same code with a tiny model

Weights are random, prompts made up, and a reward is the parity of a completion's tokens: nothing can be learned here.
BranPO is an agent with a trivial tool, beside GRPO with the same tool. `tree_grpo_parallel` grows four nodes of a tree
at a time; `tree_grpo_packed` computes shared prefixes once, on a GPU with compiled attention, of which a few graphs
serve all lengths. What is done is kept in `--output`, and a run goes on where an earlier one ended; the table shows
all of it.
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

# Each method beside the GRPO that it is compared with: an agent's turns are another task than single completions.
BESIDE = {name: "grpo" for name in ("grpo", "deep_grpo", "sesa", "g2rl")}
BESIDE |= {name: "grpo" for name in ("tree_grpo", "tree_grpo_parallel", "tree_grpo_packed")}
BESIDE |= {"grpo_agent": "grpo_agent", "branpo": "grpo_agent"}


def parity(completion_ids, **columns):
    return [float(sum(ids) % 2) for ids in completion_ids]


def look() -> str:
    """
    Looks around.

    Returns:
        What there is.
    """
    return "nothing"


class StepClock(TrainerCallback):
    """Wall seconds of each optimiser step, with all work of the device done."""

    def __init__(self):
        self.seconds = []

    def on_step_begin(self, args, state, control, **kwargs):
        self.started = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        if args.device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self.started)


def build_model(args):
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
    """Sampling options under which a random model calls the tool: whenever it says `!`, the rest of a call follows."""
    call = tokenizer("!look ")["input_ids"]
    return dict(sequence_bias=[[call[:end], 100.0] for end in range(2, len(call) + 1)])


def options_of(name, length, batch):
    """The method's own settings; lengths are shares of a completion's."""
    tree = dict(expansion_width=4, node_length=length // 4)
    return {
        "deep_grpo": dict(segmentation="fixed", segment_length=length // 8, max_pivots_per_batch=batch // 4),
        "tree_grpo": tree,
        "tree_grpo_parallel": dict(tree, parallel_expansions=4),
        "tree_grpo_packed": dict(tree, shared_prefix_training="on"),
        "sesa": dict(max_sketch_length=length // 4),
    }.get(name, {})


def check(name, args):
    """Train `name` for a few steps; what it took."""
    length, rows, accumulation = (24, 8, 1) if args.tiny else (args.max_completion_length, 16, 4)
    agent = BESIDE[name] == "grpo_agent"
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
    prompts = [f"{i}+{j}=" for i in range(16) for j in range(16)]
    clock, costs = StepClock(), CostCallback(Budget())
    trainer = method.trainer_class(
        model=build_model(args),
        reward_funcs=parity,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": prompt}] for prompt in prompts]}),
        processing_class=tokenizer,
        callbacks=[clock, costs],
        tools=[look] if agent else None,
    )
    costs.count_sampled(trainer)
    if on_gpu:
        gc.collect()  # what an earlier trainer holds in cycles would count as this one's
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    losses = [entry["loss"] for entry in costs.history]
    return {
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "seconds": statistics.median(clock.seconds[1:]),  # the first step also warms up
        "memory": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
        "tokens": costs.cost.tokens,
        "finite": all(abs(loss) < float("inf") for loss in losses),
        "failed_calls": max(entry.get("tools/failure_frequency", 1.0) for entry in costs.history),
        "compilations": max(entry.get("packing/compilations", 0.0) for entry in costs.history),
    }


def table(found, steps):
    lines = [
        f"| {steps} steps | seconds per step | times GRPO | peak GiB | times GRPO | tokens sampled | graphs compiled "
        "| losses finite |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in (name for name in BESIDE if name in found):
        ours, plain = found[name], found.get(BESIDE[name])
        slower = f"{ours['seconds'] / plain['seconds']:.2f}" if plain else "-"
        memory, more = "-", "-"
        if ours["memory"] is not None:
            memory, more = f"{ours['memory']:.2f}", f"{ours['memory'] / plain['memory']:.2f}" if plain else "-"
        cells = [name, f"{ours['seconds']:.3f}", slower, memory, more, f"{ours['tokens']:.0f}"]
        cells += [f"{ours['compilations']:.0f}", "yes" if ours["finite"] else "NO"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and short completions")
    parser.add_argument("--only", choices=BESIDE, help="train this one; the table also has what was done before")
    parser.add_argument("--max_completion_length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=6, help="the first of them warms up and is not counted")
    parser.add_argument("--output", default="out/gpu-check")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device: --device cpu --tiny runs the same code.")
    if args.device == "cpu":
        torch.set_num_threads(1)  # the fastest for a tiny model
    transformers.utils.logging.set_verbosity_error()
    setting = {key: value for key, value in vars(args).items() if key not in ("only", "output")}
    file = Path(args.output) / "found.json"
    found = {}
    if file.exists():
        kept = json.loads(file.read_text())
        if kept["setting"] != setting:
            raise SystemExit(f"{file} holds another setting, {kept['setting']}: choose another --output.")
        found = kept["found"]
    for name in [args.only] if args.only else [name for name in BESIDE if name not in found]:
        found[name] = check(name, args)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"setting": setting, "found": found}, indent=1))
    device = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    sizes = {f"{result['parameters']:,} parameters" for result in found.values()}
    print(f"\n{device}, {', '.join(sizes)}, {'bf16' if args.device == 'cuda' else 'float32'}\n")
    print(table(found, args.steps))


if __name__ == "__main__":
    main()
