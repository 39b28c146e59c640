"""How far a response's gradient points away from those of its group, and rewards shaped by it.

After G2RL (https://huggingface.co/papers/2512.15687), sections 2.3 to 2.5. Rows of a group follow each other; N rows
are N / G groups of `group_size` G. A row without a finite feature or a reward is left out: it is no peer of others,
and its reward stays as it is.
"""

from typing import NamedTuple

import torch

from trl_explore.rewards.success import failed, succeeded

TRANSFORMS = ("minmax", "raw", "centered")
MAPPINGS = ("binary", "none")
SCORES = ("gradient", "shuffled")

# Norm below which a feature has no direction.
MIN_NORM = 1e-12
# Novelties that differ by less are equal: min-max would turn what rounding makes of identical responses into 0 and 1.
MIN_SPREAD = 1e-6


class Novelty(NamedTuple):
    """
    Exploration scores of N responses.

    Args:
        nu (`torch.Tensor`):
            Scores in [0, 1] of shape `(N,)`, 0 where `valid` is not set.
        valid (`torch.Tensor`):
            Boolean of shape `(N,)`: rows that have a finite feature and a finite reward.
    """

    nu: torch.Tensor
    valid: torch.Tensor


def check_choice(field: str, value: str, choices: tuple[str, ...]) -> None:
    """
    Check an option that is one of a few.

    Args:
        field (`str`):
            Name of the option, for the error message.
        value (`str`):
            What was given.
        choices (`tuple[str, ...]`):
            What there is.

    Raises:
        ValueError: Naming the field, the value and the choices.
    """
    if value not in choices:
        raise ValueError(f"`{field}={value!r}` is unknown: choose one of {', '.join(map(repr, choices))}.")


