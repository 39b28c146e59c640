"""From what a run shows to what to try: each sentence with the number it is read off, and the page it stands on."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trl_explore.advice.measured import PAGE, Measured, Tried, nearest
from trl_explore.advice.signs import Signs
from trl_explore.methods import METHODS

MOSTLY = 0.7  # of the groups, or of a share
CUT = 0.1  # of the completions
LOST = 0.15  # of the entropy
FALL = 0.02  # in pass@k
TROUBLES = "docs/troubleshooting.md#it-trains-but-nothing-happens"


@dataclass(frozen=True)
class Finding:
    """
    One thing that a run shows.

    Args:
        text (`str`):
            The sentence, with its numbers.
        link (`str`):
            The page that it stands on.
    """

    text: str
    link: str


@dataclass(frozen=True)
class Advice:
    """
    What a run shows, and what to try.

    Args:
        signs ([`~trl_explore.advice.signs.Signs`]):
            What its logs show.
        findings (`list[Finding]`):
            What stands out.
        regime ([`~trl_explore.advice.measured.Measured`], *optional*):
            The measured regime that it resembles. None where none does.
        distance (`float`, *optional*):
            How far the nearest regime is.
        arms (`list[Tried]`):
            What was clearly ahead of tuned GRPO there, the most first. Empty: keep GRPO.
    """

    signs: Signs
    findings: list[Finding]
    regime: Measured | None
    distance: float | None
    arms: list[Tried]

    @property
    def verdict(self) -> str:
        """The advice in one sentence."""
        if self.signs.unscored:
            return "No completion has a reward: see why the reward functions return None or NaN."
        if (reward := self.signs.same_reward) is not None:
            return _of_one_reward(reward)
        if not self.signs.plain:
            return "This is no run of plain GRPO, which is what resemblance is read off: compare it with one."
        if self.regime is None and not self.signs.zero_or_one:
            return (
                "All measured runs had rewards of 0 and 1 only. This run has others, so no measured run resembles "
                "it: keep GRPO, and tune its learning rate."
            )
        if self.regime is None:
            return "Nothing measured resembles this: keep GRPO, and tune its learning rate."
        if not self.arms:
            return f"It resembles {self.regime.name}, where nothing was clearly ahead of tuned GRPO: keep GRPO."
        return f"It resembles {self.regime.name}, where {self.arms[0].name} was furthest ahead of tuned GRPO."


def advise(signs: Signs) -> Advice:
    """
    Reads signs.

    Args:
        signs ([`~trl_explore.advice.signs.Signs`]):
            What a run's logs show.

    Returns:
        [`Advice`]: What stands out, what it resembles, and what paid there.
    """
    if not signs.can_learn:
        # Nothing was learned, and no other trainer changes that: what resembles this run does not matter.
        return Advice(signs, [_nothing_learned(signs)], None, None, [])
    regime, distance = nearest(signs)
    ahead = [] if regime is None else sorted(filter(lambda arm: arm.paid, regime.arms), key=lambda arm: -arm.tokens[0])
    return Advice(signs, list(_findings(signs)), regime, distance, ahead)


def change(arm: Tried) -> dict[str, Any]:
    """What `trl-explore train --config` takes to try an arm: its method and fields, without the tiny model's rate."""
    return {"method": arm.method, **{name: value for name, value in arm.options.items() if name != "learning_rate"}}


def _of_one_reward(reward: float) -> str:
    """Return what to do if all completions of a run got the same reward."""
    if reward <= 0:
        return "No sample ever succeeded: use easier data or a warm start first."
    if reward >= 1:
        return "Every sample succeeded: there is nothing to learn from these data; use harder data."
    return f"Every sample got the reward {reward:.3g}: see what the reward function gives a right and a wrong answer."


def _nothing_learned(signs: Signs) -> Finding:
    """Return why a run could not learn: it has no rewards, or all of them are equal."""
    if signs.unscored:
        return Finding("No logged step has a reward.", TROUBLES)
    return Finding(f"All completions of all logged steps got the reward {signs.same_reward:.3g}.", TROUBLES)


def _findings(signs: Signs) -> Iterator[Finding]:
    values = signs.values
    if signs.threshold is not None:
        yield Finding(signs.threshold, "docs/credit.md#graded-rewards")
    elif signs.plain and not signs.zero_or_one:
        yield Finding(
            "Rewards are not only 0 and 1. Before you try a method that asks about success, set its "
            "`success_threshold`, or let `success_reward` name the reward function that decides.",
            "docs/credit.md#graded-rewards",
        )
    if (cut := values.get("completions/clipped_ratio")) and cut.end >= CUT:
        yield Finding(
            f"{cut.end:.0%} of the completions at the end are cut off at `max_completion_length`. If your reward "
            "needs the end of a completion, for example its answer, raise `max_completion_length` first.",
            TROUBLES,
        )
    for name in signs.unpaid:
        yield Finding(
            f"The reward function `{name}` gave 0 to every completion, so nothing was learned from it. If it decides "
            "success, use easier data or a warm start first.",
            TROUBLES,
        )
    equal, reward = values.get("frac_reward_zero_std"), values.get("reward")
    if equal and reward:
        yield from _of_groups(signs, equal.start, equal.end)
        if max(equal) < 1 - MOSTLY / 2 and reward.end > reward.start:
            yield Finding(
                f"Groups have contrast ({1 - equal.start:.0%} at the start, {1 - equal.end:.0%} at the end), and "
                f"the reward rises from {reward.start:.2f} to {reward.end:.2f}: GRPO learns from what it samples.",
                f"{PAGE}#groups-have-contrast",
            )
    left = signs.entropy_left
    if left is not None and left <= LOST:
        yield Finding(
            f"{left:.0%} of the entropy that the run began with is left ({values['entropy'].start:.2f} nats, now "
            f"{values['entropy'].end:.2f}): samples of a prompt hardly differ any more.",
            f"{PAGE}#entropy-is-gone",
        )
    if len(signs.pass_at) > 1:
        (small, first), *_, (large, last) = signs.pass_at.items()
        if last.end < last.start - FALL:
            yield Finding(
                f"pass@{large} falls from {last.start:.1%} to {last.end:.1%} while pass@{small} goes from "
                f"{first.start:.1%} to {first.end:.1%}: the run sharpens what it knew, and loses other answers.",
                f"{PAGE}#reward-rises-and-passk-falls",
            )
    ends = {name: pair.end for name, pair in values.items()}
    for row in METHODS.values():
        for remark in row.remarks(ends):
            yield Finding(*remark)


def _of_groups(signs: Signs, start: float, end: float) -> Iterator[Finding]:
    for when, equal, at in (("start", start, 0), ("end", end, 1)):
        if equal < MOSTLY:
            continue
        text = f"At the {when}, {equal:.0%} of the groups have no contrast and teach nothing"
        if signs.all_wrong and signs.all_right:
            text += f" ({signs.all_wrong[at]:.0%} all wrong, {signs.all_right[at]:.0%} all right)"
        else:
            text += f" (mean reward {signs.values['reward'][at]:.2f})"
        yield Finding(f"{text}.", f"{PAGE}#groups-without-contrast-at-the-{when}")
