"""Rules that turn the logs of a run into findings and a verdict."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from trl_explore.advice.signs import Pair, Signs
from trl_explore.auto.estimates import PLAIN
from trl_explore.methods import METHODS

MANY = 0.7  # groups without contrast are the main problem if at least this share of the groups has no contrast
FEW = 1 / 3  # groups without contrast are no problem if at most this share of the groups has no contrast
SOME_WRONG = 0.25  # exploring is advised if at least this share of the groups without contrast is all wrong
CUT = 0.1  # a finding reports cut completions if at least this share of the completions is cut off
MANY_CUT = 0.3  # the verdict is about cut completions if at least this share of the completions is cut off
LOST = 0.15  # a finding reports lost entropy if at most this share of the initial entropy is left
FALL = 0.02  # decrease of pass@k above which it counts as falling
EXPLORED = 0.02  # share of explored prompts below which a run does not show whether exploring helps
CONTRAST = "docs/evidence.md#do-groups-have-contrast"
NO_CONTRAST = {
    "start": "docs/evidence.md#does-nearly-every-sample-fail",
    "end": "docs/evidence-details.md#groups-without-contrast-at-the-end",
}
FALLING_PASS_AT_K = "docs/evidence-details.md#reward-rises-and-passk-falls"
FEW_ANSWERS = "docs/evidence.md#should-many-right-answers-survive"
TROUBLES = "docs/troubleshooting.md#it-trains-but-nothing-happens"
WHICH_METHOD = "docs/which-method.md"
ENDS = ("start", "end")
AUTO = {"method": "auto", "explore": "auto"}
KEEP_GRPO = "keep GRPO, and tune its learning rate."


@dataclass(frozen=True)
class Finding:
    """
    One observation about a run.

    Args:
        text (`str`):
            The sentence, with its numbers.
        link (`str`):
            The page that explains it.
    """

    text: str
    link: str


@dataclass(frozen=True)
class Advice:
    """
    Advice on a run, with its reasons.

    Args:
        signs ([`~trl_explore.advice.signs.Signs`]):
            The numbers that the logs contain.
        findings (`list[Finding]`):
            Observations that stand out.
        verdict (`str`):
            The advice in one sentence.
        link (`str`):
            The page that explains the verdict.
        changes (`list[dict]`):
            Proposed fields for a file that `trl-explore train --config` reads. At most one dictionary. Empty if no
            field of a trainer helps.
    """

    signs: Signs
    findings: list[Finding]
    verdict: str
    link: str
    changes: list[dict[str, Any]] = field(default_factory=list)


def advise(signs: Signs) -> Advice:
    """
    Return the advice on a run.

    Args:
        signs ([`~trl_explore.advice.signs.Signs`]):
            The numbers that the logs of the run contain.

    Returns:
        [`Advice`]: The verdict, and the findings that support it.
    """
    if not signs.can_learn:
        # The run learned nothing, so other findings would mislead.
        return _advise_without_learning(signs)
    findings = list(_findings(signs))
    if (cut := signs.values.get("completions/clipped_ratio")) and cut.end >= MANY_CUT:
        verdict = (
            f"{cut.end:.0%} of the completions are cut off: raise `max_completion_length` first, unless your reward "
            "does not need the end of a completion."
        )
        return Advice(signs, findings, verdict, TROUBLES)
    if signs.sources:
        return _advise_explore(signs, findings)
    if not signs.plain:
        verdict = (
            "This run used another method than plain GRPO: compare it with GRPO on your data, for as many generated "
            "tokens, before you keep the method."
        )
        return Advice(signs, findings, verdict, "docs/comparing.md")
    return _advise_grpo(signs, findings)


def _advise_without_learning(signs: Signs) -> Advice:
    """Return the advice on a run that could not learn, because it has no rewards or all of them are equal."""
    reward = signs.same_reward
    if reward is None:
        finding = Finding("No logged step has a reward.", TROUBLES)
        verdict = "No completion has a reward: see why the reward functions return None or NaN."
        return Advice(signs, [finding], verdict, TROUBLES)
    finding = Finding(f"All completions of all logged steps got the reward {reward:.3g}.", TROUBLES)
    if reward <= 0:
        verdict = "No sample ever succeeded: use easier data or a warm start first."
    elif reward >= 1:
        verdict = "Every sample succeeded: there is nothing to learn from these data; use harder data."
    else:
        verdict = (
            f"Every sample got the reward {reward:.3g}: see what the reward function gives a right and a wrong answer."
        )
    return Advice(signs, [finding], verdict, TROUBLES)


def _advise_explore(signs: Signs, findings: list[Finding]) -> Advice:
    """Return the advice on a run with the field `explore`."""
    best_sources = {_worth_most(signs, end) for end in ENDS}
    an_explorer_was_best = bool(best_sources - {None, PLAIN})
    explored = signs.explored_in_all
    if not an_explorer_was_best:
        verdict = f"No explorer found more contrast per token than fresh prompts: {KEEP_GRPO}"
        return Advice(signs, findings, verdict, WHICH_METHOD)
    if explored is None or explored < EXPLORED:
        share = "an unknown share" if explored is None else f"{explored:.1%}"
        verdict = f"This run explored {share} of the prompts, too few to show whether exploring helps: {KEEP_GRPO}"
        return Advice(signs, findings, verdict, WHICH_METHOD)
    verdict = "Exploration found more contrast per token than fresh prompts: keep it, and tune the learning rate."
    return Advice(signs, findings, verdict, WHICH_METHOD)


def _advise_grpo(signs: Signs, findings: list[Finding]) -> Advice:
    """Return the advice on a run of plain GRPO whose rewards differ."""
    reward = signs.values["reward"]
    equal = signs.values.get("frac_reward_zero_std")  # share of groups with equal rewards, so without contrast
    rises = reward.end > reward.start
    if equal and max(equal) <= FEW and rises:
        verdict = f"Nearly all groups have contrast, and the reward rises: {KEEP_GRPO}"
        return Advice(signs, findings, verdict, CONTRAST)
    if equal and max(equal) >= MANY:
        return _advise_equal_groups(signs, findings, equal)
    if _only_passk_falls(signs):
        verdict = (
            "Pass@k falls while pass@1 rises: if pass@k matters to you, try the advantage `maxrl` (or `passk`), "
            "with `explore: auto`."
        )
        changes = [{**AUTO, "advantage": "maxrl"}]
        return Advice(signs, findings, verdict, FALLING_PASS_AT_K, changes)
    if rises:
        verdict = f"The reward rises, and nothing here calls for another method: {KEEP_GRPO}"
    else:
        verdict = "The reward does not rise, although groups have contrast: tune the learning rate of GRPO first."
    return Advice(signs, findings, verdict, CONTRAST)


def _advise_equal_groups(signs: Signs, findings: list[Finding], equal: Pair) -> Advice:
    """Return the advice on a run of plain GRPO in which many groups have no contrast."""
    ends = [end for end in ENDS if getattr(equal, end) >= MANY]
    for end in ends:
        share = signs.wrong_share(end)
        if share is not None and share >= SOME_WRONG:
            verdict = (
                f"{_equal_groups(signs, equal, end)}: try `explore: auto`, which explores unsolved prompts if it pays."
            )
            return Advice(signs, findings, verdict, NO_CONTRAST[end], [AUTO])
    groups = _equal_groups(signs, equal, ends[-1])
    if signs.wrong_share(ends[-1]) is None:
        verdict = f"{groups}: if their completions are wrong, try `explore: auto`; if right, filter these prompts."
        return Advice(signs, findings, verdict, WHICH_METHOD, [AUTO])
    verdict = (
        f"{groups}: filter the solved prompts and use harder data, or let `dynamic_sampling` replace them; easier "
        "data do not teach."
    )
    changes = [{"method": "exploration", "dynamic_sampling": "refill"}]
    return Advice(signs, findings, verdict, "docs/evaluating.md#keep-the-prompts-that-are-hard", changes)


def _equal_groups(signs: Signs, equal: Pair, end: str) -> str:
    """Return a clause with the share of groups without contrast at one end of a run. It adds the shares of wrong and
    right groups if they are known, else the mean reward."""
    text = f"{getattr(equal, end):.0%} of the groups have no contrast at the {end}"
    if signs.all_wrong and signs.all_right:
        wrong, right = getattr(signs.all_wrong, end), getattr(signs.all_right, end)
        return f"{text} ({wrong:.0%} all wrong, {right:.0%} all right)"
    return f"{text} (mean reward {getattr(signs.values['reward'], end):.2f})"


def _only_passk_falls(signs: Signs) -> bool:
    """Return whether pass@k falls for the largest k and rises for the smallest k."""
    if len(signs.pass_at) < 2:
        return False
    at_smallest_k, at_largest_k = signs.pass_at[min(signs.pass_at)], signs.pass_at[max(signs.pass_at)]
    return at_largest_k.end < at_largest_k.start - FALL and at_smallest_k.end > at_smallest_k.start


def _worth_most(signs: Signs, end: str) -> str | None:
    """Return the source of rows (fresh prompts or an explorer) with the most contrast per token at one end of a run.
    None if no source found contrast."""
    rates = {name: getattr(pair, end) for name, pair in signs.sources.items()}
    best = max(rates, key=rates.__getitem__)
    return best if rates[best] > 0 else None


def _findings(signs: Signs) -> Iterator[Finding]:
    """Yield the findings on a run whose rewards differ."""
    values = signs.values
    if signs.threshold is not None:
        yield Finding(signs.threshold, "docs/credit.md#graded-rewards")
    elif not signs.zero_or_one and (signs.plain or signs.sources):
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
        yield from _group_findings(signs, equal, reward)
    yield from _source_findings(signs)
    left = signs.entropy_left
    if left is not None and left <= LOST:
        yield Finding(
            f"{left:.0%} of the entropy that the run began with is left ({values['entropy'].start:.2f} nats, now "
            f"{values['entropy'].end:.2f}): samples of a prompt hardly differ any more.",
            FEW_ANSWERS,
        )
    if len(signs.pass_at) > 1:
        small, large = min(signs.pass_at), max(signs.pass_at)
        at_small, at_large = signs.pass_at[small], signs.pass_at[large]
        if at_large.end < at_large.start - FALL:
            yield Finding(
                f"pass@{large} falls from {at_large.start:.1%} to {at_large.end:.1%} while pass@{small} goes from "
                f"{at_small.start:.1%} to {at_small.end:.1%}: the run sharpens what it knew, and loses other answers. "
                f"If pass@{large} matters to you, try a lower learning rate or the advantage `maxrl` or `passk`.",
                FALLING_PASS_AT_K,
            )
    ends = {name: pair.end for name, pair in values.items()}
    for method in METHODS.values():
        for remark in method.remarks(ends):
            yield Finding(*remark)


def _group_findings(signs: Signs, equal: Pair, reward: Pair) -> Iterator[Finding]:
    """Yield the findings on groups without contrast, and on the number of tokens per completion with contrast."""
    for end in ENDS:
        if getattr(equal, end) >= MANY:
            text = f"{_equal_groups(signs, equal, end)}. They teach nothing."
            yield Finding(text, NO_CONTRAST[end])
    if max(equal) < MANY and reward.end > reward.start:
        yield Finding(
            f"Groups have contrast ({1 - equal.start:.0%} at the start, {1 - equal.end:.0%} at the end), and "
            f"the reward rises from {reward.start:.2f} to {reward.end:.2f}: GRPO learns from what it samples.",
            CONTRAST,
        )
    cost = signs.contrast_cost
    if cost is not None:
        yield Finding(
            f"A completion in a group with contrast cost {cost.start:,.0f} generated tokens at the start and "
            f"{cost.end:,.0f} at the end.",
            WHICH_METHOD,
        )


def _source_findings(signs: Signs) -> Iterator[Finding]:
    """Yield a finding that compares the sources of rows (fresh prompts and explorers) of a run with `explore`."""
    if not signs.sources:
        return
    parts = []
    for end in ENDS:
        best = _worth_most(signs, end)
        if best is None:
            parts.append(f"at the {end}, no source found contrast")
            continue
        rate = 1000 * getattr(signs.sources[best], end)
        text = f"at the {end}, {_named(best)} gave most contrast per token ({rate:.3g} groups per 1,000 tokens"
        if best != PLAIN and PLAIN in signs.sources:
            text += f", fresh prompts {1000 * getattr(signs.sources[PLAIN], end):.3g}"
        parts.append(f"{text})")
    shown = "; ".join(parts)
    text = f"{shown[0].upper()}{shown[1:]}."
    if signs.explored is not None:
        text += (
            f" The run explored {signs.explored_in_all:.0%} of the prompts: {signs.explored.start:.0%} at the start, "
        )
        text += f"{signs.explored.end:.0%} at the end."
    yield Finding(text, WHICH_METHOD)


def _named(source: str) -> str:
    """Return the words for a source of rows."""
    return "fresh prompts" if source == PLAIN else f"`{source}`"
