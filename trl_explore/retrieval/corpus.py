"""Passages of a corpus: the format of a row, and loading from files."""

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
    """Rows of passages, such as the result of [`load_corpus`] or a list of dictionaries."""

    def __len__(self) -> int: ...

    def __getitem__(self, position: int, /) -> Mapping[str, Any]: ...

    def __iter__(self) -> Iterator[Any]: ...


@dataclass(frozen=True)
class Passage:
    """
    A result of a search.

    Args:
        id (`str`):
            Identifier of the passage.
        title (`str`):
            Title on one line. Empty if there is none.
        text (`str`):
            Text without the title.
        score (`float`):
            Score of the retriever. Higher is better. Comparable only between results of one retriever.
    """

    id: str
    title: str
    text: str
    score: float

    @property
    def contents(self) -> str:
        """Title and text in Search-R1's form: the title in quotes on the first line."""
        return f'"{self.title}"\n{self.text}'


def read_passage(row: Mapping[str, Any], *, default_id: str, score: float = 0.0) -> Passage:
    """
    Read a passage from a row of a corpus.

    Args:
        row (`Mapping[str, Any]`):
            A row with `text` and optionally `title`, or with Search-R1's `contents`, whose first line may be the title
            in quotes. `id` is optional.
        default_id (`str`):
            Identifier if the row has no `id`.
        score (`float`, *optional*, defaults to `0.0`):
            Score of the passage.

    Returns:
        `Passage`: The passage.

    Raises:
        `ValueError`: If the row has no text.
    """
    title, text = row.get("title"), row.get("text")
    if text is None:
        text = row.get("contents")
        if isinstance(text, str) and (quoted := QUOTED_TITLE.fullmatch(text)):
            title, text = quoted.groups()
    if not isinstance(text, str) or not text.strip():
        raise ValueError(
            f"no text: a row needs a non-empty string in `text` or `contents`, and has {', '.join(row)}; rename the "
            "column that holds the text, or drop rows without any."
        )
    passage_id = default_id
    if row.get("id") is not None:
        passage_id = str(row["id"])
    return Passage(passage_id, " ".join(str(title or "").split()), text.strip(), score)


def load_corpus(path: str | Path) -> "Dataset":
    """
    Load and check a corpus.

    Args:
        path (`str` or `Path`):
            A `.jsonl` or `.parquet` file with one passage per row: see [`read_passage`].

    Returns:
        [`~datasets.Dataset`]: The unchanged rows of the file, memory-mapped from disk.

    Raises:
        `ValueError`: If the file cannot be read, is empty, or has a row without text. The message has the number of
            the row.
    """
    import datasets

    path = Path(path).expanduser()
    if path.suffix not in READERS:
        raise ValueError(f"{path}: a corpus is a file that ends with {' or '.join(READERS)}; convert it.")
    if not path.is_file():
        raise ValueError(f"{path} does not exist (looked from {Path.cwd()}): check the path.")
    try:
        corpus = datasets.load_dataset(READERS[path.suffix], data_files=str(path), split="train")
    except Exception as error:  # each file format raises its own errors, and an empty file StopIteration
        cause = error.__cause__ or error
        why = _bad_line(path) or f"{cause!r}; it may have no rows."
        raise ValueError(f"{path} cannot be read: {why}") from error
    for number, row in enumerate(corpus, 1):
        try:
            read_passage(row, default_id="")
        except ValueError as error:
            raise ValueError(f"{path}, row {number}: {error}") from None
    return corpus


def _bad_line(path: Path) -> str | None:
    """Describe the first line of a `.jsonl` file that is not a JSON object, because the reader's error does not."""
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
