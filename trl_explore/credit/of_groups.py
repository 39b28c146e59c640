"""Advantages of whole groups, from their rewards alone."""

from typing import TYPE_CHECKING

import torch

from trl_explore.credit.functions import AdvantagePart, advantage_parts, call
from trl_explore.credit.maxrl import maxrl
from trl_explore.credit.normalised import equal_groups, normalised
from trl_explore.credit.reinforce import reinforce
from trl_explore.credit.subsets import outcomes, pass_at_k_advantages, pkpo

if TYPE_CHECKING:
    from trl_explore.trainers.config import ExplorationConfig


def built_in(name: str, args: "ExplorationConfig", rewards: torch.Tensor, deciding: torch.Tensor) -> torch.Tensor:
    """
    Return a built-in advantage other than `"grpo"` and `"unlikeliness"`.

    Args:
        name (`str`):
            Value of `advantage`.
        args ([`~trl_explore.trainers.ExplorationConfig`]):
            The configuration.
        rewards (`torch.Tensor`):
            Total rewards, `(P, G)`. NaN if a row has no reward.
        deciding (`torch.Tensor`):
            Rewards that decide about success, `(P, G)`.

    Returns:
        `torch.Tensor`: Advantages, `(P, G)`.
    """
    if name == "maxrl":
        return maxrl(rewards)
    if name == "passk":
        return pass_at_k_advantages(outcomes(deciding, threshold=args.success_threshold), k=args.passk_k)
    if name == "reinforce":
        return reinforce(
            outcomes(deciding, threshold=args.resolved_success_threshold), success_weight=args.success_weight
        )
    return pkpo(rewards, k=args.passk_k, leave_one_out=name == "pkpo_loo")


def group_advantages(args: "ExplorationConfig", rewards: torch.Tensor, deciding: torch.Tensor) -> torch.Tensor:
    """
    Return the advantages of single groups, without the rest of the batch, by the fields `advantage`,
    `advantage_weights` and `scale_rewards`. Groups with rows of an explorer need this.

    Parts of `advantage` that need the whole batch are replaced by GRPO's advantages: `"unlikeliness"`, and functions
    with a parameter `batch`. If `scale_rewards` is `"batch"`, rewards are scaled by group.

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
    total = torch.zeros_like(rewards)
    for part in advantage_parts(args):
        total = total + part.weight * _of_part(part, args, rewards, deciding)
    return total


def _of_part(
    part: AdvantagePart, args: "ExplorationConfig", rewards: torch.Tensor, deciding: torch.Tensor
) -> torch.Tensor:
    if part.name == "grpo" or part.reads_batch:
        scale = "none" if args.scale_rewards == "none" else "group"
        return normalised(rewards, scale=scale).masked_fill(equal_groups(rewards), 0.0)
    if part.function is not None:
        return call(part, rewards, None)
    return built_in(part.name, args, rewards, deciding)
