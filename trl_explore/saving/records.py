"""Files of records: JSON lines after a header with the kind of the records and the settings of their run."""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from trl_explore.saving.whole_files import whole_file

FORMAT = 1


class FileRefusedError(ValueError):
    """A file has another kind or other settings than expected, or another program has changed it."""


def write_records(path: str | Path, kind: str, header: dict[str, Any], records: Iterable[dict[str, Any]] = ()) -> None:
    """
    Write a header and records as JSON lines. If the write is interrupted, the previous file is unchanged.

    Args:
        path (`str` or `Path`):
            The file.
        kind (`str`):
            Kind of the records, such as "completions".
        header (`dict[str, Any]`):
            Settings that the records depend on.
        records (`Iterable[dict[str, Any]]`, *optional*):
            The records.
    """
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
    """
    Read a file of [`write_records`], without an incomplete last line.

    Args:
        path (`str` or `Path`):
            The file.
        kind (`str`):
            Expected kind of the records.
        is_valid (`Callable`):
            Function that returns whether a record has the expected entries.

    Returns:
        `tuple`: Header and records.

    Raises:
        FileRefusedError: If the file has another kind or format, or a record is not valid.
    """
    # The text after the last newline is empty or an incomplete line, which `append_lines` would also remove.
    lines = Path(path).read_bytes().split(b"\n")[:-1]
    try:
        header = json.loads(lines[0])
        found_kind, found_format = header["kind"], header["format"]
    except (ValueError, LookupError, TypeError):
        found_kind = found_format = None
    if found_kind != kind:
        raise FileRefusedError(f"{path} is not a file of {kind}: its header has another kind. Name another file.")
    if found_format != FORMAT:
        raise FileRefusedError(
            f"{path} has format {found_format!r} of {kind}, and this version reads format {FORMAT}. Delete it, or "
            "name another file."
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
    """
    Raise a FileRefusedError if the header of a file has other settings than this run.

    Args:
        path (`Path`):
            The file.
        what (`str`):
            Noun in the plural for the records, such as "completions", for the message.
        header (`dict[str, Any]`):
            Header of the file.
        settings (`dict[str, Any]`):
            Settings of this run.
        remedy (`str`):
            Sentence that ends the message.
        hashed (`Mapping[str, str]`, *optional*):
            Descriptions, by name, of settings that the header contains as hashes. The message shows the description
            instead of the hash.
    """
    changes = []
    for name, value in settings.items():
        if header.get(name) == value:
            continue
        if name in hashed:
            changes.append(f"other {name} ({hashed[name]})")
        else:
            changes.append(f"{name}={header.get(name)!r}, now {value!r}")
    if changes:
        raise FileRefusedError(f"{path} holds {what} of other settings: {'; '.join(changes)}. {remedy}")
