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
    """
    Short hash of a sequence of byte strings.

    Args:
        parts (`Iterable[bytes]`):
            The strings; where one ends and the next begins counts.

    Returns:
        `str`: 16 hexadecimal digits of SHA-256.
    """
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8) + part)
    return found.hexdigest()[:16]


def weight_probes(model: torch.nn.Module) -> Iterator[bytes]:
    """
    A few hundred numbers of each parameter: any training step changes some of them.

    Args:
        model (`torch.nn.Module`):
            The model; with sharded parameters every process must take part.

    Yields:
        `bytes`: Those of one parameter.
    """
    for parameter in model.parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        flat = whole.detach().flatten()
        yield flat[:: max(1, flat.numel() // NUM_PROBES)].cpu().contiguous().view(torch.uint8).numpy().tobytes()


def folder_probes(folder: Path) -> Iterator[bytes]:
    """
    The same of a saved model, without loading it: names, sizes and some bytes of the files with weights.

    Args:
        folder (`Path`):
            Folder that `save_pretrained` wrote.

    Yields:
        `bytes`: Those of one file.
    """
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        size = path.stat().st_size
        with open(path, "rb") as file:
            yield f"{path.name} {size}".encode()
            for start in range(0, size, max(64, size // NUM_PROBES)):
                file.seek(start)
                yield file.read(64)


def tokenizer_fingerprint(tokenizer: "PreTrainedTokenizerBase") -> str:
    """
    What token ids mean, in one line: equal for tokenizers that give every id the same meaning.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            The tokenizer.

    Returns:
        `str`: SHA-256 over the vocabulary with the added tokens, and the ids of the end and the padding.
    """
    vocabulary = tokenizer.get_vocab() | tokenizer.get_added_vocab()
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    # Trainers pad with the end token where there is no other: the fingerprint is the same before and after that.
    meaning = [sorted(vocabulary.items()), eos, eos if pad is None else pad]
    return hashlib.sha256(json.dumps(meaning).encode()).hexdigest()
