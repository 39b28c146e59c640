"""Warnings about a success threshold that tells no completions apart: all of them are failures, or successes."""

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trl_explore.rewards.success import TOLERANCE, bar

FIRST_BATCHES = 4  # generation batches that are looked at; a shorter run is looked at when it ends


def threshold_note(
    logs: Sequence[Mapping[str, Any]], *, threshold: float | None = None, success_reward: str | None = None
) -> str | None:
    """
    Describe a threshold that no completion reached although rewards differ, or that every completion reached.

    Args:
        logs (`Sequence[Mapping]`):
            Logged steps, or generation batches, with `success/fraction`, `success/min_reward` and
            `success/max_reward`; entries without these metrics are skipped.
        threshold (`float`, *optional*):
            Smallest reward of a success, for the message.
        success_reward (`str`, *optional*):
            Reward function that decides about success, for the message; `None` is the sum of all.

    Returns:
        `str` or `None`: What was seen, what it means, and the fields that help. `None` if some completions reached
        the threshold and others did not, if all rewards are equal and below it, or if nothing was logged.
    """
    seen = [entry for entry in logs if "success/fraction" in entry]
    if not seen:
        return None
    fractions = [entry["success/fraction"] for entry in seen]
    lowest = min(entry["success/min_reward"] for entry in seen)
    highest = max(entry["success/max_reward"] for entry in seen)
    field = "`success_threshold`" if threshold is None else f"`success_threshold={threshold:g}`"
    if max(fractions) == 0 and highest - lowest > TOLERANCE * max(abs(lowest), abs(highest)):
        start, taken, change = f"No completion reached {field}", "a failure", "lower"
    elif min(fractions) == 1:
        start, taken, change = f"Every completion reached {field}", "a success", "raise"
    else:
        return None
    reward = "rewards" if success_reward is None else f"rewards of {success_reward!r}"
    other = "the" if success_reward is None else "another"
    return (
        f"{start}: {reward} were between {lowest:.4g} and {highest:.4g}. So every completion counts as {taken}. If "
        f"that is wrong, {change} `success_threshold`, or let `success_reward` name {other} reward function that "
        "decides."
    )


class ThresholdWatch:
    """
    Looks at the deciding rewards of the first generation batches, and warns once if the threshold tells none apart.

    Args:
        threshold (`float`):
            Smallest reward of a success.
        success_reward (`str`, *optional*):
            Reward function that decides about success; `None` is the sum of all.
        warns (`bool`):
            Whether this process warns.
    """

    def __init__(self, *, threshold: float, success_reward: str | None, warns: bool) -> None:
        self.threshold, self.success_reward, self.warns = threshold, success_reward, warns
        self.batches: list[dict[str, float]] = []
        self.done = False

    def look(self, deciding: Iterable[float]) -> dict[str, float]:
        """
        Look at the rewards of a generation batch of all processes; NaN where a reward is unknown.

        Returns:
            `dict[str, float]`: Metrics of the batch; empty if no reward is known.
        """
        known = [reward for reward in deciding if not math.isnan(reward)]
        if not known:
            return {}
        reached = sum(reward >= bar(self.threshold) for reward in known)
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
        """Decide whether to warn. The trainer calls it when a run ends, which may be before `FIRST_BATCHES`."""
        if self.done:
            return
        self.done = bool(self.batches)
        note = threshold_note(self.batches, threshold=self.threshold, success_reward=self.success_reward)
        if note is not None and self.warns:
            warnings.warn(
                f"In the first {len(self.batches)} generation batch(es): {note} This warning appears once.",
                stacklevel=2,
            )
