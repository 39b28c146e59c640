"""What LoRA and QLoRA training of a model takes on one GPU: arithmetic from the model's shape, not a measurement.

    python examples/benchmarks/lora_memory.py
    python examples/benchmarks/lora_memory.py --rows 4 --sampled_rows 64 --prompt 512 --completion 1024 --rank 16

The formulas are the functions below. They leave out what the CUDA context, fragmentation and buffers of kernels take,
and a layer's weights while bitsandbytes unpacks them: plan with two GiB more. Other models: add a line to `MODELS`.
"""

import argparse
from dataclasses import dataclass

GIB = 2**30
BF16, FP32 = 2, 4
# TRL computes log-probabilities on tiles of so many tokens times so many words, never on all logits at once.
TILE_TOKENS, TILE_WORDS = 4096, 32768


@dataclass
class Shape:
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
        """Inputs and outputs of a layer's linear maps: q, k, v, o, gate, up, down."""
        q, kv = self.heads * self.head_size, self.kv_heads * self.head_size
        attention = [(self.hidden, q), (self.hidden, kv), (self.hidden, kv), (q, self.hidden)]
        return [*attention, (self.hidden, self.intermediate), (self.hidden, self.intermediate)] + [
            (self.intermediate, self.hidden)
        ]

    @property
    def linear_weights(self):
        return self.layers * sum(i * o for i, o in self.linears)

    @property
    def other_weights(self):
        """Embeddings, head, norms, biases of q, k and v: not quantised."""
        biases = (self.heads + 2 * self.kv_heads) * self.head_size
        per_layer = 2 * self.hidden + biases
        return self.vocabulary * self.hidden * (1 if self.tied else 2) + self.layers * per_layer + self.hidden

    def adapter(self, rank):
        return self.layers * sum(rank * (i + o) for i, o in self.linears)


MODELS = {
    "Qwen2.5-1.5B": Shape(1536, 8960, 28, 12, 2, 151_936, tied=True),
    "Qwen2.5-7B": Shape(3584, 18_944, 28, 28, 4, 152_064, tied=False),
}


def memory(shape, *, quantized, rank, rows, sampled_rows, prompt, completion):
    """
    Bytes by what they are for.

    Args:
        quantized: NF4 with nested quantisation (4.127 bits per weight of a linear map), else bfloat16.
        rank: Rank of LoRA on all linear maps.
        rows: `per_device_train_batch_size`.
        sampled_rows: Rows that one `generate` call samples: `rows` x `steps_per_generation`, or `sampling_batch_size`.
        prompt, completion: Tokens.
    """
    tokens = prompt + completion
    bits = 4 + 8 / 64 + 32 / (64 * 256) if quantized else 16
    weights = shape.linear_weights * bits / 8 + shape.other_weights * BF16
    # PEFT keeps adapters of a bfloat16 model in float32; TRL turns those of a quantised one into bfloat16.
    adapter = shape.adapter(rank) * (BF16 if quantized else FP32)
    # Gradient checkpointing keeps the input of every layer, and recomputes one layer at a time: roughly 16 vectors of
    # the width and 8 of the feed-forward's per token, with the inputs that LoRA's dropout copies.
    kept = rows * tokens * shape.hidden * shape.layers * BF16
    recomputed = rows * tokens * (16 * shape.hidden + 8 * shape.intermediate) * BF16
    tile = min(rows * completion, TILE_TOKENS) * min(shape.vocabulary, TILE_WORDS) * BF16
    # Two of everything, keys and values; the last position's logits in bfloat16, float32, and as probabilities.
    cache = sampled_rows * tokens * shape.layers * 2 * shape.kv_heads * shape.head_size * BF16
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
    """Sampling and training take turns: what is always there, and the larger of the two."""
    always = sum(parts[name] for name in ("weights", "adapter", "its gradient", "AdamW"))
    training = parts["activations"] + parts["logits, training"]
    return always + max(training, parts["KV cache"] + parts["logits, sampling"])


def table(**setting):
    """The table of `docs/memory.md`, in GiB."""
    columns = {
        f"{model}, {'QLoRA' if quantized else 'LoRA'}": memory(shape, quantized=quantized, **setting)
        for model, shape in MODELS.items()
        for quantized in (False, True)
    }
    rows = [f"| GiB | {' | '.join(columns)} |", "| --- |" + " --- |" * len(columns)]
    for name in next(iter(columns.values())):
        rows.append(f"| {name} | " + " | ".join(f"{parts[name] / GIB:.2f}" for parts in columns.values()) + " |")
    rows.append("| **peak** | " + " | ".join(f"**{peak(parts) / GIB:.1f}**" for parts in columns.values()) + " |")
    return "\n".join(rows)


def main():
    parser = argparse.ArgumentParser()
    for name, value in dict(rank=16, rows=4, sampled_rows=64, prompt=512, completion=1024).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    print(table(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
