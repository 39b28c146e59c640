"""What G2RL's features cost: seconds and memory beside the naive way, and their share of a training step.

    python examples/benchmarks/gradient_features.py
    python examples/benchmarks/gradient_features.py --device cuda --rows 8 --width 2048 --dtype bfloat16

1. One row of hidden states, vocabularies of 32k and 152k, 1k and 4k tokens: features, log-probabilities and entropies
   from tiles, against the whole `(tokens, V)` logits at once. Every case in a process of its own; peak memory is what
   the process (on a GPU: the allocator) held beyond its inputs.
2. Training steps of a small model whose vocabulary has 32k entries, with G2RL's own pass and where TRL makes old
   log-probabilities anyway: the logged `geometry/feature_seconds` over the seconds of a step, beside GRPO's steps.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

import torch


def naive_features(hidden, ids, mask, head):
    """The whole softmax at once."""
    logits = hidden.float() @ head.weight.float().T / head.temperature
    log_p = logits.log_softmax(-1)
    p = log_p.exp()
    features = head.weight.float()[ids] - p @ head.weight.float()
    mask = mask.float()[..., None]
    entropies = -(p * log_p).sum(-1)
    return (features * mask).sum(1) / mask.sum(1), log_p.gather(-1, ids[..., None]), entropies


def peak_bytes(device):
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def one_case(args):
    from trl_explore.gradients.features import LMHead, sequence_features

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    hidden = torch.randn(args.rows, args.tokens, args.width, dtype=dtype, device=args.device)
    weight = torch.randn(args.vocabulary, args.width, dtype=dtype, device=args.device) / args.width**0.5
    head = LMHead(weight)
    ids = torch.randint(args.vocabulary, (args.rows, args.tokens), device=args.device)
    mask = torch.ones_like(ids)
    way = naive_features if args.way == "naive" else sequence_features
    with torch.no_grad():
        way(hidden[:, :8], ids[:, :8], mask[:, :8], head)  # warm up
        before = peak_bytes(args.device)
        start = time.perf_counter()
        features = way(hidden, ids, mask, head)[0]
        if args.device == "cuda":
            torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    print(json.dumps({"seconds": seconds, "bytes": peak_bytes(args.device) - before, "norm": features.norm().item()}))


def compare(args):
    print("vocabulary tokens     tiles: s      MB    naive: s      MB   seconds, memory")
    for vocabulary in (32_768, 151_936):
        for tokens in (1024, 4096):
            found = {}
            for way in ("tiles", "naive"):
                command = [sys.executable, __file__, "--way", way, "--vocabulary", str(vocabulary)]
                command += ["--tokens", str(tokens), "--device", args.device, "--rows", str(args.rows)]
                command += ["--width", str(args.width), "--dtype", args.dtype, "--threads", str(args.threads)]
                done = subprocess.run(command, capture_output=True, text=True)
                found[way] = json.loads(done.stdout) if done.returncode == 0 else None
            tiles, naive = found["tiles"], found["naive"]
            line = f"{vocabulary:10,d} {tokens:6,d}   {tiles['seconds']:9.2f} {tiles['bytes'] / 1e6:7.0f}"
            if naive is None:
                print(f"{line}   out of memory")
                continue
            ratios = f"{tiles['seconds'] / naive['seconds']:.2f}, {tiles['bytes'] / naive['bytes']:.3f}"
            print(f"{line}   {naive['seconds']:9.2f} {naive['bytes'] / 1e6:7.0f}   {ratios}", flush=True)
            assert abs(tiles["norm"] / naive["norm"] - 1) < 0.05


def steps(args):
    import tempfile

    import transformers
    from datasets import Dataset
    from transformers import PrinterCallback, Qwen2Config, Qwen2ForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    from trl_explore.tasks.tiny_model import build_tokenizer
    from trl_explore.trainers import G2RLConfig, G2RLTrainer

    torch.set_num_threads(args.threads)
    transformers.utils.logging.set_verbosity_error()
    config = Qwen2Config(
        vocab_size=32_768, hidden_size=256, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=1024, tie_word_embeddings=True, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    ways = {"own pass": {}, "old log-probabilities are made anyway": dict(num_iterations=2)}
    for name, options in ways.items():
        print(f"\n{name}")
        batches, features = {}, []
        for trainer_class, config_class in ((GRPOTrainer, GRPOConfig), (G2RLTrainer, G2RLConfig)) * args.rounds:
            torch.manual_seed(0)
            common = dict(
                output_dir=tempfile.mkdtemp(), per_device_train_batch_size=16, num_generations=8, use_cpu=True,
                max_completion_length=args.completion_length, max_steps=2 * args.steps, bf16=False, report_to=[],
                logging_steps=1, save_strategy="no", disable_tqdm=True, gradient_checkpointing=False,
            )  # fmt: skip
            if args.device == "cuda":
                common |= dict(use_cpu=False, bf16=True)
            trainer = trainer_class(
                model=Qwen2ForCausalLM(config),
                reward_funcs=lambda completion_ids, **columns: [float(sum(ids) % 2) for ids in completion_ids],
                args=config_class(**common, **options),
                train_dataset=Dataset.from_dict({"prompt": ["12+34=" * 4] * 64}),
                processing_class=build_tokenizer(),
            )
            trainer.remove_callback(PrinterCallback)
            trainer.train()
            logs = [log for log in trainer.state.log_history if "step_time" in log]
            of_a_batch = options.get("num_iterations", 1)
            starts = range(of_a_batch, len(logs), of_a_batch)  # the first batch warms up
            batches.setdefault(trainer_class.__name__, []).extend(
                sum(log["step_time"] for log in logs[start : start + of_a_batch]) for start in starts
            )
            features += [log["geometry/feature_seconds"] for log in logs[1:] if "geometry/feature_seconds" in log]
        seconds = {of: statistics.median(measured) for of, measured in batches.items()}
        share = statistics.median(features) / seconds["G2RLTrainer"]
        print(f"  GRPO {seconds['GRPOTrainer']:.3f} s, G2RL {seconds['G2RLTrainer']:.3f} s (medians of", end=" ")
        print(f"{len(batches['G2RLTrainer'])} generation batches each, {of_a_batch} step(s) per batch),", end=" ")
        print(f"features {statistics.median(features):.3f} s = {100 * share:.1f} %;", end=" ")
        print(f"ratio {seconds['G2RLTrainer'] / seconds['GRPOTrainer']:.3f}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3, help="trainers take turns this often")
    parser.add_argument("--completion_length", type=int, default=32)
    parser.add_argument("--way", default=None, help="one case only: tiles or naive")
    parser.add_argument("--vocabulary", type=int, default=32_768)
    parser.add_argument("--tokens", type=int, default=1024)
    args = parser.parse_args()
    if args.way is not None:
        one_case(args)
        return
    compare(args)
    steps(args)


if __name__ == "__main__":
    main()
