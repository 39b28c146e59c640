"""Passages of a corpus: what a row of one looks like, and files that hold them."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from datasets import Dataset

READERS = {".jsonl": "json", ".parquet": "parquet"}  # builder of `datasets.load_dataset` for each kind of file
QUOTED_TITLE = re.compile(r'"([^\n]*)"\n(.*)', re.DOTALL)


class Corpus(Protocol):
    """Rows as [`load_corpus`] gives them; a list of dictionaries is one too."""

    def __len__(self) -> int: ...

    def __getitem__(self, position: int, /) -> Mapping[str, Any]: ...

    def __iter__(self) -> Iterator[Any]: ...


@dataclass(frozen=True)
class Passage:
    """A passage that was found."""

    id: str
    title: str  # on one line; empty if there is none
    text: str  # without the title
    score: float  # higher is better; comparable only between results of one retriever

    @property
    def contents(self) -> str:
        """Title and text in Search-R1's form: the title in quotes on the first line."""
        return f'"{self.title}"\n{self.text}'


def read_passage(row: Mapping[str, Any], *, default_id: str, score: float = 0.0) -> Passage:
    """Passage of a row: `text` and `title`, or Search-R1's `contents`, whose first line may be the title in quotes.
    `default_id` stands for an `id` that is missing."""
    title, text = row.get("title"), row.get("text")
    if text is None:
        text = row.get("contents")
        quoted = QUOTED_TITLE.fullmatch(text) if isinstance(text, str) else None
        title, text = quoted.groups() if quoted else (title, text)
    if not isinstance(text, str) or not text.strip():
        raise ValueError(
            f"no text: a row needs a non-empty string in `text` or `contents`, and has {', '.join(row)}; rename the "
            "column that holds the text, or drop rows without any."
        )
    name = default_id if row.get("id") is None else str(row["id"])
    return Passage(name, " ".join(str(title or "").split()), text.strip(), score)


def load_corpus(path: str | Path) -> "Dataset":
    """
    Load and check a corpus.

    Args:
        path (`str` or `Path`):
            A `.jsonl` or `.parquet` file with one passage per row: see [`read_passage`].

    Returns:
        [`~datasets.Dataset`]: The rows as they are in the file, on disk rather than in memory.

    Raises:
        ValueError: If the file cannot be read, is empty, or has a row without text; it names the place and a remedy.
    """
    import datasets

    path = Path(path).expanduser()
    if path.suffix not in READERS:
        raise ValueError(f"{path}: a corpus is a file that ends with {' or '.join(READERS)}; convert it.")
    if not path.is_file():
        raise ValueError(f"{path} does not exist (looked from {Path.cwd()}): check the path.")
    try:
        corpus = datasets.load_dataset(READERS[path.suffix], data_files=str(path), split="train")
    except Exception as error:  # whatever the readers of all formats raise, StopIteration for an empty file included
        why = _bad_line(path) or f"{error.__cause__ or error!r}; it may have no rows."
        raise ValueError(f"{path} cannot be read: {why}") from error
    for number, row in enumerate(corpus, 1):
        try:
            read_passage(row, default_id="")
        except ValueError as error:
            raise ValueError(f"{path}, row {number}: {error}") from None
    return corpus


def _bad_line(path: Path) -> str | None:
    """What is wrong with lines that could not be read, where the reader's own message does not help."""
    if path.suffix != ".jsonl":
        return None
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                if not isinstance(json.loads(line), dict):
                    return f'line {number} is not an object such as {{"text": ...}}; write one per line.'
            except ValueError as error:
                return f"line {number} is not JSON ({error}); repair or drop it."
    return None
