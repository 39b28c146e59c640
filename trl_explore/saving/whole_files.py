"""Files that are either whole or not there, and files that only grow."""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """Yields what to write: it becomes the file at the block's end; until then the file is as it was."""
    path = Path(path)
    part = path.with_name(path.name + ".part")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def append_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Append JSON lines; a line that an earlier interruption cut off is removed first."""
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    data = text.encode(errors="backslashreplace")  # half a surrogate pair, as JSON writes it
    if not data:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - 1, 0))
        if file.read(1) not in (b"\n", b""):
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def file_size(path: Path) -> int:
    """Bytes of a file; 0 where there is none."""
    return path.stat().st_size if path.is_file() else 0


def cut_file(path: Path, size: int) -> None:
    """Take a file back to an earlier length; a shorter or missing one stays as it is."""
    if file_size(path) > size:
        os.truncate(path, size)


class MethodFile:
    """A file that a method appends to and a resumed run takes back to its checkpoint; `path=None`: there is none."""

    def __init__(self, path: Path | None, *, writes: bool = True) -> None:
        self.path, self._writes = path, writes and path is not None

    @property
    def size(self) -> int:
        """Bytes, for the checkpoint: what comes after them is written again by a run that goes on from there."""
        return 0 if self.path is None else file_size(self.path)

    def append(self, records: Iterable[dict[str, Any]]) -> None:
        """Append JSON objects, one per line."""
        if self._writes:
            assert self.path is not None
            append_lines(self.path, records)

    def may_resume(self, size: int) -> bool:
        """Whether the file still has all that a checkpoint with this size knew of, and that was something."""
        return 0 < size <= self.size

    def cut_back(self, size: int) -> None:
        """Take the file back to the size in a checkpoint; a shorter or missing one stays as it is."""
        if self._writes:
            assert self.path is not None
            cut_file(self.path, size)
