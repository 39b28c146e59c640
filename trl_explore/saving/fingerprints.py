"""Fingerprints of models, tokenizers and data sets, for files that depend on one of them."""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import torch
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

NUM_PROBES = 256
MOST_ROWS = 100_000  # the fingerprint of a data set uses at most this number of rows, evenly spaced
ROWS_AT_ONCE = 1000
MEDIA_PROBES = 16  # probes of an image or an audio file, evenly spaced
PROBE_SIZE = 64  # bytes of a probe
TOKENIZER_FILES = ("tokenizer.json", "chat_template.jinja")  # files that determine the tokens of a prompt


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


def saved_model_fingerprint(folder: Path) -> str:
    """Return a digest of the weights and the tokenizer of a saved model, without loading it."""
    tokenizer_files = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    return digest([*folder_probes(folder), *(path.read_bytes() for path in tokenizer_files)])


def model_fingerprint(model: str, *, revision: str | None) -> str | None:
    """Return the fingerprint of a model's folder. For a model of the Hub, return its commit in the local cache, or
    None if it is not in the cache."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    folder = Path(model).expanduser()
    if folder.is_dir():
        return saved_model_fingerprint(folder)
    try:
        cached = try_to_load_from_cache(model, "config.json", revision=revision)
    except HFValidationError:  # the path of a folder that does not exist
        return None
    if not isinstance(cached, str):
        return None
    return Path(cached).parent.name  # the cache has a folder per commit


def rows_fingerprint(rows: "Dataset") -> str:
    """Return a digest of the rows of a data set. If there are more than 100,000 rows, it covers evenly spaced rows. Of
    byte strings, such as images and audio, it covers the size and at most 1,024 bytes, which are not decoded."""
    return digest(_row_probes(rows))


def _row_probes(rows: "Dataset") -> Iterator[bytes]:
    step = max(1, math.ceil(len(rows) / MOST_ROWS))
    stored = rows.with_format("arrow")  # without a transform, which may return other rows every time
    yield str(len(rows)).encode()
    for start in range(0, len(rows), step * ROWS_AT_ONCE):
        places = range(start, min(start + step * ROWS_AT_ONCE, len(rows)), step)
        table = stored[places]
        columns: dict[str, list[Any]] = {}
        for name, column in zip(table.column_names, table.columns, strict=True):
            if _holds_bytes(column.type):
                columns[name] = [_without_media(value) for value in column]
            else:
                columns[name] = column.to_pylist()
        for i in range(table.num_rows):
            row = {name: values[i] for name, values in columns.items()}
            yield repr(row).encode()


def _holds_bytes(kind: pa.DataType) -> bool:
    """Return whether values of an Arrow type are or contain byte strings. `datasets` stores images and audio so."""
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return True
    return any(_holds_bytes(kind.field(i).type) for i in range(kind.num_fields))


def _without_media(value: pa.Scalar) -> Any:
    """Return an Arrow value as a Python value in which each byte string is replaced by its [`_probes`]."""
    if not value.is_valid or not _holds_bytes(value.type):
        return value.as_py()
    if isinstance(value, pa.StructScalar):
        return {name: _without_media(part) for name, part in value.items()}
    if isinstance(value, pa.ListScalar):
        return [_without_media(part) for part in value.values]
    return _probes(value.as_buffer())


def _probes(content: pa.Buffer) -> tuple[int, list[bytes]]:
    """Return the size of a byte string and its probes. The first probe is at its start and the last one at its end. A
    byte string of at most 1,024 bytes is covered completely. Only the probes are copied."""
    last = max(0, content.size - PROBE_SIZE)  # position of the last probe
    starts = [last * i // (MEDIA_PROBES - 1) for i in range(MEDIA_PROBES)]
    return content.size, [content[start : start + PROBE_SIZE].to_pybytes() for start in starts]


def tokenizer_fingerprint(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return a SHA-256 of the vocabulary and the special tokens. It is equal for tokenizers whose ids have the same
    meaning."""
    vocabulary = tokenizer.get_vocab() | tokenizer.get_added_vocab()
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    if pad is None:
        pad = eos  # trainers set this padding token themselves, which must not change the fingerprint
    meaning = [sorted(vocabulary.items()), eos, pad]
    return hashlib.sha256(json.dumps(meaning).encode()).hexdigest()
