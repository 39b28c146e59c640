"""Advantages of a group in which an explorer's rows replace failed rows of GRPO."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from trl_explore.credit.maxrl import maxrl
from trl_explore.credit.normalised import equal_groups, normalised
from trl_explore.credit.reinforce import reinforce
from trl_explore.credit.subsets import outcomes, pass_at_k_advantages, pkpo

if TYPE_CHECKING:
    from trl_explore.trainers.config import ExplorationConfig


def group_advantages(args: "ExplorationConfig", rewards: torch.Tensor, deciding: torch.Tensor) -> torch.Tensor:
    """
    Return the advantages of groups with rows of an explorer, by the fields `advantage` and `scale_rewards`.

    If `advantage` is `"unlikeliness"`, the groups get GRPO's advantages, because `"unlikeliness"` needs
    log-probabilities of the whole batch. If `scale_rewards` is `"batch"`, rewards are scaled by group.

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
    if args.advantage == "reinforce":
        return reinforce(outcomes(deciding, threshold=args.success_bar), success_weight=args.success_weight)
    if args.advantage in ("pkpo", "pkpo_loo"):
        return pkpo(rewards, k=args.passk_k, leave_one_out=args.advantage == "pkpo_loo")
    # These groups are not a random sample of the batch, so "batch" works as "group".
    scale = "none" if args.scale_rewards == "none" else "group"
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
            Two rewards of each main row of the group, `[G]`: the total reward, and the reward that decides about
            success.
        new (`Sequence[tuple[float, float]]`):
            The same two rewards of each new row. At most G rows.

    Returns:
        `tuple[list[float], list[float]]`: Advantages of the main rows, `[G]`, with 0 for replaced rows, and advantages
        of the new rows.
    """
    number = len(new)
    group = torch.tensor([*new, *main[number:]], dtype=torch.float32)  # (G, 2)
    advantages = group_advantages(args, group[None, :, 0], group[None, :, 1])[0].tolist()
    return [0.0] * number + advantages[number:], advantages[:number]
