"""Short names for long things, so that a file can say what it was made from."""

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
    """16 hexadecimal digits of SHA-256 over byte strings; where one ends and the next begins counts."""
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8) + part)
    return found.hexdigest()[:16]


def weight_probes(model: torch.nn.Module) -> Iterator[bytes]:
    """A few hundred numbers of each parameter, which any training step changes; of sharded ones on every process."""
    for parameter in model.parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        flat = whole.detach().flatten()
        yield flat[:: max(1, flat.numel() // NUM_PROBES)].cpu().contiguous().view(torch.uint8).numpy().tobytes()


def folder_probes(folder: Path) -> Iterator[bytes]:
    """The same of a saved model, without loading it: names, sizes and some bytes of the files with weights."""
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        size = path.stat().st_size
        with open(path, "rb") as file:
            yield f"{path.name} {size}".encode()
            for start in range(0, size, max(64, size // NUM_PROBES)):
                file.seek(start)
                yield file.read(64)


def tokenizer_fingerprint(tokenizer: "PreTrainedTokenizerBase") -> str:
    """SHA-256 of what token ids mean: equal for tokenizers that give every id the same meaning."""
    vocabulary = tokenizer.get_vocab() | tokenizer.get_added_vocab()
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    # Trainers pad with the end token where there is no other: the fingerprint is the same before and after that.
    meaning = [sorted(vocabulary.items()), eos, eos if pad is None else pad]
    return hashlib.sha256(json.dumps(meaning).encode()).hexdigest()
