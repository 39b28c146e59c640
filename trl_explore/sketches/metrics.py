"""Metrics of a batch that SESA sampled, and the right answers that the metric `sketch/coverage` compares with."""

from typing import Any

from datasets import Dataset

# If pass@G / pass@1 is smaller than this, the samples of a prompt succeed or fail together.
COLLAPSE_RATIO = 1.05


def group_metrics(total: dict[str, float], *, size: int) -> dict[str, float]:
    """Return metrics by name. `total` has sums over all groups, which have `size` rows each. A mode does not count all
    sums. Metrics whose sums are missing are left out."""
    metrics: dict[str, float] = {}
    groups = total["groups"]
    for name in ("distinct", "similarity", "empty"):
        metrics[f"sketch/{name}"] = total[name] / max(total["lists"], 1)
    if "trajectories" in total:
        metrics["agent/trajectories"] = total["trajectories"] / groups
        metrics["agent/decisions"] = total["lists"] / groups
        metrics["agent/duplicate_actions"] = total["duplicates"]
    for name in ("tokens", "sampled_tokens", "dropped", "too_long", "repeats", "fillers"):
        if name in total:
            metrics[f"sketch/{name}"] = total[name]
    sketched = total.get("sketched", 0)
    if sketched:
        metrics["sketch/success"] = total["sketched_correct"] / sketched
        metrics["sketch/group_success"] = total["sketched_solved"] / total["sketched_groups"]
    num_plain = groups * size - sketched
    if "sketched" in total and num_plain:
        metrics["sketch/plain_success"] = (total["correct"] - total["sketched_correct"]) / num_plain
    metrics["sketch/token_ratio"] = total["tokens"] / max(total["sampled_tokens"], 1)
    if total["with_targets"]:
        metrics["sketch/coverage"] = total["covered"] / total["with_targets"]
    if total["correct"]:
        pass_at_1 = total["correct"] / (groups * size)
        pass_at_g = total["solved"] / groups
        ratio = pass_at_g / pass_at_1
        metrics["sketch/pass_ratio"] = ratio
        # pass@G is at most 1. So if pass@1 is high, the ratio is small in any case, and is no cause for alarm.
        metrics["sketch/collapse_alarm"] = float(ratio < COLLAPSE_RATIO and pass_at_1 < 1 / COLLAPSE_RATIO)
    return metrics


def read_targets(value: Any, column: str) -> list[str]:
    """
    Return the right answers to a prompt that its row has in `coverage_column`. The list is empty if there are none.

    Raises:
        ValueError: If the value is not a list of texts.
    """
    if value is None:
        return []
    if isinstance(value, list | tuple) and all(isinstance(target, str) for target in value):
        return list(value)
    raise ValueError(
        f"`coverage_column={column!r}` must hold a list of texts in every row, all right answers to its prompt, but "
        f"one row has {str(value)[:100]!r}: name a column of such lists, or leave `coverage_column` out."
    )


def check_coverage_column(
    column: str | None, dataset: Any, *, remove_unused_columns: bool | None, most: int = 10_000
) -> None:
    """Raise a ValueError if a data set has no column of this name, or if one of its first `most` rows has a wrong
    value. Rows of a stream are not checked."""
    if column is None:
        return
    if remove_unused_columns:
        raise ValueError(
            f"`coverage_column={column!r}` cannot be read with `remove_unused_columns=True`, which takes the column "
            "away: set `remove_unused_columns=False`, or leave `coverage_column` out."
        )
    if not isinstance(dataset, Dataset) or not len(dataset):  # `read_targets` checks rows of a stream in training
        return
    first = dataset[0]  # read a row instead of `column_names`, because a transform may add columns
    if column not in first:
        raise ValueError(
            f"`coverage_column={column!r}` is no column of the data, which has {', '.join(first)}: name one of them, "
            "or leave `coverage_column` out."
        )
    values = [first[column]]
    # With a transform (format "custom"), check only the first row, because transforming many rows can take long.
    if column in dataset.column_names and dataset.format["type"] != "custom":
        values = dataset.select(range(min(most, len(dataset))))[column][:]
    for value in values:
        read_targets(value, column)
