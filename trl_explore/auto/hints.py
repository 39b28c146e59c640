"""The explorer `"hints"`: it samples completions of a failed prompt with hints, from the weakest to the strongest."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from datasets import Dataset, IterableDataset

from trl_explore.auto.joined import joined_advantages
from trl_explore.explorers.branch_explorer import Branches, BranchExplorer, ScoredGroup
from trl_explore.forks.trajectories import suffix_mask
from trl_explore.rewards.success import succeeded
from trl_explore.rows.columns import row_columns
from trl_explore.rows.policy import Policy
from trl_explore.rows.rollouts import Rows
from trl_explore.rows.scorer import Scorer
from trl_explore.rows.truncation import is_trained
from trl_explore.sketches.drafts import fill_prompt
from trl_explore.sketches.weights import Drawn, likelihood_ratios

if TYPE_CHECKING:
    from trl_explore.forks.engine import Forks
    from trl_explore.trainers.config import ExplorationConfig
    from trl_explore.trainers.explorer_configs import HintConfig


@dataclass(frozen=True)
class Hint:
    """A hint for a prompt."""

    text: str  # the hint, or the solution
    # With `hint_fractions`: tokens of the solution with which a completion begins. Empty: the prompt contains `text`.
    shown_ids: list[int] = field(default_factory=list)


@dataclass
class HintedCompletion:
    """A completion that was sampled with a hint."""

    context_ids: list[int]  # prompt from which it was sampled; contains the hint unless `num_shown > 0`
    completion_ids: list[int]  # `num_shown` tokens of the solution, then sampled tokens, `[T]`
    num_shown: int  # number of tokens at the beginning that come from the solution and were not sampled
    logprobs: list[float | None]  # under the sampler, `[T]`; None: not known
    level: int = 0  # index of the hint; 0 is the weakest
    is_trained: bool = True  # False if TRL masks the whole completion because it is truncated
    rewards: list[float] | None = None  # `[F]`; None: not scored yet
    extra: Any = None  # values that reward functions logged with `log_extra`, by column


class HintExplorer(BranchExplorer):
    """
    Samples completions with hints, from the weakest hint to the strongest, until a completion succeeds.

    The successful completions of that hint, at most `hint_rows`, replace rows of the failed group. Hints in the prompt
    follow Scaf-GRPO (https://huggingface.co/papers/2510.19807). Beginnings of a solution follow QuestA
    (https://huggingface.co/papers/2507.13266).
    """

    name = "hints"
    credits_main_rows = True
    args: "HintConfig"

    def __init__(
        self, policy: Policy, forks: "Forks", scorer: Scorer, *, args: "ExplorationConfig | None" = None
    ) -> None:
        super().__init__(policy, forks, scorer, args=args)
        self._found: list[list[HintedCompletion]] = []  # successful completions of each group of this batch

    @property
    def weight(self) -> None:
        return None

    def suits(self, group: ScoredGroup) -> bool:
        return bool(self._hints(group.trajectories[0].example))

    def explore(self, groups: Sequence[ScoredGroup]) -> Branches:
        hints = [self._hints(group.trajectories[0].example) for group in groups]
        found: list[list[HintedCompletion]] = [[] for _ in groups]  # successful completions of each group
        sample = self.forks.sample
        # Every process must sample equally often, so all use the number of levels of the process with the most hints.
        for level in range(self.policy.ranks.most(max(map(len, hints), default=0))):
            # For each group without a success: index of the group, prompt tokens, and shown tokens of the solution.
            asked: list[tuple[int, list[int], list[int]]] = []
            for place, group in enumerate(groups):
                if not found[place] and level < len(hints[place]):
                    hint = hints[place][level]
                    asked.append((place, self._context(group, hint), hint.shown_ids))
            prefixes = [context + shown for _, context, shown in asked]
            longest = self.forks.longest_completion()
            budgets = [longest - len(shown) for _, _, shown in asked]
            begun = [len(shown) for _, _, shown in asked]
            sampled = sample(prefixes, self.args.hint_samples, budgets, begun=begun)
            tried: list[tuple[int, HintedCompletion]] = []  # index of the group, and completion
            for (place, context, shown), continuations in zip(asked, sampled, strict=True):
                for continuation in continuations:
                    ids = continuation.token_ids
                    logprobs: list[float | None] = [None] * len(shown)
                    logprobs += continuation.logprobs or [None] * len(ids)
                    completion_ids = shown + ids
                    is_kept = is_trained(self.policy, completion_ids)
                    hinted = HintedCompletion(context, completion_ids, len(shown), logprobs, level, is_kept)
                    tried.append((place, hinted))
            self._judge(groups, [completion for _, completion in tried], [place for place, _ in tried])
            for place, completion in tried:
                if len(found[place]) < self.args.hint_rows and completion.is_trained and self._is_success(completion):
                    found[place].append(completion)
        self._found = found
        self._log(groups)
        return self._branches(groups)

    def _hints(self, example: dict[str, Any]) -> list[Hint]:
        """Return the hints of a prompt, from the weakest to the strongest."""
        texts = read_hints(example.get(self.args.hint_column), self.args.hint_column)
        if self.args.hint_fractions is None:
            return [Hint(text) for text in texts]
        hints: list[Hint] = []
        for fraction in self.args.hint_fractions:
            for solution in texts:
                ids = self.policy.tokenizer(solution, add_special_tokens=False)["input_ids"]
                number = min(math.ceil(fraction * len(ids)), len(ids) - 1, self.forks.longest_completion() - 1)
                hint = Hint(solution, ids[:number])
                if number > 0 and hint not in hints:  # two fractions of a short solution may show the same tokens
                    hints.append(hint)
        return hints

    def _context(self, group: ScoredGroup, hint: Hint) -> list[int]:
        """Return the prompt tokens from which completions with a hint are sampled."""
        origin = group.trajectories[0]
        if hint.shown_ids:
            return origin.prompt_ids
        prompt = fill_prompt(origin.example["prompt"], self.args.hint_template, {"hint": hint.text})
        return self.policy.encode_prompts([prompt])[0]

    def _judge(self, groups: Sequence[ScoredGroup], tried: Sequence[HintedCompletion], places: Sequence[int]) -> None:
        """Score completions. `places` are the indices of their groups. Every process must call it."""
        origins = [groups[place].trajectories[0] for place in places]
        rewards, extra = self.scorer.judge(
            [origin.example for origin in origins],
            [completion.completion_ids for completion in tried],
            prompt_ids=[origin.prompt_ids for origin in origins],
        )
        for completion, values, columns in zip(tried, rewards, extra, strict=True):
            completion.rewards, completion.extra = values, columns

    def _is_success(self, completion: HintedCompletion) -> bool:
        """Return whether a scored completion is a success."""
        deciding = self.scorer.success(torch.tensor([completion.rewards]))
        return bool(succeeded(deciding, threshold=self.args.resolved_success_threshold)[0])

    # ------------------------------------------------------------------------------------------------------------ rows

    def _branches(self, groups: Sequence[ScoredGroup]) -> Branches:
        """Return the successful completions as rows, with their advantages and the new advantages of GRPO's rows."""
        plain = self.args.hint_loss == "plain"
        examples, prompt_ids, completion_ids, loss_mask = [], [], [], []
        drawn: list[list[Drawn]] = []  # tokens of each row that were sampled from another prompt than the row has
        known_rewards: list[list[float] | None] = []
        logprobs: list[list[float | None]] = []
        extra, parents = [], []
        row_advantages: list[float] = []  # one for each row, before the likelihood ratio
        main_advantages: dict[int, float | list[float]] = {}
        for group, hinted in zip(groups, self._found, strict=True):
            if not hinted:
                continue
            origin = group.trajectories[0]
            new = []  # total reward and deciding reward of each new row of the group
            for completion in hinted:
                assert completion.rewards is not None
                rewards = torch.tensor([completion.rewards])
                new.append((self.scorer.totals(rewards).item(), self.scorer.success(rewards).item()))
                trained_prompt = completion.context_ids
                if plain or completion.num_shown > 0:
                    trained_prompt = origin.prompt_ids
                examples.append(origin.example)
                prompt_ids.append(trained_prompt)
                completion_ids.append(completion.completion_ids)
                loss_mask.append(suffix_mask([1] * len(completion.completion_ids), completion.num_shown))
                if trained_prompt == completion.context_ids:
                    drawn.append([])
                    logprobs.append(completion.logprobs)
                else:
                    # The row is trained with another prompt than it was sampled from, so it needs a likelihood ratio.
                    # The sampler's log-probabilities belong to the other prompt.
                    drawn.append([Drawn(0, completion.context_ids, completion.completion_ids)])
                    logprobs.append([None] * len(completion.completion_ids))
                known_rewards.append(completion.rewards)
                extra.append(completion.extra or {})
                parents.append(origin.row)
            main = list(zip(group.rewards, group.deciding, strict=True))
            main_values, values = joined_advantages(self.args, main, new)
            row_advantages += values
            for trajectory, value in zip(group.trajectories, main_values, strict=True):
                main_advantages[trajectory.main_row] = value
        rows = Rows(
            examples=examples,
            prompt_ids=prompt_ids,
            completion_ids=completion_ids,
            loss_mask=loss_mask,
            group_size=1,
            logprobs=logprobs if self.policy.serving is not None else None,
            known_rewards=known_rewards,
            extra=extra,
            parents=parents,
            shared=[0] * len(examples),
        )
        advantages: list[float | list[float]] = [*row_advantages]
        if self.policy.ranks.most(any(drawn)):  # every process must call `likelihood_ratios`, or none
            ratios = likelihood_ratios(
                self.forks.sample, prompt_ids, completion_ids, drawn, max_drawn=1, rows=list(range(len(rows)))
            ).clamp(max=self.args.hint_ratio_cap)
            for row, value in enumerate(row_advantages):
                advantages[row] = [value * ratio for ratio in ratios[row, : len(completion_ids[row])].tolist()]
        return Branches(rows, advantages, main_advantages)

    def _log(self, groups: Sequence[ScoredGroup]) -> None:
        """Log the metrics of this batch. Every process must call it."""
        levels = [hinted[0].level for hinted in self._found if hinted]
        total = self.policy.ranks.summed({"asked": len(groups), "solved": len(levels), "level": sum(levels)})
        if total["asked"]:
            self.policy.log_metric("hints/solved_fraction", total["solved"] / total["asked"])
        if total["solved"]:
            self.policy.log_metric("hints/mean_level", total["level"] / total["solved"])


def read_hints(value: Any, column: str) -> list[str]:
    """
    Return the hints in one row of `hint_column`. The list is empty if the row has no hints.

    Args:
        value (`Any`):
            The value of the row.
        column (`str`):
            Name of the column, for the error message.

    Raises:
        ValueError: If the value is neither a text nor a list of texts.
    """
    if isinstance(value, np.ndarray):  # a data set with the format "numpy" has lists as arrays
        value = value.tolist()
    if value is None or isinstance(value, str):
        value = [value]
    if isinstance(value, list | tuple) and all(isinstance(text, str | None) for text in value):
        return [text for text in value if text]
    raise ValueError(
        f"`hint_column={column!r}` must hold a text or a list of texts, from the weakest hint to the strongest, but "
        f"one row has {str(value)[:100]!r}: convert the column."
    )


def check_hint_column(column: str, dataset: Any, *, remove_unused_columns: bool | None, most: int = 10_000) -> None:
    """Raise ValueError if a data set has no such column, if its first `most` rows contain no hint, or if
    `remove_unused_columns` would remove the column."""
    if remove_unused_columns:
        raise ValueError(
            f"`hint_column={column!r}` cannot be read with `remove_unused_columns=True`, which takes the column away: "
            "set `remove_unused_columns=False`."
        )
    if not isinstance(dataset, Dataset | IterableDataset):
        return
    columns = row_columns(dataset)
    if columns is not None and column not in columns:
        raise ValueError(
            f"`hint_column={column!r}` is no column of the data, which has {', '.join(columns)}: add it, name another "
            "with `explorer_options={'hints': {'hint_column': ...}}`, or explore without hints."
        )
    # Rows of a stream, and rows that a transform makes, are checked later, when training reads them.
    if not isinstance(dataset, Dataset) or column not in dataset.column_names or dataset.format["type"] == "custom":
        return
    values = dataset.select(range(min(most, len(dataset))))[column][:]
    # Read all rows before `any`, so that a row with a wrong type raises even if the first row has a hint.
    hints = [read_hints(value, column) for value in values]
    if not any(hints):
        raise ValueError(
            f"`hint_column={column!r}` has no hint in the first {len(values)} rows, so nothing can be explored: fill "
            "it, or explore without hints."
        )
