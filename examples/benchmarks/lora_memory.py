"""Calculate the GPU memory of training with LoRA and QLoRA from the shape of the model, without a measurement.

    python examples/benchmarks/lora_memory.py
    python examples/benchmarks/lora_memory.py --rows 4 --sampled_rows 64 --prompt 512 --completion 1024 --rank 16

The formulas are in the functions below. They leave out the CUDA context, fragmentation, buffers of kernels, and the
weights of one layer that bitsandbytes unpacks at a time. So add two GiB to the result. For another model, add a line
to `MODELS`.
"""

import argparse
from dataclasses import dataclass

GIB = 2**30
BF16, FP32 = 2, 4  # bytes
# TRL never computes all logits at once. It computes log-probabilities on tiles with this maximum number of tokens and
# of entries of the vocabulary.
TILE_TOKENS, TILE_WORDS = 4096, 32768


@dataclass
class Shape:
    """Shape of a Qwen2 model."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool
    head_size: int = 128

    @property
    def linears(self):
        """Input and output sizes of the linear modules of a layer."""
        q, kv = self.heads * self.head_size, self.kv_heads * self.head_size
        return [
            (self.hidden, q),
            (self.hidden, kv),  # k
            (self.hidden, kv),  # v
            (q, self.hidden),  # o
            (self.hidden, self.intermediate),  # gate
            (self.hidden, self.intermediate),  # up
            (self.intermediate, self.hidden),  # down
        ]

    @property
    def linear_weights(self):
        """Number of weights of all linear modules, which QLoRA quantizes."""
        return self.layers * sum(i * o for i, o in self.linears)

    @property
    def other_weights(self):
        """Number of weights that QLoRA does not quantize: embeddings, head, norms, and biases of q, k and v."""
        embeddings = self.vocabulary * self.hidden
        if not self.tied:
            embeddings *= 2
        biases = (self.heads + 2 * self.kv_heads) * self.head_size
        norms = 2 * self.hidden
        return embeddings + self.layers * (norms + biases) + self.hidden

    def adapter(self, rank):
        """Return the number of weights of LoRA on all linear modules."""
        return self.layers * sum(rank * (i + o) for i, o in self.linears)


MODELS = {
    "Qwen2.5-1.5B": Shape(1536, 8960, 28, 12, 2, 151_936, tied=True),
    "Qwen2.5-7B": Shape(3584, 18_944, 28, 28, 4, 152_064, tied=False),
}


def memory(shape, *, quantized, rank, rows, sampled_rows, prompt, completion):
    """
    Return the bytes of each part of the memory.

    Args:
        shape: Shape of the model.
        quantized: If `True`, linear modules are in NF4 with nested quantization (4.127 bits per weight). Otherwise,
            they are in bfloat16.
        rank: Rank of LoRA on all linear modules.
        rows: `per_device_train_batch_size`.
        sampled_rows: Rows of one `generate` call: `rows` x `steps_per_generation`, or `sampling_batch_size`.
        prompt: Tokens of a prompt.
        completion: Tokens of a completion.
    """
    tokens = prompt + completion
    # NF4 has a scale of 8 bits for 64 weights, and a scale of 32 bits for 256 of these scales.
    bits = 4 + 8 / 64 + 32 / (64 * 256) if quantized else 16
    weights = shape.linear_weights * bits / 8 + shape.other_weights * BF16
    # PEFT keeps the adapters of a bfloat16 model in float32. TRL casts the adapters of a quantized model to bfloat16.
    adapter = shape.adapter(rank) * (BF16 if quantized else FP32)
    # Gradient checkpointing keeps the input of every layer, and recomputes one layer at a time. A recomputed layer has
    # about 16 vectors of size `hidden` and 8 of size `intermediate` per token, including copies by LoRA's dropout.
    kept = rows * tokens * shape.hidden * shape.layers * BF16
    recomputed = rows * tokens * (16 * shape.hidden + 8 * shape.intermediate) * BF16
    tile = min(rows * completion, TILE_TOKENS) * min(shape.vocabulary, TILE_WORDS) * BF16
    # The factor 2 is for keys and values.
    cache = sampled_rows * tokens * shape.layers * 2 * shape.kv_heads * shape.head_size * BF16
    # Logits of the last position in bfloat16 and in float32, and their probabilities in float32.
    last_logits = sampled_rows * shape.vocabulary * (BF16 + 2 * FP32)
    return {
        "weights": weights,
        "adapter": adapter,
        "its gradient": adapter,
        "AdamW": 2 * adapter,
        "activations": kept + recomputed,
        "logits, training": tile,
        "KV cache": cache,
        "logits, sampling": last_logits,
    }


def peak(parts):
    """Return the bytes at the peak. Sampling and training never hold their memory at the same time."""
    always = sum(parts[name] for name in ("weights", "adapter", "its gradient", "AdamW"))
    training = parts["activations"] + parts["logits, training"]
    return always + max(training, parts["KV cache"] + parts["logits, sampling"])


def table(**setting):
    """Return the table of `docs/memory.md`, in GiB. `setting` has the arguments of [`memory`] except for shape and
    quantization."""
    columns = {}
    for model, shape in MODELS.items():
        columns[f"{model}, LoRA"] = memory(shape, quantized=False, **setting)
        columns[f"{model}, QLoRA"] = memory(shape, quantized=True, **setting)
    lines = [f"| GiB | {' | '.join(columns)} |", "| --- |" + " --- |" * len(columns)]
    first_column = next(iter(columns.values()))
    for name in first_column:
        cells = [f"{parts[name] / GIB:.2f}" for parts in columns.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    peaks = [f"**{peak(parts) / GIB:.1f}**" for parts in columns.values()]
    lines.append(f"| **peak** | {' | '.join(peaks)} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=16, help="rank of LoRA")
    parser.add_argument("--rows", type=int, default=4, help="per_device_train_batch_size")
    parser.add_argument("--sampled_rows", type=int, default=64, help="rows of one generate call")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--completion", type=int, default=1024, help="tokens of a completion")
    print(table(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
