"""Novelty of G2RL: scores for responses whose gradients differ from the rest of their group, and scaled rewards.

See G2RL (https://huggingface.co/papers/2512.15687), sections 2.3 to 2.5. The rows of a group are consecutive: N rows
form N / G groups of `group_size` G, and the functions raise a ValueError for other numbers. A row is valid if its
feature and its reward are finite. Rows that are not valid are not compared with others and keep their reward.
"""

from typing import NamedTuple

import torch

from trl_explore.rewards.success import TOLERANCE, failed, succeeded

TRANSFORMS = ("minmax", "raw", "centered")
MAPPINGS = ("scaled", "binary", "none")
SCORES = ("gradient", "shuffled")

# Features with a smaller norm are treated as 0.
MIN_NORM = 1e-12
# Novelties that differ by less are equal. Otherwise min-max would turn rounding errors of identical responses into 0
# and 1.
MIN_SPREAD = 1e-6


class Novelty(NamedTuple):
    """Exploration scores of N responses."""

    nu: torch.Tensor  # in [0, 1], `(N,)`; 0 for rows that are not valid
    valid: torch.Tensor  # True for rows with a finite feature and a finite reward, `(N,)`


def check_choice(field: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise a ValueError if the `value` of a configuration `field` is not one of `choices`."""
    if value not in choices:
        raise ValueError(f"`{field}={value!r}` is unknown: choose one of {', '.join(map(repr, choices))}.")


def in_groups(values: torch.Tensor, group_size: int) -> torch.Tensor:
    """Return a view `(N / G, G, ...)` of values `(N, ...)`. Raise a ValueError if N is not a multiple of G."""
    if group_size < 1 or len(values) % group_size:
        raise ValueError(f"{len(values)} rows cannot be split into groups of `group_size={group_size}`.")
    return values.unflatten(0, (len(values) // group_size, group_size))


def cosines(features: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Compute cosine similarities within groups (Eq. 9).

    The computation is in float64: Eq. 11 would turn rounding errors of float32 into a novelty of 3e-4. It runs on the
    CPU because some devices have no float64.

    Args:
        features (`torch.Tensor`):
            Features `(N, D)`.
        group_size (`int`):
            Rows per group.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: Float64 cosines `(N / G, G, G)`, which are 0 for features that are 0 or
        not finite. Booleans `(N,)`, True for finite features.
    """
    features = features.detach().cpu().double()
    finite = features.isfinite().all(-1)
    features = features.masked_fill(~finite[:, None], 0.0)
    units = in_groups(torch.nn.functional.normalize(features, dim=-1, eps=MIN_NORM), group_size)
    return units @ units.mT, finite


def novelty_scores(features: torch.Tensor, rewards: torch.Tensor, group_size: int) -> Novelty:
    """
    Compute the share of each gradient that the other gradients of its group do not explain (Eq. 9-11).

    `nu_i = sqrt(max(1 - sum_j w_ij S_ij^2, 0))`. The sum runs over the other valid rows j of the group, and `w_ij` is
    the softmax of their rewards. A feature of 0 (of a response without loss tokens) is orthogonal to all others, so
    its score is 1. If a row has no other valid row in its group, its score is 0.

    The paper adds epsilon to norms. Here norms are bounded from below instead, so identical responses have a
    similarity of exactly 1. The weights need no epsilon.

    Args:
        features (`torch.Tensor`):
            Features `(N, D)`.
        rewards (`torch.Tensor`):
            Rewards `(N,)`, NaN for rows without a reward.
        group_size (`int`):
            Rows per group.

    Returns:
        [`Novelty`]: Scores and valid rows.
    """
    similarities, finite = cosines(features, group_size)
    cpu_rewards = rewards.detach().cpu().double()
    valid = finite & cpu_rewards.isfinite()
    # `peers[g, i, j]` is True if row j of group g is valid and is not row i, `(N / G, G, G)`.
    peers = in_groups(valid, group_size)[:, None, :] & ~torch.eye(group_size, dtype=torch.bool)
    peer_rewards = in_groups(cpu_rewards, group_size)[:, None, :].masked_fill(~peers, -torch.inf)
    # The softmax of a row without peers is NaN, so set its weights to 0.
    weights = peer_rewards.softmax(-1).masked_fill(~peers, 0.0)
    explained = (weights * similarities.square()).sum(-1)
    nu = (1 - explained).clamp(min=0.0).sqrt()
    nu = nu.masked_fill(~peers.any(-1), 0.0).flatten()
    return Novelty(nu.masked_fill(~valid, 0.0).to(rewards), valid.to(rewards.device))


def transform_novelty(
    nu: torch.Tensor, group_size: int, transform: str, *, valid: torch.Tensor | None = None
) -> torch.Tensor:
    """
    Map novelty scores to the scale with which rewards are shaped.

    Args:
        nu (`torch.Tensor`):
            Novelty scores `(N,)`.
        group_size (`int`):
            Rows per group.
        transform (`str`):
            `"minmax"` maps the smallest and the largest score of a group to 0 and 1. With it, shaping never reduces
            the penalty of a wrong answer. `"centered"` maps them to -1 and 1; only this fits the paper's text, where
            near misses are penalized less. Both return 0 (no shaping) for a group of equal scores. `"raw"` keeps the
            scores.
        valid (`torch.Tensor`, *optional*):
            Booleans `(N,)`, True for valid rows. By default all rows are valid.

    Returns:
        `torch.Tensor`: Scores `(N,)`; 0 for rows that are not valid.
    """
    check_choice("transform", transform, TRANSFORMS)
    if valid is None:
        valid = torch.ones_like(nu, dtype=torch.bool)
    if transform == "raw":
        return nu.masked_fill(~valid, 0.0)
    rows, rows_valid = in_groups(nu, group_size), in_groups(valid, group_size)
    low = rows.masked_fill(~rows_valid, torch.inf).amin(-1, keepdim=True)
    spread = rows.masked_fill(~rows_valid, -torch.inf).amax(-1, keepdim=True) - low
    scaled = (rows - low) / spread
    if transform == "centered":
        scaled = 2 * scaled - 1
    return scaled.masked_fill(~rows_valid | (spread < MIN_SPREAD), 0.0).flatten()


def shuffle_in_groups(
    values: torch.Tensor, keys: torch.Tensor, group_size: int, *, valid: torch.Tensor | None = None
) -> torch.Tensor:
    """
    Shuffle the scores of valid rows within each group. This is the control condition for novelty scores.

    Args:
        values (`torch.Tensor`):
            Scores `(N,)`.
        keys (`torch.Tensor`):
            Random numbers `(N,)`. Their order within a group is the new order of its rows.
        group_size (`int`):
            Rows per group.
        valid (`torch.Tensor`, *optional*):
            Booleans `(N,)`, True for rows to shuffle. The other rows keep their scores. By default all rows are
            shuffled.

    Returns:
        `torch.Tensor`: Shuffled scores `(N,)`.
    """
    fixed = torch.zeros_like(values, dtype=torch.bool)
    if valid is not None:
        fixed = ~valid
    rows, rows_fixed = in_groups(values, group_size), in_groups(fixed, group_size)
    # Both sorts put the fixed rows last and keep their order, so each fixed row gets its own score.
    source = in_groups(keys.masked_fill(fixed, torch.inf), group_size).argsort(dim=-1, stable=True)
    target = rows_fixed.byte().argsort(dim=-1, stable=True)
    return torch.empty_like(rows).scatter(-1, target, rows.gather(-1, source)).flatten()


def map_rewards(rewards: torch.Tensor, mapping: str, *, threshold: float, group_size: int) -> torch.Tensor:
    """
    Map rewards to the values that novelty multiplies.

    Args:
        rewards (`torch.Tensor`):
            Rewards `(N,)`. NaN stays NaN.
        mapping (`str`):
            `"binary"` is the mapping of the paper: +1 if the reward is at least `threshold`, otherwise -1. `"scaled"`
            maps the smallest reward of a group linearly to -1 and the largest to +1; for rewards of 0 and 1, and for
            groups of equal rewards, this gives the values of the paper. `"none"` keeps rewards.
        threshold (`float`):
            Smallest reward of a success.
        group_size (`int`):
            Rows per group.

    Returns:
        `torch.Tensor`: Mapped rewards `(N,)`.
    """
    check_choice("mapping", mapping, MAPPINGS)
    if mapping == "none":
        return rewards
    binary = (succeeded(rewards, threshold=threshold).to(rewards) * 2 - 1).masked_fill(rewards.isnan(), torch.nan)
    if mapping == "binary":
        return binary
    rows = in_groups(rewards, group_size)
    unknown = rows.isnan()
    low = rows.masked_fill(unknown, torch.inf).amin(dim=1, keepdim=True)
    high = rows.masked_fill(unknown, -torch.inf).amax(dim=1, keepdim=True)
    magnitude = torch.maximum(low.abs(), high.abs())
    scaled = 2 * (rows - low) / (high - low) - 1
    # Sums of rewards have rounding errors, so rewards that differ by less are equal.
    differ = high - low > TOLERANCE * magnitude
    return torch.where(differ, scaled, in_groups(binary, group_size)).flatten()


def mixed_enough(
    rewards: torch.Tensor, group_size: int, *, min_correct: int, min_wrong: int, threshold: float
) -> torch.Tensor:
    """
    Return the mask of the rows in groups with enough right and enough wrong answers to be shaped.

    If all answers of a group are wrong, or all are right, their shaped rewards would differ by novelty alone. Division
    by the standard deviation would then make this difference as large as a difference in correctness.

    Args:
        rewards (`torch.Tensor`):
            Rewards `(N,)`.
        group_size (`int`):
            Rows per group.
        min_correct (`int`):
            Fewest right answers of a group.
        min_wrong (`int`):
            Fewest wrong answers of a group.
        threshold (`float`):
            Smallest reward of a right answer.

    Returns:
        `torch.Tensor`: Booleans `(N,)`.
    """
    correct = in_groups(succeeded(rewards, threshold=threshold), group_size).sum(-1)
    wrong = in_groups(failed(rewards, threshold=threshold), group_size).sum(-1)
    return ((correct >= min_correct) & (wrong >= min_wrong)).repeat_interleave(group_size)


def shape_rewards(
    rewards: torch.Tensor, nu_bar: torch.Tensor, *, weight: float, clip: float, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """
    Return `clip(r * (1 + weight * nu_bar), -clip, clip)` (Eq. 12-13, section 2.5).

    Args:
        rewards (`torch.Tensor`):
            Mapped rewards r, `(N,)`. NaN stays NaN.
        nu_bar (`torch.Tensor`):
            Transformed novelty scores `(N,)`.
        weight (`float`):
            Lambda of the paper.
        clip (`float`):
            Largest absolute value of a shaped reward.
        rows (`torch.Tensor`, *optional*):
            Booleans `(N,)`, True for rows to shape. The other rows keep their reward, even if it exceeds `clip`. By
            default all rows are shaped.

    Returns:
        `torch.Tensor`: Shaped rewards `(N,)`.
    """
    shaped = (rewards * (1 + weight * nu_bar)).clamp(-clip, clip)
    if rows is None:
        return shaped
    return torch.where(rows, shaped, rewards)


def geometry(features: torch.Tensor, group_size: int, novelty: Novelty) -> dict[str, float]:
    """
    Compute the statistics of section 3.5 of the paper.

    Args:
        features (`torch.Tensor`):
            Features `(N, D)`.
        group_size (`int`):
            Rows per group.
        novelty ([`Novelty`]):
            Novelty scores of the same rows.

    Returns:
        `dict[str, float]`: `mean_cosine` and `negative_pairs` (the share of negative cosines) over all pairs within
        groups whose features are finite and not 0, and `mean_novelty` over valid rows. Without pairs or without valid
        rows, the respective entries are missing.
    """
    similarities, _ = cosines(features, group_size)
    # A feature that is 0 or not finite has a similarity of 0 with itself. All other features have 1.
    usable = similarities.diagonal(dim1=1, dim2=2) > 0.5
    pairs = similarities[(usable[:, :, None] & usable[:, None, :]).triu(diagonal=1)]
    scores = novelty.nu[novelty.valid]
    means = {}
    if len(pairs):
        means = {"mean_cosine": pairs.mean().item(), "negative_pairs": (pairs < 0).double().mean().item()}
    if len(scores):
        means["mean_novelty"] = scores.mean().item()
    return means
