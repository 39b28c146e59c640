"""Measure the seconds of the log-probabilities of rows that share prefixes, computed once or once per row.

    python examples/benchmarks/shared_prefix.py --prefix 192 384 --suffix 64 128

The script runs the forward and backward pass of a trainer's log-probabilities in two ways: TRL's own pass ("plain"),
and the pass with `shared_prefix_training="on"` ("packed"). The model has random weights. Both ways alternate in one
process. If rows share no tokens, both ways are TRL's own pass.

Columns of the table:

- `tokens`: number of tokens of the rows, divided by the number of computed tokens. The speed-up would have this value
  if every token had the same cost. On a CPU, it can be higher: TRL's pass also computes the logits of the prompts,
  which takes long with a large vocabulary. A small `--vocab_size` shows the speed-up of the layers.
- `plain s`, `packed s`, `speed-up`: median seconds, and their ratio. On a CPU, these are CPU seconds of the process.
- `rounds`: smallest and largest speed-up of a round.
- `of tokens`: `speed-up` divided by `tokens`.
- `plain MB`, `packed MB`: memory that the forward pass keeps for the backward pass.
"""

import argparse
import statistics
import tempfile
import time
from typing import NamedTuple

import torch
import transformers
from datasets import Dataset
from transformers import Qwen2Config, Qwen2ForCausalLM

from trl_explore.rows.layout import pack_rows
from trl_explore.tasks.tiny_model import build_tokenizer
from trl_explore.trainers import ExplorationConfig, ExplorationTrainer

LINE = "{:<36} {:>7} {:>8} {:>9} {:>9} {:>12} {:>10} {:>9} {:>10}"


def branches(args, prefix: int, suffix: int) -> list[list[int]]:
    """Return `args.rows` rows with the same random prefix and different random suffixes. The arguments are numbers of
    tokens."""
    shared = tokens(args, prefix)
    return [shared + tokens(args, suffix) for _ in range(args.rows)]


def tree(args, node: int, depth: int) -> list[list[int]]:
    """Return the leaves of a random search tree with `depth` nodes of `node` tokens per row. Every row begins with the
    first nodes of an earlier row."""
    rows = [tokens(args, node * depth)]
    while len(rows) < args.rows:
        parent = rows[int(torch.randint(len(rows), ()))]
        cut = node * int(torch.randint(1, depth, ()))
        rows.append(parent[:cut] + tokens(args, node * depth - cut))
    return rows


def tokens(args, number: int) -> list[int]:
    """Return random token ids."""
    return torch.randint(2, args.vocab_size, (number,)).tolist()


class Measurement(NamedTuple):
    """Measurement of one forward and backward pass."""

    seconds: float
    megabytes: float  # that the forward pass keeps for the backward pass


def measure(trainer, mode: str, ids: torch.Tensor, num_prompt: int) -> Measurement:
    """
    Measure a forward and backward pass of the log-probabilities of completions.

    Args:
        trainer ([`~trl_explore.trainers.ExplorationTrainer`]):
            Trainer with `shared_prefix_training="on"`.
        mode (`str`):
            `"on"` computes shared prefixes once, `"off"` once per row.
        ids (`torch.Tensor`):
            Token ids of prompts and completions without padding, `(B, P+C)`.
        num_prompt (`int`):
            Number of tokens of a prompt, P.

    Returns:
        [`Measurement`]: Seconds and memory.
    """
    trainer.packing.mode = mode
    trainer.model.zero_grad()
    kept: dict[int, int] = {}  # bytes of each storage that is kept for the backward pass, by address
    weights = {parameter.untyped_storage().data_ptr() for parameter in trainer.model.parameters()}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    # On a CPU, measure the time of the process, so that other work on the machine does not count.
    clock = time.perf_counter if ids.is_cuda else time.process_time
    synchronize(ids)
    start = clock()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        logps, _, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, torch.ones_like(ids), ids.size(1) - num_prompt, compute_entropy=True
        )
    logps.sum().backward()
    synchronize(ids)
    return Measurement(clock() - start, sum(kept.values()) / 1e6)


def synchronize(ids: torch.Tensor) -> None:
    """Wait for the GPU, if `ids` are on a GPU."""
    if ids.is_cuda:
        torch.cuda.synchronize()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8, help="rows of a batch")
    parser.add_argument("--prefix", type=int, nargs="*", default=[64, 192, 384, 768], help="tokens of a prefix")
    parser.add_argument("--suffix", type=int, nargs="*", default=[64, 128, 256], help="tokens of a suffix")
    parser.add_argument("--hidden_size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab_size", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: found no CUDA device; leave the flag out to use the CPU")
    if args.rows < 2 or args.hidden_size % 128:
        parser.error("--rows must be at least 2, and --hidden_size a multiple of 128")
    torch.set_num_threads(args.threads)
    transformers.utils.logging.set_verbosity_error()
    torch.manual_seed(args.seed)
    trainer = make_trainer(args)
    # Name of each case, its rows, and the number of prompt tokens of a row.
    cases: dict[str, tuple[list[list[int]], int]] = {}
    for prefix in args.prefix:
        for suffix in args.suffix:
            cases[f"{args.rows} branches, {prefix} + {suffix}"] = (branches(args, prefix, suffix), prefix)
    for node in (32, 64, 128):
        cases[f"search tree, depth 8, nodes of {node}"] = (tree(args, node, 8), node)
    two = branches(args, 512, 128)[::2] + branches(args, 512, 128)[::2]
    cases["GRPO, 2 prompts of 512, 128 new"] = (two, 512)
    cases["nothing shared, 256"] = ([tokens(args, 256) for _ in range(args.rows)], 192)
    print(
        LINE.format(
            "rows", "tokens", "plain s", "packed s", "speed-up", "rounds", "of tokens", "plain MB", "packed MB"
        )
    )
    for name, (rows, num_prompt) in cases.items():
        ids = torch.tensor(rows, device=trainer.accelerator.device)
        plain_seconds, packed_seconds, speedups = [], [], []
        for number in range(args.rounds + 1):
            plain = measure(trainer, "off", ids, num_prompt)
            packed = measure(trainer, "on", ids, num_prompt)
            if number > 0:  # the first round warms up
                plain_seconds.append(plain.seconds)
                packed_seconds.append(packed.seconds)
                speedups.append(plain.seconds / packed.seconds)
        speedup = statistics.median(plain_seconds) / statistics.median(packed_seconds)
        ones = torch.ones_like(ids)
        prompt_ids, prompt_mask = ids[:, :num_prompt], ones[:, :num_prompt]
        completion_ids, completion_mask = ids[:, num_prompt:], ones[:, num_prompt:]
        ratio = pack_rows(prompt_ids, prompt_mask, completion_ids, completion_mask).token_ratio
        print(
            LINE.format(
                name,
                f"{ratio:.2f}",
                f"{statistics.median(plain_seconds):.3f}",
                f"{statistics.median(packed_seconds):.3f}",
                f"{speedup:.2f}",
                f"{min(speedups):.2f}-{max(speedups):.2f}",
                f"{speedup / ratio:.2f}",
                f"{plain.megabytes:.0f}",
                f"{packed.megabytes:.0f}",
            ),
            flush=True,
        )


def make_trainer(args) -> ExplorationTrainer:
    """Return a trainer of a Qwen2 model with random weights, in bfloat16 on a GPU."""
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
