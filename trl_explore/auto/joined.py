"""Advantages of a group in which an explorer's rows replace failed rows of GRPO."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from trl_explore.credit.of_groups import group_advantages

if TYPE_CHECKING:
    from trl_explore.trainers.config import ExplorationConfig


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
