"""What completions are worth: every way to measure a model asks its reward functions here."""

import copy
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from trl_explore.rewards.answers import completion_text

Reward = tuple[str, Callable[..., Any], float]  # name, synchronous function, weight


class Graded(NamedTuple):
    """What the samples of one prompt are worth, `[N]` each; `None` where there is no reward, or no answer."""

    totals: list[float | None]
    rewards: list[float | None]  # those that decide about success
    answers: list[Hashable | None]


class Grader:
    """Asks reward functions (name, function, weight) as TRL does in training; `given` is for each of them."""

    def __init__(
        self,
        rewards: Sequence[Reward],
        *,
        success_reward: str | None = None,
        answer_fn: Callable[[str], Hashable | None] | None = None,
        **given: Any,
    ) -> None:
        self.rewards, self.success_reward, self.answer_fn, self.given = rewards, success_reward, answer_fn, given

    def __call__(
        self, rows: Sequence[dict[str, Any]], completions: list[Any], completion_ids: list[list[int]]
    ) -> list[Graded]:
        """Grade equally many completions of each row `[B]`, those of a row together; one call per function."""
        copies, size = len(completions) // len(rows), len(completions)
        totals: list[float | None] = [None] * size
        deciding: list[float | None] = totals if self.success_reward is None else [None] * size
        for name, func, weight in self.rewards:
            # Copies, because a reward function may change what it is given.
            examples = [copy.deepcopy(row) for row in rows for _ in range(copies)]
            columns = [column for column in rows[0] if column not in ("prompt", "completion", "completion_ids")]
            inputs = {column: [example[column] for example in examples] for column in columns}
            rewards = func(
                prompts=[example["prompt"] for example in examples],
                completions=copy.deepcopy(completions),
                completion_ids=copy.deepcopy(completion_ids),
                **inputs,
                **self.given,
            )
            if len(rewards) != size:
                raise ValueError(f"{func} must return one reward per completion, got {len(rewards)} for {size}.")
            for i, reward in enumerate(rewards):
                if reward is not None and not math.isnan(reward):
                    totals[i] = (totals[i] or 0.0) + weight * float(reward)
                    if name == self.success_reward:
                        deciding[i] = float(reward)
        answers = [self.answer_fn(completion_text(text)) if self.answer_fn else None for text in completions]
        parts = [slice(start, start + copies) for start in range(0, size, copies)]
        return [Graded(totals[part], deciding[part], answers[part]) for part in parts]
