"""Options of the explorers `"hints"` and `"replay"`, which have no trainer of their own."""

from dataclasses import dataclass
from typing import Any

from trl_explore.names import explain_fields
from trl_explore.sketches.drafts import check_template

from .config import ExplorationConfig, at_least, one_of, run_checks, within

HINT_TEMPLATE = "{problem}\n\nHint: {hint}"
HINT_CHECKS = (
    at_least(1, "hint_rows", "hint_samples"),
    one_of("hint_loss", ("plain", "hinted")),
    within("hint_ratio_cap", above=0, words="be a positive number"),
)
REPLAY_CHECKS = (
    at_least(1, "replay_rows", "replay_size", "replay_per_prompt"),
    within("replay_ratio_cap", above=0, words="be a positive number"),
)


@explain_fields
@dataclass
class HintConfig(ExplorationConfig):
    r"""
    Options of the explorer `"hints"`, as `explorer_options={"hints": {...}}`.

    Args:
        hint_column (`str`, *optional*, defaults to `"hint"`):
            Column of the data set with the hints: a text, or a list of texts from the weakest hint to the strongest.
        hint_fractions (`list[float]`, *optional*):
            Ascending shares of a solution, in (0, 1), for example `[0.25, 0.5]`. If set, `hint_column` holds
            solutions. A completion then begins with this share of the solution's tokens, which are not trained. The
            smallest share is tried first. None: the hint is a part of the prompt.
        hint_template (`str`, *optional*, defaults to `"{problem}\n\nHint: {hint}"`):
            Text of a prompt with a hint. `{problem}` is the prompt, or the last message of a conversation.
        hint_rows (`int`, *optional*, defaults to `1`):
            Largest number of rows of a failed group that successful completions with a hint replace.
        hint_samples (`int`, *optional*, defaults to `4`):
            Number of completions per hint.
        hint_loss (`str`, *optional*, defaults to `"plain"`):
            Prompt in training, for completions that were sampled with a hint in their prompt. `"hinted"`: the prompt
            with the hint. `"plain"`: the original prompt. The advantage of a token is then multiplied by its
            probability without the hint, divided by its probability with the hint. With `hint_fractions`, the prompt
            is always the original one, and this field has no effect.
        hint_ratio_cap (`float`, *optional*, defaults to `1.0`):
            Upper bound of this ratio of probabilities.
    """

    hint_column: str = "hint"
    hint_fractions: list[float] | None = None
    hint_template: str = HINT_TEMPLATE
    hint_rows: int = 1
    hint_samples: int = 4
    hint_loss: str = "plain"
    hint_ratio_cap: float = 1.0

    def validate(self) -> None:
        super().validate()
        run_checks(self, HINT_CHECKS)
        check_template("hint_template", self.hint_template, required=("problem", "hint"))
        if self.hint_rows > (self.num_generations or 1):
            raise ValueError(
                f"`hint_rows={self.hint_rows}` is more than `num_generations={self.num_generations}`, the rows of a "
                "group: lower it."
            )
        if self.hint_fractions is not None and not _are_ascending_shares(self.hint_fractions):
            raise ValueError(
                f"`hint_fractions={self.hint_fractions!r}` must be ascending shares between 0 and 1, for example "
                "[0.25, 0.5, 0.75]."
            )


def _are_ascending_shares(values: Any) -> bool:
    """Return whether a value is a list of at least one number in (0, 1), in ascending order."""
    if not isinstance(values, list | tuple) or not all(isinstance(value, int | float) for value in values):
        return False
    return bool(values) and list(values) == sorted(values) and all(0 < value < 1 for value in values)


@explain_fields
@dataclass
class ReplayConfig(ExplorationConfig):
    r"""
    Options of the explorer `"replay"`, as `explorer_options={"replay": {...}}`.

    Args:
        replay_rows (`int`, *optional*, defaults to `1`):
            Largest number of rows of a failed group that stored successes replace.
        replay_size (`int`, *optional*, defaults to `10000`):
            Largest number of stored completions. If there are more, the prompts without a new completion for the
            longest time lose completions first.
        replay_per_prompt (`int`, *optional*, defaults to `4`):
            Largest number of stored completions of a prompt. If there are more, the newest are kept.
        replay_ratio_cap (`float`, *optional*, defaults to `1.0`):
            The advantage of a stored token is multiplied by its probability under the current policy, divided by its
            probability when it was sampled. This is the upper bound of this ratio.
    """

    replay_rows: int = 1
    replay_size: int = 10_000
    replay_per_prompt: int = 4
    replay_ratio_cap: float = 1.0

    def validate(self) -> None:
        super().validate()
        run_checks(self, REPLAY_CHECKS)
        if self.replay_rows > (self.num_generations or 1):
            raise ValueError(
                f"`replay_rows={self.replay_rows}` is more than `num_generations={self.num_generations}`, the rows of "
                "a group: lower it."
            )
