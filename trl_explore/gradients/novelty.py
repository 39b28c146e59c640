"""How far a response's gradient points away from those of its group, and rewards shaped by it.

After G2RL (https://huggingface.co/papers/2512.15687), sections 2.3 to 2.5. Rows of a group follow each other; N rows
are N / G groups of `group_size` G, or a ValueError. A row without a finite feature or a reward is left out: it is no
peer of others, and its reward stays as it is.
"""

from typing import NamedTuple

import torch

from trl_explore.rewards.success import TOLERANCE, failed, succeeded

TRANSFORMS = ("minmax", "raw", "centered")
MAPPINGS = ("scaled", "binary", "none")
SCORES = ("gradient", "shuffled")

# Norm below which a feature has no direction.
MIN_NORM = 1e-12
# Novelties that differ by less are equal: min-max would turn what rounding makes of identical responses into 0 and 1.
MIN_SPREAD = 1e-6


class Novelty(NamedTuple):
    """Exploration scores of N responses."""

    nu: torch.Tensor  # in [0, 1], `(N,)`; 0 where not `valid`
    valid: torch.Tensor  # `(N,)`: rows that have a finite feature and a finite reward


def check_choice(field: str, value: str, choices: tuple[str, ...]) -> None:
    """ValueError, naming field, value and choices, for an option that is none of them."""
    if value not in choices:
        raise ValueError(f"`{field}={value!r}` is unknown: choose one of {', '.join(map(repr, choices))}.")


