"""Fingerprints of models and tokenizers, for files that depend on one of them."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NUM_PROBES = 256


def digest(parts: Iterable[bytes]) -> str:
    """Return the first 16 hexadecimal digits of a SHA-256 over byte strings and their lengths."""
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8) + part)
    return found.hexdigest()[:16]


def weight_probes(model: torch.nn.Module) -> Iterator[bytes]:
    """Yield a few hundred numbers of each parameter as bytes, which change in every training step. Sharded parameters
    are gathered, so all processes must call this."""
    for parameter in model.parameters():
        values: torch.Tensor = parameter
        if isinstance(parameter, DTensor):
            values = parameter.full_tensor()
        flat = values.detach().flatten()
        yield flat[:: max(1, flat.numel() // NUM_PROBES)].cpu().contiguous().view(torch.uint8).numpy().tobytes()


def folder_probes(folder: Path) -> Iterator[bytes]:
    """Yield the names and sizes of the weight files of a saved model, and some of their bytes, without loading it."""
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        size = path.stat().st_size
        with open(path, "rb") as file:
            yield f"{path.name} {size}".encode()
            for start in range(0, size, max(64, size // NUM_PROBES)):
                file.seek(start)
                yield file.read(64)


def tokenizer_fingerprint(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return a SHA-256 of the vocabulary and the special tokens. It is equal for tokenizers whose ids have the same
    meaning."""
    vocabulary = tokenizer.get_vocab() | tokenizer.get_added_vocab()
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    if pad is None:
        pad = eos  # trainers set this padding token themselves, which must not change the fingerprint
    meaning = [sorted(vocabulary.items()), eos, pad]
    return hashlib.sha256(json.dumps(meaning).encode()).hexdigest()
