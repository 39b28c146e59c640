"""Columns of the rows of a data set. A transform may make or drop columns while a row is read."""

from typing import Any

from datasets import Dataset, IterableDataset

from trl_explore.names import prompt_change


def row_columns(data: Any) -> list[str] | None:
    """
    Return the names of the columns that rows have when they are read.

    The stored columns are not enough: `Dataset.with_transform` and `Dataset.with_format` can change the columns. So
    read one row if its columns may differ from the stored columns.

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


def check_prompts(data: Dataset) -> None:
    """
    Check that a data set has rows, and that they have a column `prompt`.

    Raises:
        ValueError: If not. The message names the columns and a line of code that renames one.
    """
    columns = row_columns(data) or []
    found = f"dataset must have rows and a column `prompt`, got {len(data)} rows with {columns}"
    if not len(data):
        raise ValueError(f"{found}.")
    if "prompt" not in columns:
        raise ValueError(f"{found}; rename a column first, for example: dataset = dataset{prompt_change(columns)}")


def prompts_of(data: Dataset, most: int) -> list[Any]:
    """Return the prompts of the first `most` rows. Read the rows, because a transform may make the prompts."""
    size, step = min(most, len(data)), 1000
    prompts: list[Any] = []
    for start in range(0, size, step):
        prompts.extend(data[start : min(start + step, size)]["prompt"])
    return prompts