def in_groups(values: torch.Tensor, group_size: int) -> torch.Tensor:
    """A view `(N / G, G, ...)` of `(N, ...)`; ValueError if N is no multiple of G."""
    if group_size < 1 or len(values) % group_size:
        raise ValueError(f"{len(values)} rows cannot be split into groups of `group_size={group_size}`.")
    return values.unflatten(0, (len(values) // group_size, group_size))


def cosines(features: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Float64 cosines `(N / G, G, G)` in groups (Eq. 9), 0 for a feature that is 0 or not finite; and which are
    finite, `(N,)`. On the CPU, as not every device has float64: Eq. 11 makes float32's rounding a novelty of 3e-4."""
    features = features.detach().cpu().double()
    finite = features.isfinite().all(-1)
    features = features.masked_fill(~finite[:, None], 0.0)
    units = in_groups(torch.nn.functional.normalize(features, dim=-1, eps=MIN_NORM), group_size)
    return units @ units.mT, finite


def novelty_scores(features: torch.Tensor, rewards: torch.Tensor, group_size: int) -> Novelty:
    """
    How much of each gradient its group does not explain (Eq. 9-11); rewards `(N,)` are NaN where unscored.

    `nu_i = sqrt(max(1 - sum_j w_ij S_ij^2, 0))` over the other valid rows j of the group, with `w_ij` the softmax of
    their rewards. A feature of 0, of a response without loss tokens, is orthogonal to all: its score is 1 if it has a
    valid peer. A row without a valid peer has nothing to differ from: its score is 0. Norms are bounded from below
    instead of shifted by epsilon, so identical responses have a similarity of 1; weights need no epsilon.
    """
    similarities, finite = cosines(features, group_size)
    scores = rewards.detach().cpu().double()
    valid = finite & scores.isfinite()
    peers = in_groups(valid, group_size)[:, None, :] & ~torch.eye(group_size, dtype=torch.bool)  # (P, G, G)
    scores = in_groups(scores, group_size)[:, None, :].masked_fill(~peers, -torch.inf)
    weights = scores.softmax(-1).masked_fill(~peers, 0.0)
    explained = (weights * similarities.square()).sum(-1)
    nu = (1 - explained).clamp(min=0.0).sqrt().masked_fill(~peers.any(-1), 0.0).flatten()
    return Novelty(nu.masked_fill(~valid, 0.0).to(rewards), valid.to(rewards.device))


def transform_novelty(
    nu: torch.Tensor, group_size: int, transform: str, *, valid: torch.Tensor | None = None
) -> torch.Tensor:
    """
    Scores `(N,)` on the scale that rewards are shaped with; 0 for rows that are not `valid`.

    `"minmax"` maps each group's smallest and largest to 0 and 1, `"centered"` to -1 and 1; both give 0, which shapes
    nothing, where all are equal. `"raw"` keeps the scores. With `"minmax"` a wrong answer is never punished less than
    without shaping; the paper's text, where near misses are, needs `"centered"`.
    """
    check_choice("transform", transform, TRANSFORMS)
    counted = torch.ones_like(nu, dtype=torch.bool) if valid is None else valid
    if transform == "raw":
        return nu.masked_fill(~counted, 0.0)
    rows, rows_counted = in_groups(nu, group_size), in_groups(counted, group_size)
    low = rows.masked_fill(~rows_counted, torch.inf).amin(-1, keepdim=True)
    spread = rows.masked_fill(~rows_counted, -torch.inf).amax(-1, keepdim=True) - low
    scaled = (rows - low) / spread
    if transform == "centered":
        scaled = 2 * scaled - 1
    return scaled.masked_fill(~rows_counted | (spread < MIN_SPREAD), 0.0).flatten()


def shuffle_in_groups(
    values: torch.Tensor, keys: torch.Tensor, group_size: int, *, valid: torch.Tensor | None = None
) -> torch.Tensor:
    """Values `(N,)` of each group's `valid` rows in the order of random `keys`, the control for scores: as many of
    each size, for the wrong rows. Others keep theirs."""
    left_out = torch.zeros_like(values, dtype=torch.bool) if valid is None else ~valid
    rows, apart = in_groups(values, group_size), in_groups(left_out, group_size)
    # Rows that are left out stand last in both orders, so each of them meets itself.
    source = in_groups(keys.masked_fill(left_out, torch.inf), group_size).argsort(dim=-1, stable=True)
    target = apart.byte().argsort(dim=-1, stable=True)
    return torch.empty_like(rows).scatter(-1, target, rows.gather(-1, source)).flatten()


def map_rewards(rewards: torch.Tensor, mapping: str, *, threshold: float, group_size: int) -> torch.Tensor:
    """
    Map rewards to the values that novelty multiplies.

    Args:
        rewards (`torch.Tensor`):
            Rewards, shape `(N,)`, groups consecutive. NaN stays NaN.
        mapping (`str`):
            `"binary"` is the paper's: +1 from `threshold` on, else -1. `"scaled"` maps the smallest reward of a group
            to -1 and the largest to +1, linearly, so that rewards of 0 and 1 give the paper's; a group of equal
            rewards gets the paper's values. `"none"` keeps rewards.
        threshold (`float`):
            Smallest reward of a success.
        group_size (`int`):
            Rows per group.

    Returns:
        `torch.Tensor`: Mapped rewards, shape `(N,)`.
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
    size = torch.maximum(low.abs(), high.abs())
    scaled = 2 * (rows - low) / (high - low) - 1
    return torch.where(high - low > TOLERANCE * size, scaled, in_groups(binary, group_size)).flatten()


def mixed_enough(
    rewards: torch.Tensor, group_size: int, *, min_correct: int, min_wrong: int, threshold: float
) -> torch.Tensor:
    """Rows `(N,)` of groups that may be shaped. Where all answers are wrong, or all right, novelty alone would tell
    them apart, and scaling by the standard deviation would make that as large as a difference in correctness."""
    correct = in_groups(succeeded(rewards, threshold=threshold), group_size).sum(-1)
    wrong = in_groups(failed(rewards, threshold=threshold), group_size).sum(-1)
    return ((correct >= min_correct) & (wrong >= min_wrong)).repeat_interleave(group_size)


def shape_rewards(
    rewards: torch.Tensor, nu_bar: torch.Tensor, *, weight: float, clip: float, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """`clip(r * (1 + weight * nu_bar), -clip, clip)` (Eq. 12-13, section 2.5), with the paper's lambda as `weight`;
    NaN stays NaN. Other rows than `rows` keep their reward, also one beyond `clip`."""
    shaped = (rewards * (1 + weight * nu_bar)).clamp(-clip, clip)
    return shaped if rows is None else torch.where(rows, shaped, rewards)


def geometry(features: torch.Tensor, group_size: int, novelty: Novelty) -> dict[str, float]:
    """`mean_cosine` and share of `negative_pairs` over a group's pairs of finite features other than 0, and
    `mean_novelty` of valid rows (section 3.5); without those that average over nothing."""
    similarities, _ = cosines(features, group_size)
    # A feature that is 0 or not finite has a similarity of 0 with itself.
    usable = similarities.diagonal(dim1=1, dim2=2) > 0.5
    pairs = similarities[(usable[:, :, None] & usable[:, None, :]).triu(diagonal=1)]
    scores = novelty.nu[novelty.valid]
    means = {}
    if len(pairs):
        means = {"mean_cosine": pairs.mean().item(), "negative_pairs": (pairs < 0).double().mean().item()}
    if len(scores):
        means["mean_novelty"] = scores.mean().item()
    return means
