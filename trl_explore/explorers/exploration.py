"""Explore prompts of a generation batch, and put the explored completions among the rows that are trained."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from trl_explore.explorers.explorer import (
    Explored,
    Explorer,
    PlainSampling,
    PromptGroup,
    Sample,
    check_explored,
)
from trl_explore.rewards.success import succeeded
from trl_explore.rows.policy import Policy
from trl_explore.rows.rollouts import Rollout, Rows
from trl_explore.rows.scorer import ScoredRows, Scorer
from trl_explore.rows.streams import RowDict, select_rows
from trl_explore.sampling.sampler import Sampler
from trl_explore.selection.choice import PromptChoice


@dataclass(frozen=True)
class ExploredBatch:
    """The explored prompts of one generation batch."""

    rows: list[int]  # main rows of the explored prompts of this process, whole groups
    explored: list[Explored]  # one for each explored prompt
    beside: Rows | None = None  # explored completions that join GRPO's; None if they replace GRPO's
    anywhere: bool = True  # whether any process explored a prompt

    @property
    def replaces(self) -> bool:
        """Return whether explored completions replace GRPO's in the main rows."""
        return self.anywhere and self.beside is None


class Exploration:
    """
    Lets an explorer sample prompts of each generation batch. GRPO samples and credits the other prompts.

    `batch` holds the explored prompts of the generation batch at hand.
    """

    def __init__(
        self, policy: Policy, explorer: Explorer, choice: PromptChoice | None, sample: Sampler, scorer: Scorer
    ) -> None:
        self.policy, self.explorer, self.choice = policy, explorer, choice
        self.sample, self.scorer, self.args = sample, scorer, policy.args
        # Explored completions join the group of GRPO's samples, or replace it.
        self.joins = choice is not None and policy.args.explore_into == "add"
        self.batch = ExploredBatch([], [], anywhere=False)

    @property
    def size(self) -> int:
        """Return the number of rows of a prompt."""
        return self.args.num_generations

    # ------------------------------------------------------------------------------------------------ sample main rows

    def rollout(self, prompt_ids: list[list[int]], examples: list[dict[str, Any]], plain: PlainSampling) -> Rollout:
        """
        Sample the main rows of a generation batch.

        Args:
            prompt_ids (`list[list[int]]`):
                Prompt tokens of this process's rows, `[B][P_i]`; the rows of a prompt are consecutive.
            examples (`list[dict]`):
                Rows of the data set, `[B]`.
            plain (`Callable[[list[list[int]]], Rollout]`):
                GRPO's own sampling.

        Returns:
            [`Rollout`]: One completion for each row.
        """
        if self.choice is None and not self.explorer.needs_samples:
            return self._explored_everywhere(prompt_ids, examples, plain)
        if self.choice is None or self.choice.needs_rewards or self.joins or self.explorer.needs_samples:
            rollout = self._judged(plain(prompt_ids), prompt_ids, examples)
            deciding = self.scorer.success(self.policy.ranks.gather(self._rewards(rollout.known_rewards)))
            mask = torch.ones_like(deciding, dtype=torch.bool)
            if self.choice is not None:
                mask = self.choice.explored(deciding)
        else:
            # Only the prompts that are not explored need GRPO's samples.
            mask = self.choice.explored(
                torch.zeros(len(prompt_ids) * self.policy.ranks.number, device=self.policy.ranks.device)
            )
            rollout = self._of_others(mask, prompt_ids, examples) if mask.any() else plain(prompt_ids)
        if not mask.any():
            self.batch = ExploredBatch([], [], anywhere=False)
            return rollout
        self._log_plain_tokens(rollout)
        return self._explored(self._local_rows(mask), rollout, prompt_ids, examples)

    def _explored_everywhere(
        self, prompt_ids: list[list[int]], examples: list[dict[str, Any]], plain: PlainSampling
    ) -> Rollout:
        groups = []
        for row in range(0, len(prompt_ids), self.size):
            groups.append(PromptGroup(examples[row], prompt_ids[row]))
        explored = self._explore(groups, plain)
        self.batch = ExploredBatch(list(range(len(prompt_ids))), explored)
        return joined(explored, masks_tokens=self._masks_tokens(explored))

    def _explored(
        self, rows: list[int], rollout: Rollout, prompt_ids: list[list[int]], examples: list[dict[str, Any]]
    ) -> Rollout:
        """Explore the prompts of `rows`. `rollout` holds GRPO's samples of the main rows, with rewards."""
        groups = []
        for row in rows[:: self.size]:
            groups.append(PromptGroup(examples[row], prompt_ids[row], self._samples(rollout, row)))
        # The next batch of GRPO's samples must not depend on how many prompts are explored now.
        with self.sample.forked_randomness():
            explored = self._scored(groups, self._explore(groups, self._plain))
        self._log_solved(explored)
        found = joined(explored, masks_tokens=self._masks_tokens(explored))
        if not self.joins:
            self.batch = ExploredBatch(rows, explored)
            return replaced(rollout, rows, found)
        beside = Rows(
            examples=[examples[row] for row in rows],
            prompt_ids=[prompt_ids[row] for row in rows],
            completion_ids=found.completion_ids,
            loss_mask=found.loss_mask or whole(found.completion_ids),
            group_size=self.size,
            logprobs=found.logprobs,
            known_rewards=[*(found.known_rewards or [])],
            extra=found.extra or (),
        )
        self.batch = ExploredBatch(rows, explored, beside)
        return rollout

    def _explore(self, groups: list[PromptGroup], plain: PlainSampling) -> list[Explored]:
        explored = self.explorer.explore(groups, plain)
        check_explored(self.explorer.name, explored, num_prompts=len(groups), size=self.size)
        return explored

    def _samples(self, rollout: Rollout, row: int) -> list[Sample]:
        samples = []
        for i in range(row, row + self.size):
            if rollout.completion_ids[i]:  # empty if GRPO did not sample this prompt
                assert rollout.known_rewards is not None
                samples.append(Sample(rollout.completion_ids[i], rollout.known_rewards[i]))
        return samples

    def _masks_tokens(self, explored: list[Explored]) -> bool:
        """Return whether the explorer of any process masks tokens: either all processes have a loss mask, or none."""
        return self._on_any_process(any(one.loss_mask is not None for one in explored))

    def _on_any_process(self, here: bool) -> bool:
        return bool(self.policy.ranks.gathered(here).any())

    def _local_rows(self, mask: torch.Tensor) -> list[int]:
        """Return the rows of this process in a mask `(N,)` of all processes."""
        return self.policy.ranks.local(mask).nonzero().squeeze(1).tolist()

    def _of_others(self, mask: torch.Tensor, prompt_ids: list[list[int]], examples: list[dict[str, Any]]) -> Rollout:
        """Return GRPO's samples, with rewards, of the rows that are not in `mask`. Rows in `mask` are empty."""
        number = len(prompt_ids)
        others = self._local_rows(~mask)
        prompts = [prompt_ids[row] for row in others]
        rollout = self._judged(self._plain(prompts), prompts, [examples[row] for row in others])
        empty: list[Any] = [[] for _ in range(number)]
        return Rollout(
            completion_ids=put(empty, others, rollout.completion_ids),
            logprobs=None if rollout.logprobs is None else put(empty, others, rollout.logprobs),
            known_rewards=put(empty, others, rollout.known_rewards or []),
            extra=put([{} for _ in range(number)], others, rollout.extra or []),
        )

    def _plain(self, prompts: list[list[int]]) -> Rollout:
        """Sample as GRPO does. TRL's own sampling needs equally many rows on all processes; this does not."""
        sampled = self.sample(prompts, 1, self.args.max_completion_length, main_stream=True)
        completion_ids, logprobs = [], []
        for (continuation,) in sampled:
            completion_ids.append(continuation.token_ids)
            logprobs.append(continuation.logprobs or [None] * len(continuation.token_ids))
        return Rollout(completion_ids, None if self.policy.serving is None else logprobs)

    # --------------------------------------------------------------------------------------------------------- rewards

    def _judged(self, rollout: Rollout, prompt_ids: list[list[int]], examples: list[dict[str, Any]]) -> Rollout:
        """Return the rollout with rewards."""
        rewards, extra = self.scorer.judge(examples, rollout.completion_ids, prompt_ids=prompt_ids)
        return replace(rollout, known_rewards=rewards, extra=extra)

    def _scored(self, groups: list[PromptGroup], explored: list[Explored]) -> list[Explored]:
        """Ask the reward functions about the completions that the explorer did not score."""
        examples, prompt_ids, completion_ids = [], [], []
        for group, one in zip(groups, explored, strict=True):
            if one.rewards is None:
                examples += [group.example] * len(one.completion_ids)
                prompt_ids += [group.prompt_ids] * len(one.completion_ids)
                completion_ids += one.completion_ids
        rewards, logged = self.scorer.judge(examples, completion_ids, prompt_ids=prompt_ids)
        start = 0
        for one in explored:
            if one.rewards is None:
                end = start + len(one.completion_ids)
                one.rewards, one.logged = rewards[start:end], logged[start:end]
                start = end
        return explored

    def _rewards(self, rewards: Sequence[list[float]] | None) -> torch.Tensor:
        """Return rewards `[R][F]` as a tensor `(R, F)`."""
        found = list(rewards or [])
        tensor = torch.tensor(found, dtype=torch.float32, device=self.policy.ranks.device)
        return tensor.view(len(found), len(self.scorer.names))

    # ---------------------------------------------------------------------------------------------------------- credit

    def credit(self, output: RowDict) -> torch.Tensor:
        """
        Return the advantages of the main rows: the explorer's if a row is explored, GRPO's otherwise.

        Args:
            output (`dict`):
                The main rows as TRL scored them, B rows.

        Returns:
            `torch.Tensor`: Advantages of shape `(B,)` or `(B, T)`.
        """
        batch = self.batch
        if not batch.replaces:
            return output["advantages"]
        self._note_rewards()
        return self._credited(output, batch.rows)

    def streams(self) -> dict[str, tuple[ScoredRows, float]]:
        """Return the explored completions that join GRPO's, as rows of training."""
        if self.batch.beside is None:
            return {}
        beside = self.batch.beside
        scored = self.scorer.score("explored", beside)
        assert scored is not None
        scored.rows["advantages"] = self._credited(scored.rows, list(range(len(beside))))
        return {"explored": (scored, 1.0)}

    def columns(self, num_rows: int) -> dict[str, list[Any]]:
        """Return columns `[B]` of the completions table: the explorer's, and its `plain_columns` for GRPO's rows."""
        columns = {name: [value] * num_rows for name, value in self.explorer.plain_columns.items()}
        if not self.batch.replaces:
            return columns
        for name in columns:
            values: list[Any] = []
            for one in self.batch.explored:
                values += one.columns[name]
            columns[name] = put(columns[name], self.batch.rows, values)
        return columns

    def _note_rewards(self) -> None:
        """Note the rewards that TRL computed, for completions that the explorer did not score."""
        assert self.scorer.rewards_per_func is not None
        rewards = self.policy.ranks.local(self.scorer.rewards_per_func).tolist()
        for group, one in enumerate(self.batch.explored):
            if one.rewards is None:
                one.rewards = rewards[group * self.size : (group + 1) * self.size]

    def _credited(self, rows: RowDict, places: list[int]) -> torch.Tensor:
        """Return the advantages of rows. The explored rows are at `places`."""
        advantages = rows["advantages"]
        index = torch.tensor(places, dtype=torch.long, device=advantages.device)
        credited = self.explorer.credit(self.batch.explored, select_rows(rows, index))
        # A process without explored prompts must return advantages of tokens, too, if another process has them.
        if self._on_any_process(credited.dim() == 2):
            advantages = advantages.unsqueeze(1).repeat(1, rows["completion_ids"].shape[1])
            if credited.dim() == 1:
                credited = credited.unsqueeze(1).repeat(1, rows["completion_ids"].shape[1])
        return advantages.index_copy(0, index, credited)

    # --------------------------------------------------------------------------------------------------------- metrics

    def _log_plain_tokens(self, rollout: Rollout) -> None:
        own = sum(len(ids) for ids in rollout.completion_ids)
        self.policy.log_metric("explore/plain_tokens", self.policy.ranks.summed({"plain": own})["plain"])

    def _log_solved(self, explored: list[Explored]) -> None:
        """Log the share of explored prompts that have a success by now."""
        rewards: list[list[float]] = []
        for one in explored:
            rewards += one.rewards or []
        deciding = self.scorer.success(self._rewards(rewards)).view(len(explored), self.size)
        solved = succeeded(deciding, threshold=self.args.success_bar).any(dim=1)
        total = self.policy.ranks.summed({"solved": int(solved.sum()), "groups": len(solved)})
        self.policy.log_metric("explore/solved_after", total["solved"] / total["groups"])


