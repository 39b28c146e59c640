"""Measure the seconds of sampling several completions per prefix if each prefix is encoded once or once per sample.

    python examples/benchmarks/shared_prefill.py --prefix_tokens 256 --new_tokens 16

A branching method samples many continuations of one prefix. `generate` of transformers encodes the prefix for each of
them. With `trl_explore.sampling.generation.recorded`, `generate` encodes it once. The model has random weights. Both
ways alternate in one process and sample with the same seeds. The output also has the share of sampled tokens that are
equal.
"""

import argparse
import statistics
import time

import torch
import transformers
from transformers import Qwen2Config, Qwen2ForCausalLM

from trl_explore.sampling.generation import recorded


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefixes", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8, help="samples per prefix")
    parser.add_argument("--prefix_tokens", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--new_tokens", type=int, default=16)
    parser.add_argument("--hidden_size", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab_size", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.utils.logging.set_verbosity_error()
    torch.manual_seed(args.seed)
    config = Qwen2Config(
        vocab_size=args.vocab_size,
        hidden_size=args.hidden_size,
        intermediate_size=3 * args.hidden_size,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden_size // 64,
        num_key_value_heads=max(1, args.hidden_size // 256),
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Qwen2ForCausalLM(config).eval().to(device)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters, {device}")
    for length in args.prefix_tokens:
        prefixes = torch.randint(args.vocab_size, (args.prefixes, length), device=device)
        rows = prefixes.repeat_interleave(args.samples, dim=0)
        seconds = {True: [], False: []}  # of each round, by whether rows share the encoding of their prefix
        equal_shares = []
        for round_ in range(args.rounds + 1):
            sampled = {}
            for share in (True, False):
                torch.manual_seed(args.seed + round_)
                start = time.perf_counter()
                with recorded(model, temperature=1.0, entropies=True, share_prefill=share) as record:
                    sampled[share] = model.generate(
                        rows,
                        attention_mask=torch.ones_like(rows),
                        do_sample=True,
                        max_new_tokens=args.new_tokens,
                        eos_token_id=None,
                        pad_token_id=0,
                    )
                if round_ > 0:  # the first round warms up
                    seconds[share].append(time.perf_counter() - start)
                encoded_share = record.encoded_tokens / record.prefill_tokens
                assert encoded_share == (1 / args.samples if share else 1)
            equal_shares.append((sampled[True] == sampled[False]).float().mean().item())
        once, each = statistics.median(seconds[True]), statistics.median(seconds[False])
        ratios = []
        for seconds_once, seconds_each in zip(seconds[True], seconds[False], strict=True):
            ratios.append(seconds_each / seconds_once)
        print(
            f"prefix {length:5d}: once {once:.3f} s, per sample {each:.3f} s, ratio {each / once:.2f} "
            f"({min(ratios):.2f}-{max(ratios):.2f}); {100 * statistics.mean(equal_shares):.1f} % of the tokens equal"
        )


if __name__ == "__main__":
    main()
