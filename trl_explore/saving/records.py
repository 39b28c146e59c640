"""Files of records: JSON lines behind a header that says what they hold and what they depend on."""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from trl_explore.saving.whole_files import whole_file

FORMAT = 1


class FileRefusedError(ValueError):
    """A file that was written for something else, or that something else has changed."""


def write_records(path: str | Path, kind: str, header: dict[str, Any], records: Iterable[dict[str, Any]] = ()) -> None:
    """Write a header and records as JSON lines; an interrupted write leaves the old file or none."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as part, open(part, "w", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
        for record in ({"format": FORMAT, "kind": kind, **header}, *records):
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_records(
    path: str | Path, kind: str, *, is_valid: Callable[[dict[str, Any]], bool]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Header and records of a file of [`write_records`]; a last line that an interruption cut off is left out."""
    # The part behind the last newline is empty, or a line that was cut off and that `append_lines` would remove.
    lines = Path(path).read_bytes().split(b"\n")[:-1]
    try:
        header = json.loads(lines[0])
        found = header["kind"], header["format"]
    except (ValueError, LookupError, TypeError):
        found = None, None
    if found[0] != kind:
        raise FileRefusedError(f"{path} is not a file of {kind}: its first line does not say so. Name another file.")
    if found[1] != FORMAT:
        raise FileRefusedError(
            f"{path} has format {found[1]!r} of {kind}, and this version reads format {FORMAT}. Delete it, or name "
            "another file."
        )
    records = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict) or not is_valid(record):
            raise FileRefusedError(f"{path}: line {number} is not one of {kind}. Delete that line, or the file.")
        records.append(record)
    return header, records


def check_same(
    path: Path,
    what: str,
    header: dict[str, Any],
    settings: dict[str, Any],
    remedy: str,
    hashed: Mapping[str, str] = {},
) -> None:
    """Refuse a file whose header says other settings; where these are `hashed`, say what decides them."""
    changes = [
        f"other {name} ({hashed[name]})" if name in hashed else f"{name}={header.get(name)!r}, now {value!r}"
        for name, value in settings.items()
        if header.get(name) != value
    ]
    if changes:
        raise FileRefusedError(f"{path} holds {what} of other settings: {'; '.join(changes)}. {remedy}")
