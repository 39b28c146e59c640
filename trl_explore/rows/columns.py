"""Columns of the rows of a data set. A transform may make or drop columns while a row is read."""

from typing import Any

from datasets import Dataset, IterableDataset


def row_columns(data: Any) -> list[str] | None:
    """
    Return the names of the columns that rows have when they are read.

    The stored columns are not enough: `Dataset.with_transform` and `Dataset.with_format` can make other columns of
    them. So one row is read wherever the stored columns could be wrong.

    Args:
        data ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]):
            The data set.

    Returns:
        `list[str]` or `None`: The names. None for a stream whose columns are not known yet.
    """
    stored = data.column_names
    if isinstance(data, IterableDataset):
        if stored is None or "prompt" in stored:
            return stored
        first = next(iter(data), None)
        return stored if first is None else [*first]
    if not isinstance(data, Dataset) or not len(data):
        return stored
    layout = data.format
    if layout["type"] is None and set(layout["columns"]) == set(stored):
        return stored
    return [*data[0]]


def prompts_of(data: Dataset, most: int) -> list[Any]:
    """Return the prompts of the first `most` rows, as they are when the rows are read."""
    size, step = min(most, len(data)), 1000
    return [prompt for start in range(0, size, step) for prompt in data[start : min(start + step, size)]["prompt"]]
