"""Grading of completions by reward functions, for all evaluations of a model."""

import copy
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from trl_explore.rewards.answers import completion_text

Reward = tuple[str, Callable[..., Any], float]  # name, synchronous function, weight


class Graded(NamedTuple):
    """Rewards and answers of the samples of one prompt, `[N]` each. `None` means no reward, or no answer."""

    totals: list[float | None]  # weighted sums of the rewards
    rewards: list[float | None]  # rewards that decide success: of the function `success_reward`, or the totals
    answers: list[Hashable | None]


class Grader:
    """
    Calls reward functions as TRL does in training.

    Args:
        rewards (`Sequence[Reward]`):
            Name, synchronous function and weight of each reward.
        success_reward (`str`, *optional*):
            Name of the reward that decides success. `None` uses the weighted sum.
        answer_fn (`Callable`, *optional*):
            Maps the text of a completion to its answer. `None` reads no answers.
        **given:
            Further arguments with which every reward function is called.
    """

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
        """
        Grade the completions of several prompts, with one call per reward function.

        Args:
            rows (`Sequence[dict]`):
                Dataset row of each prompt, `[P]`.
            completions (`list`):
                Completions as reward functions receive them, `[P * N]`: the N samples of a prompt are adjacent.
            completion_ids (`list[list[int]]`):
                Their token ids, `[P * N][T_i]`.

        Returns:
            `list[Graded]`: One per prompt, `[P]`.
        """
        num_samples, size = len(completions) // len(rows), len(completions)
        totals: list[float | None] = [None] * size
        success_rewards: list[float | None] = [None] * size
        for name, func, weight in self.rewards:
            # A reward function may change its arguments, so pass copies. Each row is repeated for its N samples.
            examples = [copy.deepcopy(row) for row in rows for _ in range(num_samples)]
            inputs = {}
            for column in rows[0]:
                if column not in ("prompt", "completion", "completion_ids"):
                    inputs[column] = [example[column] for example in examples]
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
                        success_rewards[i] = float(reward)
        deciding = totals
        if self.success_reward is not None:
            deciding = success_rewards
        answers: list[Hashable | None] = [None] * size
        if self.answer_fn is not None:
            answers = [self.answer_fn(completion_text(completion)) for completion in completions]
        graded = []
        for start in range(0, size, num_samples):
            part = slice(start, start + num_samples)
            graded.append(Graded(totals[part], deciding[part], answers[part]))
        return graded
