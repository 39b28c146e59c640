"""Row of SESA in the table of methods. This module must import neither torch nor TRL."""

from collections.abc import Mapping
from typing import Any

from trl_explore.method_row import OURS, Method, Remark, for_language_models, only_single_turns


def sketch_options(task: Any) -> dict[str, Any] | None:
    """Return options of SESA that fit a task, or None if it does not suit the task."""
    if for_language_models(task):
        return only_single_turns(task)
    return getattr(task, "sesa_options", None)


def _remarks(ends: Mapping[str, float]) -> list[Remark]:
    """Return a remark if completions with a sketch are right less than half as often as plain ones. `ends` are the
    last logged values of a run, by name."""
    plain, sketched = ends.get("sketch/plain_success"), ends.get("sketch/success")
    if plain is None or sketched is None or sketched >= plain / 2:
        return []
    text = (
        f"{sketched:.0%} of the completions with a sketch are right, but {plain:.0%} of the plain completions of the "
        "same groups: give fewer rows a sketch, with `max_trajectories`."
    )
    return [Remark(text, "docs/methods/sesa.md")]


SESA = Method(
    "sesa",
    "SESA",
    "SESATrainer",
    "SESAConfig",
    tags=(*OURS, "sesa"),
    paper={
        "title": "The Road Less Traveled: Enhancing Exploration in LLMs via Sequential Sampling",
        "id": "2510.15502",
    },
    card="sesa",
    metrics={
        "sketch/distinct": "share of a prompt's sketches (or candidates, or proposed actions) that are distinct",
        "sketch/similarity": "mean similarity of two sketches of a prompt (difflib)",
        "sketch/empty": "share of sketches that are empty",
        "sketch/tokens": "tokens of sketches, or of lists",
        "sketch/sampled_tokens": "tokens of sketches and completions together",
        "sketch/token_ratio": "share of sketches in all sampled tokens",
        "sketch/drafting_seconds": "seconds of sampling sketches, lists or proposals",
        "sketch/solving_seconds": "seconds of sampling completions",
        "sketch/dropped": "sketches or actions that were dropped, because they did not fit into the prompt",
        "sketch/too_long": "completions that were sampled without their sketch, because it did not fit into the "
        "context",
        "sketch/repeats": "`sequential`: rows that repeat a candidate, because the list has too few",
        "sketch/fillers": "`sequential`: rows that were sampled from the plain prompt, because the list is empty",
        "sketch/success": "`two_stage`: share of right rows among the rows with a sketch. If only one sketch of a "
        "problem is right, this is at most about 1 divided by the number of different sketches, even for good "
        "sketches",
        "sketch/plain_success": "`two_stage`: share of right rows among the rows without a sketch, if there are any",
        "sketch/group_success": "`two_stage`: share of groups with a right row that has a sketch, among groups "
        "with sketches",
        "sketch/pass_ratio": "Pass@G / Pass@1 of the groups. Near 1, all rows of a group succeed or fail together",
        "sketch/collapse_alarm": "1 if `sketch/pass_ratio` is below 1.05 and fewer than 95 % of the rows are correct, "
        "else 0",
        "sketch/coverage": "share of the right answers in `coverage_column` that a group contains",
        "sketch/ratio_mean": "mean ratio of `off_policy_correction`",
        "sketch/ratio_capped_fraction": "share of ratios of `off_policy_correction` that were cut at `off_policy_cap`",
        "agent/trajectories": "`agent`: different trajectories per group",
        "agent/decisions": "`agent`: decisions per group at which several trajectories are",
        "agent/duplicate_actions": "`agent`: proposed actions that repeat an earlier one of their decision",
        "agent/environment_errors": "`agent`: trajectories that ended because their environment raised",
    },
    card_metrics=(
        "sketch/distinct",
        "sketch/similarity",
        "sketch/pass_ratio",
        "sketch/token_ratio",
        "agent/duplicate_actions",
    ),
    options=sketch_options,
    remarks=_remarks,
    style=("#009E73", "^"),
)
