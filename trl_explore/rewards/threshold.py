"""Warnings about a success threshold that all completions reach, or none."""

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trl_explore.rewards.success import TOLERANCE, lowest_success

FIRST_BATCHES = 4  # number of generation batches that are checked; a shorter run is checked when it ends


def threshold_note(
    logs: Sequence[Mapping[str, Any]], *, threshold: float | None = None, success_reward: str | None = None
) -> str | None:
    """
    Describe a threshold that every completion reached, or that none reached although rewards differ.

    Args:
        logs (`Sequence[Mapping]`):
            Logged steps, or generation batches, with `success/fraction`, `success/min_reward` and
            `success/max_reward`; entries without these metrics are skipped.
        threshold (`float`, *optional*):
            Smallest reward of a success, for the message.
        success_reward (`str`, *optional*):
            Reward function that decides success, for the message. `None` means the sum of all rewards.

    Returns:
        `str` or `None`: The range of the rewards, its consequence, and the fields that help. `None` if some
        completions reached the threshold and others did not, if all rewards are equal and below it, or if nothing was
        logged.
    """
    fractions, lowest, highest = [], math.inf, -math.inf
    for entry in logs:
        if "success/fraction" in entry:
            fractions.append(entry["success/fraction"])
            lowest = min(lowest, entry["success/min_reward"])
            highest = max(highest, entry["success/max_reward"])
    if not fractions:
        return None
    field = "`success_threshold`"
    if threshold is not None:
        field = f"`success_threshold={threshold:g}`"
    if max(fractions) == 0 and highest - lowest > TOLERANCE * max(abs(lowest), abs(highest)):
        start, counted_as, change = f"No completion reached {field}", "a failure", "lower"
    elif min(fractions) == 1:
        start, counted_as, change = f"Every completion reached {field}", "a success", "raise"
    else:
        return None
    rewards, decider = "rewards", "the reward function"
    if success_reward is not None:
        rewards, decider = f"rewards of {success_reward!r}", "another reward function"
    return (
        f"{start}: {rewards} were between {lowest:.4g} and {highest:.4g}. So every completion counts as {counted_as}. "
        f"If that is wrong, {change} `success_threshold`, or let `success_reward` name {decider} that decides."
    )


class ThresholdWatch:
    """
    Checks the deciding rewards of the first generation batches, and warns once if [`threshold_note`] returns a text.

    Args:
        threshold (`float`):
            Smallest reward of a success.
        success_reward (`str`, *optional*):
            Reward function that decides success. `None` means the sum of all rewards.
        warns (`bool`):
            If `True`, this process warns.
    """

    def __init__(self, *, threshold: float, success_reward: str | None, warns: bool) -> None:
        self.threshold, self.success_reward, self.warns = threshold, success_reward, warns
        self.batches: list[dict[str, float]] = []
        self.done = False

    def look(self, deciding: Iterable[float]) -> dict[str, float]:
        """
        Compute the metrics of a generation batch, and warn if it is the last of the first batches.

        Args:
            deciding (`Iterable[float]`):
                Rewards that decide success, of all processes. NaN if a reward is missing.

        Returns:
            `dict[str, float]`: Metrics of the batch. Empty if all rewards are missing.
        """
        known = [reward for reward in deciding if not math.isnan(reward)]
        if not known:
            return {}
        reached = sum(reward >= lowest_success(self.threshold) for reward in known)
        metrics = {
            "success/fraction": reached / len(known),
            "success/min_reward": min(known),
            "success/max_reward": max(known),
        }
        if not self.done:
            self.batches.append(metrics)
            if len(self.batches) == FIRST_BATCHES:
                self.end()
        return metrics

    def end(self) -> None:
        """Decide whether to warn. The trainer also calls it when a run ends before `FIRST_BATCHES`."""
        if self.done or not self.batches:
            return
        self.done = True
        note = threshold_note(self.batches, threshold=self.threshold, success_reward=self.success_reward)
        if note is not None and self.warns:
            warnings.warn(
                f"In the first {len(self.batches)} generation batch(es): {note} This warning appears once.",
                stacklevel=2,
            )