def in_groups(values: torch.Tensor, group_size: int) -> torch.Tensor:
    """
    Rows as groups.

    Args:
        values (`torch.Tensor`):
            One entry per row, of shape `(N, ...)`.
        group_size (`int`):
            Rows of a group, G.

    Returns:
        `torch.Tensor`: A view of shape `(N / G, G, ...)`.

    Raises:
        ValueError: If N is no multiple of G.
    """
    if group_size < 1 or len(values) % group_size:
        raise ValueError(f"{len(values)} rows cannot be split into groups of `group_size={group_size}`.")
    return values.unflatten(0, (len(values) // group_size, group_size))


def cosines(features: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Cosine similarities of the features of each group (Eq. 9).

    They are made in float64, on the CPU since not every device has it: Eq. 11 takes the square root of one minus a
    cosine, which would turn float32's rounding of identical features into a novelty of 3e-4.

    Args:
        features (`torch.Tensor`):
            Features of shape `(N, D)`.
        group_size (`int`):
            Rows of a group, G.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: Similarities in float64 of shape `(N / G, G, G)`, 0 with a feature that is
        0 or not finite; and which features are finite, of shape `(N,)`.
    """
    features = features.detach().cpu().double()
    finite = features.isfinite().all(-1)
    features = features.masked_fill(~finite[:, None], 0.0)
    units = in_groups(torch.nn.functional.normalize(features, dim=-1, eps=MIN_NORM), group_size)
    return units @ units.mT, finite


def novelty_scores(features: torch.Tensor, rewards: torch.Tensor, group_size: int) -> Novelty:
    """
    How much of each gradient its group does not explain (Eq. 9-11).

    `nu_i = sqrt(max(1 - sum_j w_ij S_ij^2, 0))` over the other valid rows j of the group, with `w_ij` the softmax of
    their rewards. A feature of 0, of a response without loss tokens, is orthogonal to all: its score is 1 if it has a
    valid peer. A row without a valid peer has nothing to differ from: its score is 0. Norms are bounded from below
    instead of shifted by epsilon, so identical responses have a similarity of 1; weights need no epsilon.

    Args:
        features (`torch.Tensor`):
            Features of shape `(N, D)`.
        rewards (`torch.Tensor`):
            Rewards of shape `(N,)`; NaN where a row could not be scored.
        group_size (`int`):
            Rows of a group.

    Returns:
        [`Novelty`]: On the device and in the type of `rewards`.

    Raises:
        ValueError: If the rows cannot be split into groups.
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
    Put scores on the scale that rewards are shaped with.

    With `"minmax"` a wrong answer is never punished less than without shaping; the paper's text, where near misses
    are, needs `"centered"`.

    Args:
        nu (`torch.Tensor`):
            Scores of shape `(N,)`.
        group_size (`int`):
            Rows of a group.
        transform (`str`):
            `"minmax"` maps each group's smallest and largest score to 0 and 1, `"centered"` to -1 and 1; both give 0
            where all are equal, which shapes nothing. `"raw"` keeps the scores.
        valid (`torch.Tensor`, *optional*):
            Rows that count, boolean of shape `(N,)`; all by default.

    Returns:
        `torch.Tensor`: Shape `(N,)`; 0 for rows that do not count.

    Raises:
        ValueError: If `transform` is unknown or the rows cannot be split into groups.
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
    """
    Values of each group in another order, the control for scores: as many of each size, for the wrong rows.

    Args:
        values (`torch.Tensor`):
            Values of shape `(N,)`.
        keys (`torch.Tensor`):
            Random numbers of shape `(N,)`, whose order within a group becomes that of its values.
        group_size (`int`):
            Rows of a group.
        valid (`torch.Tensor`, *optional*):
            Rows that exchange their values, boolean of shape `(N,)`; the others keep theirs. All by default.

    Returns:
        `torch.Tensor`: Shape `(N,)`.

    Raises:
        ValueError: If the rows cannot be split into groups.
    """
    left_out = torch.zeros_like(values, dtype=torch.bool) if valid is None else ~valid
    rows, apart = in_groups(values, group_size), in_groups(left_out, group_size)
    # Rows that are left out stand last in both orders, so each of them meets itself.
    source = in_groups(keys.masked_fill(left_out, torch.inf), group_size).argsort(dim=-1, stable=True)
    target = apart.byte().argsort(dim=-1, stable=True)
    return torch.empty_like(rows).scatter(-1, target, rows.gather(-1, source)).flatten()


def map_rewards(rewards: torch.Tensor, mapping: str, *, threshold: float) -> torch.Tensor:
    """
    Bring rewards to the {-1, +1} that the paper shapes.

    Args:
        rewards (`torch.Tensor`):
            Rewards of shape `(N,)`; NaN where a row could not be scored.
        mapping (`str`):
            `"binary"`: +1 for rewards of at least `threshold`, -1 for others. `"none"`: as they are.
        threshold (`float`):
            Smallest reward of a correct answer.

    Returns:
        `torch.Tensor`: Shape `(N,)`; NaN stays NaN.

    Raises:
        ValueError: If `mapping` is unknown.
    """
    check_choice("mapping", mapping, MAPPINGS)
    if mapping == "none":
        return rewards
    return (succeeded(rewards, threshold=threshold).to(rewards) * 2 - 1).masked_fill(rewards.isnan(), torch.nan)


def mixed_enough(
    rewards: torch.Tensor, group_size: int, *, min_correct: int, min_wrong: int, threshold: float
) -> torch.Tensor:
    """
    Groups that may be shaped. Where all answers are wrong, or all are right, novelty alone would tell them apart, and
    scaling by the group's standard deviation would make that as large as any difference in correctness.

    Args:
        rewards (`torch.Tensor`):
            Rewards of shape `(N,)`; NaN is neither correct nor wrong.
        group_size (`int`):
            Rows of a group.
        min_correct (`int`):
            Correct answers that a group needs.
        min_wrong (`int`):
            Wrong answers that a group needs.
        threshold (`float`):
            Smallest reward of a correct answer.

    Returns:
        `torch.Tensor`: Boolean of shape `(N,)`, equal within a group.

    Raises:
        ValueError: If the rows cannot be split into groups.
    """
    correct = in_groups(succeeded(rewards, threshold=threshold), group_size).sum(-1)
    wrong = in_groups(failed(rewards, threshold=threshold), group_size).sum(-1)
    return ((correct >= min_correct) & (wrong >= min_wrong)).repeat_interleave(group_size)


def shape_rewards(
    rewards: torch.Tensor, nu_bar: torch.Tensor, *, weight: float, clip: float, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """
    Rewards scaled by novelty and clipped: `clip(r * (1 + weight * nu_bar), -clip, clip)` (Eq. 12-13, section 2.5).

    Args:
        rewards (`torch.Tensor`):
            Rewards of shape `(N,)`, in {-1, +1} in the paper; NaN stays NaN.
        nu_bar (`torch.Tensor`):
            Transformed scores of shape `(N,)`.
        weight (`float`):
            Lambda of the paper, at least 0.
        clip (`float`):
            Largest absolute value, positive.
        rows (`torch.Tensor`, *optional*):
            Rows to shape, boolean of shape `(N,)`; the others keep their reward, also one beyond `clip`.

    Returns:
        `torch.Tensor`: Shape `(N,)`.
    """
    shaped = (rewards * (1 + weight * nu_bar)).clamp(-clip, clip)
    return shaped if rows is None else torch.where(rows, shaped, rewards)


def geometry(features: torch.Tensor, group_size: int, novelty: Novelty) -> dict[str, float]:
    """
    How the gradients of a batch lie to each other (section 3.5).

    Args:
        features (`torch.Tensor`):
            Features of shape `(N, D)`.
        group_size (`int`):
            Rows of a group.
        novelty ([`Novelty`]):
            Their scores.

    Returns:
        `dict[str, float]`: `mean_cosine` and the share of `negative_pairs` over the pairs of finite features other
        than 0 within the groups, and the `mean_novelty` of valid rows; without those that average over nothing.

    Raises:
        ValueError: If the rows cannot be split into groups.
    """
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
