"""Put a few rows of an explorer into a group of GRPO, in the place of failed rows, and credit the group."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from trl_explore.credit.maxrl import maxrl
from trl_explore.credit.normalised import equal_groups, normalised
from trl_explore.credit.subsets import outcomes, pass_at_k_advantages, pkpo

if TYPE_CHECKING:
    from trl_explore.trainers.config import ExplorationConfig


def group_advantages(args: "ExplorationConfig", rewards: torch.Tensor, deciding: torch.Tensor) -> torch.Tensor:
    """
    Return the advantages of groups that are not GRPO's own rows, by the field `advantage`.

    `"unlikeliness"` needs log-probabilities of the whole batch, so these groups get GRPO's advantages instead.

    Args:
        args ([`~trl_explore.trainers.ExplorationConfig`]):
            The trainer's configuration.
        rewards (`torch.Tensor`):
            Total rewards, `(P, G)`. NaN if a row has no reward.
        deciding (`torch.Tensor`):
            Rewards that decide about success, `(P, G)`.

    Returns:
        `torch.Tensor`: Advantages, `(P, G)`.
    """
    if args.advantage == "maxrl":
        return maxrl(rewards)
    if args.advantage == "passk":
        return pass_at_k_advantages(outcomes(deciding, threshold=args.success_bar), k=args.passk_k)
    if args.advantage in ("pkpo", "pkpo_loo"):
        return pkpo(rewards, k=args.passk_k, leave_one_out=args.advantage == "pkpo_loo")
    scale = "none" if args.scale_rewards == "none" else "group"  # an explored group is no sample of the batch
    return normalised(rewards, scale=scale).masked_fill(equal_groups(rewards), 0.0)


def joined_advantages(
    args: "ExplorationConfig", main: Sequence[tuple[float, float]], new: Sequence[tuple[float, float]]
) -> tuple[list[float], list[float]]:
    """
    Return advantages after the first rows of a group were replaced by new rows.

    Args:
        args ([`~trl_explore.trainers.ExplorationConfig`]):
            The trainer's configuration.
        main (`Sequence[tuple[float, float]]`):
            Total reward and reward that decides about success of each main row of the group, `[G]`.
        new (`Sequence[tuple[float, float]]`):
            The same for each new row, at most G.

    Returns:
        `tuple[list[float], list[float]]`: Advantages of the main rows, `[G]`, with 0 for replaced rows; and of the new
        rows.
    """
    number = len(new)
    group = torch.tensor([*new, *main[number:]], dtype=torch.float32)  # (G, 2)
    advantages = group_advantages(args, group[None, :, 0], group[None, :, 1])[0].tolist()
    return [0.0] * number + advantages[number:], advantages[:number]