def joined(explored: list[Explored], *, masks_tokens: bool) -> Rollout:
    """Return the completions of several prompts as one rollout. `masks_tokens`: whether it has a loss mask."""
    completion_ids: list[list[int]] = []
    logprobs: list[list[float | None]] = []
    loss_mask: list[list[int]] = []
    rewards: list[list[float]] = []
    extra: list[Mapping[str, Any]] = []
    for one in explored:
        completion_ids += one.completion_ids
        logprobs += one.logprobs or unknown(one.completion_ids)
        loss_mask += one.loss_mask or whole(one.completion_ids)
        rewards += one.rewards or []
        extra += one.logged or [{} for _ in one.completion_ids]
    rollout = Rollout(completion_ids)
    if any(one.logprobs is not None for one in explored):
        rollout.logprobs = logprobs
    if masks_tokens:
        rollout.loss_mask = loss_mask
    if all(one.rewards is not None for one in explored):
        rollout.known_rewards, rollout.extra = rewards, extra
    return rollout


def replaced(rollout: Rollout, rows: list[int], found: Rollout) -> Rollout:
    """Return the rollout with the completions of `found` in `rows`. Both have rewards."""
    logprobs = rollout.logprobs
    if logprobs is not None:
        logprobs = put(logprobs, rows, found.logprobs or unknown(found.completion_ids))
    loss_mask = None
    if found.loss_mask is not None:
        loss_mask = put(whole(rollout.completion_ids), rows, found.loss_mask)
    return Rollout(
        completion_ids=put(rollout.completion_ids, rows, found.completion_ids),
        logprobs=logprobs,
        loss_mask=loss_mask,
        known_rewards=put(rollout.known_rewards or [], rows, found.known_rewards or []),
        extra=put(rollout.extra or [], rows, found.extra or []),
    )


def put(values: Sequence[Any], places: Sequence[int], others: Sequence[Any]) -> list[Any]:
    """Return the values with `others` at `places`."""
    merged = list(values)
    for place, other in zip(places, others, strict=True):
        merged[place] = other
    return merged


def whole(completion_ids: list[list[int]]) -> list[list[int]]:
    """Return a loss mask that trains every token."""
    return [[1] * len(ids) for ids in completion_ids]


def unknown(completion_ids: list[list[int]]) -> list[list[float | None]]:
    """Return log-probabilities that say that the sampler reported none."""
    return [[None] * len(ids) for ids in completion_ids]
