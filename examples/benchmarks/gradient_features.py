"""Measure the cost of G2RL's gradient features: seconds and memory, and their share of a training step.

    python examples/benchmarks/gradient_features.py
    python examples/benchmarks/gradient_features.py --device cuda --rows 8 --width 2048 --dtype bfloat16

The first table compares two ways to compute features, log-probabilities and entropies from hidden states:
trl-explore's, which computes the logits of a few tokens at a time ("tiles"), and a naive one with all logits
`(tokens, V)` at once. The vocabulary has 32k or 152k entries, and a row has 1k or 4k tokens. Every case runs in its
own process. Its memory is the peak memory of the process, or on a GPU of the allocator, without the inputs.

The second part trains a small model with a vocabulary of 32k entries with G2RL and with GRPO. It prints the seconds
per generation batch, and the share of the metric `geometry/feature_seconds` in G2RL's. There are two settings. With
`num_iterations=1`, the features need a forward pass of their own. With `num_iterations=2`, TRL computes old
log-probabilities, and the features come from the same forward pass.
"""

import argparse
import json
import resource
import signal
import statistics
import subprocess
import sys
import time

import torch

# Parts of the messages of PyTorch (CUDA, CPU), cuBLAS and Python if memory runs out, in lower case.
OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "cublas_status_alloc_failed", "memoryerror")


def naive_features(hidden, ids, mask, head):
    """Return features, log-probabilities and entropies, computed from all logits at once."""
    logits = hidden.float() @ head.weight.float().T / head.temperature
    log_p = logits.log_softmax(-1)
    p = log_p.exp()
    features = head.weight.float()[ids] - p @ head.weight.float()
    mask = mask.float()[..., None]
    entropies = -(p * log_p).sum(-1)
    return (features * mask).sum(1) / mask.sum(1), log_p.gather(-1, ids[..., None]), entropies


def peak_bytes(device):
    """Return the peak memory so far: of the CUDA allocator, or of the process."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def one_case(args):
    """Measure one way in this process, and print the result as JSON."""
    from trl_explore.gradients.features import LMHead, sequence_features

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    hidden = torch.randn(args.rows, args.tokens, args.width, dtype=dtype, device=args.device)
    weight = torch.randn(args.vocabulary, args.width, dtype=dtype, device=args.device) / args.width**0.5
    head = LMHead(weight)
    ids = torch.randint(args.vocabulary, (args.rows, args.tokens), device=args.device)
    mask = torch.ones_like(ids)
    compute = naive_features if args.way == "naive" else sequence_features
    with torch.no_grad():
        compute(hidden[:, :8], ids[:, :8], mask[:, :8], head)  # warms up
        before = peak_bytes(args.device)
        if args.device == "cuda":
            torch.cuda.synchronize()  # otherwise, the warm-up would count
        start = time.perf_counter()
        features = compute(hidden, ids, mask, head)[0]
        if args.device == "cuda":
            torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    print(json.dumps({"seconds": seconds, "bytes": peak_bytes(args.device) - before, "norm": features.norm().item()}))


def failure(done):
    """Return the reason why a process failed: no memory, or the last line of its stderr."""
    if any(words in done.stderr.lower() for words in OUT_OF_MEMORY):
        return "out of memory"
    if done.returncode == -signal.SIGKILL:  # Linux kills a process without a message if memory runs out
        return "killed, probably because memory ran out"
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"exit code {done.returncode}"


def compare(args):
    """Print the table of seconds and memory. Each line compares both ways in one case."""
    print("vocabulary tokens     tiles: s      MB    naive: s      MB   seconds, memory")
    for vocabulary in (32_768, 151_936):
        for tokens in (1024, 4096):
            found = {}
            for way in ("tiles", "naive"):
                command = [sys.executable, __file__, "--way", way, "--vocabulary", str(vocabulary)]
                command += ["--tokens", str(tokens), "--device", args.device, "--rows", str(args.rows)]
                command += ["--width", str(args.width), "--dtype", args.dtype, "--threads", str(args.threads)]
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode and way == "tiles":
                    raise SystemExit(f"{vocabulary:10,d} {tokens:6,d}   tiles: {failure(done)}\n{done.stderr}")
                found[way] = failure(done) if done.returncode else json.loads(done.stdout)
            tiles, naive = found["tiles"], found["naive"]
            line = f"{vocabulary:10,d} {tokens:6,d}   {tiles['seconds']:9.2f} {tiles['bytes'] / 1e6:7.0f}"
            if isinstance(naive, str):  # the reason why it failed
                print(f"{line}   {naive}")
                continue
            ratios = f"{tiles['seconds'] / naive['seconds']:.2f}, {tiles['bytes'] / naive['bytes']:.3f}"
            print(f"{line}   {naive['seconds']:9.2f} {naive['bytes'] / 1e6:7.0f}   {ratios}", flush=True)
            assert abs(tiles["norm"] / naive["norm"] - 1) < 0.05


def steps(args):
    """Train with GRPO and G2RL alternately, and print seconds and the share of the features."""
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
    settings = {"own pass": {}, "old log-probabilities are made anyway": dict(num_iterations=2)}
    for name, options in settings.items():
        print(f"\n{name}")
        steps_per_batch = options.get("num_iterations", 1)
        batches = {"GRPOTrainer": [], "G2RLTrainer": []}  # seconds of every generation batch
        features = []  # seconds that the features take, per generation batch
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
            for start in range(steps_per_batch, len(logs), steps_per_batch):  # the first batch warms up
                batch_logs = logs[start : start + steps_per_batch]
                batches[trainer_class.__name__].append(sum(log["step_time"] for log in batch_logs))
            for log in logs[1:]:
                if "geometry/feature_seconds" in log:
                    features.append(log["geometry/feature_seconds"])
        grpo, g2rl = statistics.median(batches["GRPOTrainer"]), statistics.median(batches["G2RLTrainer"])
        feature_seconds = statistics.median(features)
        share = feature_seconds / g2rl
        print(f"  GRPO {grpo:.3f} s, G2RL {g2rl:.3f} s (medians of", end=" ")
        print(f"{len(batches['G2RLTrainer'])} generation batches each, {steps_per_batch} step(s) per batch),", end=" ")
        print(f"features {feature_seconds:.3f} s = {100 * share:.1f} %;", end=" ")
        print(f"ratio {g2rl / grpo:.3f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--rows", type=int, default=1, help="rows of the table's cases")
    parser.add_argument("--width", type=int, default=512, help="size of the hidden states of the table's cases")
    parser.add_argument("--dtype", default="float32", help="type of the hidden states of the table's cases")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4, help="a run has twice this number of training steps")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each trainer")
    parser.add_argument("--completion_length", type=int, default=32, help="maximum completion length in training")
    parser.add_argument("--way", default=None, help="run one case of the table only: tiles or naive")
    parser.add_argument("--vocabulary", type=int, default=32_768, help="with --way")
    parser.add_argument("--tokens", type=int, default=1024, help="with --way")
    args = parser.parse_args()
    if args.way is not None:
        one_case(args)
        return
    compare(args)
    steps(args)


if __name__ == "__main__":
    main()
