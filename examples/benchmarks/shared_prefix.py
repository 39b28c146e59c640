"""Log-probabilities of rows that share prefixes, each prefix computed once or once per row: seconds side by side.

    python examples/benchmarks/shared_prefix.py --prefix 192 384 --suffix 64 128

Forward and backward of what every trainer calls, TRL's own pass and `shared_prefix_training="on"`, on a model with
random weights. Both alternate in one process; seconds are medians, on a CPU of its time. `tokens` is how many times
more tokens the rows have than are computed, the limit where every token costs the same. On a CPU, TRL's pass sends the
prompts through the LM head too, so a large vocabulary gains more than that; a small one shows the layers alone. MB are
what the forward pass keeps for the backward pass. Where nothing is shared, both passes are TRL's own.
"""

import argparse
import statistics
import tempfile
import time

import torch
import transformers
from datasets import Dataset
from transformers import Qwen2Config, Qwen2ForCausalLM

from trl_explore.rows.layout import pack_rows
from trl_explore.tasks.tiny_model import build_tokenizer
from trl_explore.trainers import ExplorationConfig, ExplorationTrainer

LINE = "{:<36} {:>7} {:>8} {:>9} {:>9} {:>12} {:>10} {:>9} {:>10}"


def branches(args, prefix: int, suffix: int) -> list[list[int]]:
    """Rows of one prefix that differ from its end on."""
    shared = tokens(args, prefix)
    return [shared + tokens(args, suffix) for _ in range(args.rows)]


def tree(args, node: int, depth: int) -> list[list[int]]:
    """Leaves of a random search tree: every row leaves an earlier one at the end of one of its nodes."""
    rows = [tokens(args, node * depth)]
    while len(rows) < args.rows:
        parent, cut = rows[int(torch.randint(len(rows), ()))], node * int(torch.randint(1, depth, ()))
        rows.append(parent[:cut] + tokens(args, node * depth - cut))
    return rows


def tokens(args, number: int) -> list[int]:
    return torch.randint(2, args.vocab_size, (number,)).tolist()


def seconds_of(trainer, mode: str, ids: torch.Tensor, num_prompt: int) -> tuple[float, float]:
    """Seconds of a forward and backward pass, and the MB that the forward pass keeps for the backward one."""
    trainer.packing.mode = mode
    trainer.model.zero_grad()
    kept: dict[int, int] = {}
    weights = {p.untyped_storage().data_ptr() for p in trainer.model.parameters()}

    def note(tensor):
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    clock = time.perf_counter if ids.is_cuda else time.process_time  # other work on the machine does not count
    synchronise(ids)
    start = clock()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        logps, _, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, torch.ones_like(ids), ids.size(1) - num_prompt, compute_entropy=True
        )
    logps.sum().backward()
    synchronise(ids)
    return clock() - start, sum(kept.values()) / 1e6


def synchronise(ids: torch.Tensor) -> None:
    if ids.is_cuda:
        torch.cuda.synchronize()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--prefix", type=int, nargs="*", default=[64, 192, 384, 768])
    parser.add_argument("--suffix", type=int, nargs="*", default=[64, 128, 256])
    parser.add_argument("--hidden_size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab_size", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no CUDA device here")
    if args.rows < 2 or args.hidden_size % 128:
        parser.error("--rows must be at least 2, and --hidden_size a multiple of 128")
    torch.set_num_threads(args.threads)
    transformers.utils.logging.set_verbosity_error()
    torch.manual_seed(args.seed)
    trainer = make_trainer(args)
    shapes = {f"{args.rows} branches, {p} + {s}": (branches(args, p, s), p) for p in args.prefix for s in args.suffix}
    for node in (32, 64, 128):
        shapes[f"search tree, depth 8, nodes of {node}"] = (tree(args, node, 8), node)
    two = branches(args, 512, 128)[::2] + branches(args, 512, 128)[::2]
    shapes["GRPO, 2 prompts of 512, 128 new"] = (two, 512)
    shapes["nothing shared, 256"] = ([tokens(args, 256) for _ in range(args.rows)], 192)
    print(
        LINE.format(
            "rows", "tokens", "plain s", "packed s", "speed-up", "rounds", "of tokens", "plain MB", "packed MB"
        )
    )
    for name, (rows, num_prompt) in shapes.items():
        ids = torch.tensor(rows, device=trainer.accelerator.device)
        found = {"off": [], "on": []}
        for _ in range(args.rounds + 1):
            for mode, results in found.items():
                results.append(seconds_of(trainer, mode, ids, num_prompt))
        seconds = {mode: [s for s, _ in results[1:]] for mode, results in found.items()}  # the first is a warm-up
        plain, packed = statistics.median(seconds["off"]), statistics.median(seconds["on"])
        ratios = [a / b for a, b in zip(seconds["off"], seconds["on"], strict=True)]
        ones, completion = torch.ones_like(ids), slice(num_prompt, None)
        parts = ids[:, :num_prompt], ones[:, :num_prompt], ids[:, completion], ones[:, completion]
        ratio = pack_rows(*parts).token_ratio
        print(
            LINE.format(
                name,
                f"{ratio:.2f}",
                f"{plain:.3f}",
                f"{packed:.3f}",
                f"{plain / packed:.2f}",
                f"{min(ratios):.2f}-{max(ratios):.2f}",
                f"{plain / packed / ratio:.2f}",
                f"{found['off'][-1][1]:.0f}",
                f"{found['on'][-1][1]:.0f}",
            ),
            flush=True,
        )


def make_trainer(args) -> ExplorationTrainer:
    config = Qwen2Config(
        vocab_size=args.vocab_size,
        hidden_size=args.hidden_size,
        intermediate_size=3 * args.hidden_size,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden_size // 32,
        num_key_value_heads=args.hidden_size // 128,
        pad_token_id=0,
    )
    on_cpu = args.device == "cpu"
    model = Qwen2ForCausalLM(config)
    return ExplorationTrainer(
        model=model if on_cpu else model.to(torch.bfloat16),
        reward_funcs=lambda completions, **kwargs: [0.0] * len(completions),
        args=ExplorationConfig(
            output_dir=tempfile.mkdtemp(), use_cpu=on_cpu, bf16=not on_cpu, report_to=[], shared_prefix_training="on"
        ),
        train_dataset=Dataset.from_dict({"prompt": ["1"]}),
        processing_class=build_tokenizer(),
    )


if __name__ == "__main__":
    main()
