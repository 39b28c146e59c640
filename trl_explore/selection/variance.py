"""PODS: train only the rows of a group whose rewards have the largest variance."""

import math
from random import Random
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from trl_explore.trainers.config import ExplorationConfig

TRAINED = "trained_rows"  # entry of the main rows of a batch: mask of the rows to train, `(B,)`


def largest_variance(rewards: torch.Tensor, number: int, *, random: Random) -> torch.Tensor:
    """
    Return the mask `(P, G)` of the `number` rows of each group whose rewards have the largest variance.

    Such a set consists of the rows with the largest rewards and the rows with the smallest rewards (PODS,
    https://huggingface.co/papers/2504.13818). Of rows with the same reward, random ones are taken.

    Args:
        rewards (`torch.Tensor`):
            Total rewards, `(P, G)`. NaN if a row has no reward. Such a row is only taken if there are not enough
            others.
        number (`int`):
            Number of rows to take from each group, from 1 to G.
        random (`random.Random`):
            Source of the random choices.
    """
    mask = torch.zeros_like(rewards, dtype=torch.bool)
    for group, values in enumerate(rewards.tolist()):
        rows = [row for row, value in enumerate(values) if not math.isnan(value)]
        unscored = [row for row, value in enumerate(values) if math.isnan(value)]
        random.shuffle(rows)
        rows.sort(key=values.__getitem__)  # stable: rows with the same reward stay in random order
        if len(rows) <= number:
            chosen = rows + unscored[: number - len(rows)]
        else:
            chosen = _ends(rows, values, number)
        mask[group, chosen] = True
    return mask


def _ends(rows: list[int], values: list[float], number: int) -> list[int]:
    """Return `number` of `rows`, which are sorted by their values: some from each end, so that the variance of their
    values is largest."""
    largest, best = -1.0, rows[:number]
    for num_low in range(number + 1):
        chosen = rows[:num_low] + rows[len(rows) - (number - num_low) :]
        mean = sum(values[row] for row in chosen) / number
        variance = sum((values[row] - mean) ** 2 for row in chosen) / number
        if variance > largest:
            largest, best = variance, chosen
    return best


def check_trained_generations(args: "ExplorationConfig") -> None:
    """Raise a ValueError if `trained_generations` is impossible, or does not work with another field. `args` may be
    the configuration of any method."""
    number, size = args.trained_generations, args.num_generations
    if number is None:
        return
    field = f"`trained_generations={number!r}`"
    if isinstance(number, bool) or not isinstance(number, int) or not 2 <= number <= size:
        raise ValueError(
            f"{field} must be a whole number from 2 to `num_generations={size}`, or None to train all rows."
        )
    if args.multi_objective_aggregation == "normalize_then_sum":
        raise ValueError(
            f"{field} compares total rewards, which `multi_objective_aggregation='normalize_then_sum'` never forms: "
            "set that to 'sum_then_normalize', or leave `trained_generations` out."
        )
    if args.budget != "uniform":
        raise ValueError(
            f"{field} and `budget={args.budget!r}` both decide how many rows of a prompt are trained: leave one of "
            "them out."
        )
    rows = args.per_device_train_batch_size
    if rows * number % size:
        raise ValueError(
            f"{field} of `num_generations={size}` would train {rows * number / size:g} rows of a micro-batch of "
            f"`per_device_train_batch_size={rows}`. Make `per_device_train_batch_size` times `trained_generations` a "
            "multiple of `num_generations`."
        )
