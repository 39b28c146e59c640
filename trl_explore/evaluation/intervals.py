"""Bootstrap intervals: how much a benchmark's value depends on which prompts, and seeds, happen to be in it."""

from collections.abc import Hashable, Sequence

import numpy as np

PART = 1000  # resamples at a time; bounds the memory for large data sets


def bootstrap_interval(
    values: Sequence[float], *, level: float = 0.95, num_resamples: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """
    Percentile bootstrap interval of a mean over prompts.

    The prompts are drawn anew with replacement, each with the value that its samples gave it. Where all prompts have
    the same value, the interval has no width: such data cannot tell how much it would vary.

    Args:
        values (`Sequence[float]`):
            One value per prompt, of shape `(P,)`. Not empty.
        level (`float`, *optional*, defaults to `0.95`):
            Share of the resampled means that lie inside. In `(0, 1)`.
        num_resamples (`int`, *optional*, defaults to `10_000`):
            How often the prompts are drawn anew. Rounded up to thousands.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the draws.

    Returns:
        `tuple[float, float]`: Lower and upper end.

    Raises:
        `ValueError`: If there is no value, or `level` is outside its range.

    Example:
    ```python
    >>> bootstrap_interval([0.0, 1.0] * 50)
    (0.4, 0.6)
    ```
    """
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


def crossed_interval(
    values: np.ndarray,
    *,
    groups: Sequence[Hashable] | None = None,
    level: float = 0.95,
    num_resamples: int = 10_000,
    seed: int = 0,
) -> tuple[float, float]:
    """
    Percentile bootstrap interval of a mean over seeds and prompts, where every seed met the same prompts.

    Seeds and prompts are drawn anew with replacement, independently of each other; prompts that have something in
    common, and so rise and fall together, as a group. Few seeds make it too narrow: Student's interval over their
    means is the honest one where it is wider.

    Args:
        values (`np.ndarray`):
            One value per seed and prompt, of shape `(S, P)`. Not empty.
        groups (`Sequence[Hashable]`, *optional*):
            Group of each prompt, of length P. `None` where each is by itself.
        level (`float`, *optional*, defaults to `0.95`):
            Share of the resampled means that lie inside. In `(0, 1)`.
        num_resamples (`int`, *optional*, defaults to `10_000`):
            How often both are drawn anew.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the draws.

    Returns:
        `tuple[float, float]`: Lower and upper end.

    Raises:
        `ValueError`: If there is no value, or `level` is outside its range.
    """
    if values.ndim != 2 or not values.size:
        raise ValueError(f"values must have shape (seeds, prompts) and not be empty, got {values.shape}.")
    random = np.random.default_rng(seed)
    names = list(range(values.shape[1])) if groups is None else list(groups)
    members = np.array([[name == other for name in names] for other in dict.fromkeys(names)], dtype=float)  # (G, P)
    seeds, drawn = (random.multinomial(n, np.full(n, 1 / n), num_resamples) for n in (len(values), len(members)))
    prompts = drawn @ members  # (R, P)
    means = ((seeds / len(values) @ values) * prompts).sum(axis=1) / prompts.sum(axis=1)
    return _ends(means, level)
