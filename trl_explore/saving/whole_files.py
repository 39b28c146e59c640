"""Files that are written completely or not at all, and files to which lines are appended."""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """Yield a path to write to. At the end of the `with` block, this file replaces the file `path`. If an exception
    ends the block, the file `path` is unchanged."""
    path = Path(path)
    part = path.with_name(path.name + ".part")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def append_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Append records as JSON lines. First remove an incomplete last line, which an interrupted call leaves."""
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    data = text.encode(errors="backslashreplace")  # a lone surrogate has no UTF-8; JSON escapes it in this way
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
    """Return the size of a file in bytes, or 0 if it does not exist."""
    if not path.is_file():
        return 0
    return path.stat().st_size


def cut_file(path: Path, size: int) -> None:
    """Cut a file to `size` bytes. A shorter or missing file is not changed."""
    if file_size(path) > size:
        os.truncate(path, size)


class MethodFile:
    """
    A file to which a method appends records. A resumed run cuts it to its size at the checkpoint.

    Args:
        path (`Path`, *optional*):
            The file. None if the method writes no file.
        writes (`bool`, *optional*, defaults to `True`):
            If `True`, this process writes to the file.
    """

    def __init__(self, path: Path | None, *, writes: bool = True) -> None:
        self.path, self._writes = path, writes and path is not None

    @property
    def size(self) -> int:
        """Size in bytes, for the checkpoint. Later records are cut off and written again by a run that resumes."""
        if self.path is None:
            return 0
        return file_size(self.path)

    def append(self, records: Iterable[dict[str, Any]]) -> None:
        """Append records as JSON lines."""
        if self._writes:
            assert self.path is not None
            append_lines(self.path, records)

    def may_resume(self, size: int) -> bool:
        """Return whether a resumed run can cut the file to `size`, its size in a checkpoint, and append to it. If the
        size is 0, the checkpoint has no usable file."""
        return 0 < size <= self.size

    def cut_back(self, size: int) -> None:
        """Cut the file to its size in a checkpoint. A shorter or missing file is not changed."""
        if self._writes:
            assert self.path is not None
            cut_file(self.path, size)
