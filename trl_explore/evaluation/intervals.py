"""Bootstrap intervals of the mean of a benchmark over prompts or seeds."""

import math
from collections.abc import Sequence

import numpy as np

PART = 1000  # resamples at a time, which bounds the memory


def bootstrap_interval(
    values: Sequence[float], *, level: float = 0.95, num_resamples: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """
    Percentile bootstrap interval of the mean of one value per prompt.

    Prompts are resampled with replacement. If all values are equal, the interval has no width.

    Args:
        values (`Sequence[float]`):
            One value per prompt, `(P,)`.
        level (`float`, *optional*, defaults to `0.95`):
            Confidence level, in `(0, 1)`.
        num_resamples (`int`, *optional*, defaults to `10_000`):
            Number of resamples, rounded up to a multiple of 1,000.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the resampling.

    Returns:
        `tuple[float, float]`: Lower and upper end.

    Raises:
        `ValueError`: If there are no values or `level` is outside its range.
    """
    if len(values) == 0:
        raise ValueError("values is empty: an interval needs at least one prompt.")
    # The counts of the distinct values in a resample are multinomial. Sampling these counts is cheap, because few
    # samples per prompt give few distinct values, even for many prompts.
    distinct, counts = np.unique(np.asarray(values, dtype=float), return_counts=True)  # (V,), (V,)
    random = np.random.default_rng(seed)
    num_parts = math.ceil(num_resamples / PART)
    means = [random.multinomial(len(values), counts / len(values), PART) @ distinct for _ in range(num_parts)]
    return _ends(np.concatenate(means) / len(values), level)


def _ends(means: np.ndarray, level: float) -> tuple[float, float]:
    if not 0 < level < 1:
        raise ValueError(f"level must be between 0 and 1, got {level}; 0.95 is usual.")
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
