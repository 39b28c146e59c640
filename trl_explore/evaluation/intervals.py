"""Bootstrap intervals: how much a benchmark's value depends on which prompts, and seeds, happen to be in it."""

from collections.abc import Sequence

import numpy as np

PART = 1000  # resamples at a time; bounds the memory for large data sets


def bootstrap_interval(
    values: Sequence[float], *, level: float = 0.95, num_resamples: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean of one value per prompt, `(P,)`, which are drawn anew with
    replacement. It has no width where all are equal. `ValueError` for no value or a `level` outside `(0, 1)`."""
    if len(values) == 0:
        raise ValueError("values is empty: an interval needs at least one prompt.")
    # Prompts of equal values are interchangeable, and how often each value is drawn is multinomial: with few samples
    # per prompt there are few values, however many prompts.
    distinct, counts = np.unique(np.asarray(values, dtype=float), return_counts=True)  # (V,), (V,)
    random = np.random.default_rng(seed)
    num_parts = -(-num_resamples // PART)
    means = [random.multinomial(len(values), counts / len(values), PART) @ distinct for _ in range(num_parts)]
    return _ends(np.concatenate(means) / len(values), level)


def _ends(means: np.ndarray, level: float) -> tuple[float, float]:
    if not 0 < level < 1:
        raise ValueError(f"level must be between 0 and 1, got {level}; 0.95 is usual.")
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
