"""Exploring by need: only prompts that GRPO's own samples do not solve are searched, sketched or branched."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from trl_explore.rewards.success import succeeded
from trl_explore.rows.policy import Policy
from trl_explore.rows.rollouts import Rollout, Rows
from trl_explore.rows.scorer import ScoredRows, Scorer
from trl_explore.rows.streams import RowDict, select_rows
from trl_explore.sampling.sampler import Sampler

Chooser = Callable[[list[list[int]]], Rollout]
# Advantages of rows, by the tokens of their completions and the reward `(M,)` that decides about success.
Credit = Callable[[RowDict, list[list[int]], torch.Tensor], torch.Tensor]


def share_at(progress: float, end: float) -> float:
    """Share of the prompts that may be explored, once so much of the training, from 0 to 1, is over."""
    return 1.0 + (end - 1.0) * min(max(progress, 0.0), 1.0)


class Need:
    """
    Decides which prompts of a generation batch are explored. Where a method samples main rows in its own way, the
    others are sampled and credited as in GRPO.

    `rows` are the explored rows of this process, whole groups; `any_explored` tells whether any process has some.
    """

    def __init__(self, policy: Policy, scorer: Scorer, sample: Sampler) -> None:
        self.policy, self.scorer, self.sample, self.args = policy, scorer, sample, policy.args
        self.rows: list[int] = []
        self.any_explored = False
        self.adds = policy.args.explore_into == "add"
        self._beside = Rows([], [], [], [], self.size)  # explored rows that join the main ones

    @property
    def size(self) -> int:
        """Rows of a prompt."""
        return self.args.num_generations

    # --------------------------------------------------------------------------------------------------- which prompts

    def explored(self, deciding: torch.Tensor) -> torch.Tensor:
        """Mask `(N,)` of the main rows of explored prompts, by the reward `(N,)` that decides about success; groups
        are consecutive. Every process calls it once per generation batch."""
        args = self.args
        groups = deciding.view(-1, self.size)
        mask = torch.ones_like(groups[:, 0], dtype=torch.bool)
        if args.explore_prompts == "unsolved":
            # A group that nothing could be said about is no failure.
            mask = ~succeeded(groups, threshold=args.success_threshold).any(dim=1) & ~groups.isnan().all(dim=1)
        if args.explore_share_end < 1:
            own = torch.rand(len(deciding) // self.policy.ranks.number, generator=self.policy.exploration_generator)
            drawn = self.policy.ranks.gather(own.to(deciding.device)).view(-1, self.size)[:, 0]
            mask &= drawn < share_at(self.policy.training_progress, args.explore_share_end)
        self.policy.log_metric("explore_share", mask.float().mean().item())
        return mask.repeat_interleave(self.size)

    # ------------------------------------------------------------------------------- methods that sample the main rows

    def rollout(
        self,
        prompt_ids: list[list[int]],
        examples: list[dict[str, Any]],
        plain: Chooser,
        own: Callable[[list[int], Chooser], Rollout],
    ) -> Rollout:
        """Main rows as GRPO samples them, and in the place of failed groups, or beside them, what the method's `own`
        sampling makes of these rows. Where success decides, the next batch is sampled as if nothing had been
        explored."""
        ranks = self.policy.ranks
        if self.args.explore_prompts == "all" and not self.adds:
            # Which prompts are explored is drawn, whatever GRPO's samples are, so only the others need these.
            self._choose(torch.zeros(len(prompt_ids) * ranks.number, device=ranks.device))
            rollout = self._others(prompt_ids, examples) if self.any_explored else plain(prompt_ids)
        else:
            rollout = self._judged(plain(prompt_ids), prompt_ids, examples)
            self._choose(self.scorer.success(ranks.gather(self._rewards(rollout))))
        if not self.any_explored:
            return rollout
        plain_tokens = ranks.summed({"plain": sum(map(len, rollout.completion_ids))})["plain"]
        self.policy.log_metric("explore/plain_tokens", plain_tokens)
        chosen = [examples[row] for row in self.rows]
        with self.sample.forked_randomness():
            found = self._judged(own(self.rows, self._again), [prompt_ids[row] for row in self.rows], chosen)
        deciding = self.scorer.success(self._rewards(found)).view(len(self.rows) // self.size, self.size)
        solved = succeeded(deciding, threshold=self.args.success_threshold).any(dim=1)
        total = ranks.summed({"solved": int(solved.sum()), "groups": len(solved)})
        self.policy.log_metric("explore/solved_after", total["solved"] / total["groups"])
        if not self.adds:
            return self._replaced(rollout, found)
        self._beside = Rows(
            examples=chosen,
            prompt_ids=[prompt_ids[row] for row in self.rows],
            completion_ids=found.completion_ids,
            loss_mask=found.loss_mask or [[1] * len(ids) for ids in found.completion_ids],
            group_size=self.size,
            logprobs=found.logprobs,
            known_rewards=[*(found.known_rewards or [])],
            extra=found.extra or (),
        )
        return rollout

    def _choose(self, deciding: torch.Tensor) -> None:
        """Notes which rows are explored, of all main rows."""
        mask = self.explored(deciding)
        self.rows = self.policy.ranks.local(mask).nonzero().squeeze(1).tolist()
        self.any_explored = bool(mask.any())

    def _others(self, prompt_ids: list[list[int]], examples: list[dict[str, Any]]) -> Rollout:
        """GRPO's samples, with rewards, for the rows that are not explored; the others are empty."""
        others = sorted(set(range(len(prompt_ids))).difference(self.rows))
        prompts = [prompt_ids[row] for row in others]
        rollout = self._judged(self._again(prompts), prompts, [examples[row] for row in others])

        def spread(values: Sequence[Any] | None) -> Any:
            placed = None if values is None else dict(zip(others, values, strict=True))
            return None if placed is None else [placed.get(row, []) for row in range(len(prompt_ids))]

        return replace(
            rollout,
            completion_ids=spread(rollout.completion_ids),
            logprobs=spread(rollout.logprobs),
            known_rewards=spread(rollout.known_rewards),
            extra=spread(rollout.extra),
        )

    def _judged(self, rollout: Rollout, prompt_ids: list[list[int]], examples: list[dict[str, Any]]) -> Rollout:
        """Return the rollout with rewards: no reward function is asked about a row twice."""
        if rollout.known_rewards is not None:
            return rollout
        rewards, extra = self.scorer.judge(examples, rollout.completion_ids, prompt_ids=prompt_ids)
        return replace(rollout, known_rewards=rewards, extra=extra)

    def _rewards(self, rollout: Rollout) -> torch.Tensor:
        rewards = torch.tensor(rollout.known_rewards, dtype=torch.float32, device=self.policy.ranks.device)
        return rewards.view(len(rollout.completion_ids), len(self.scorer.names))

    def _again(self, prefixes: list[list[int]]) -> Rollout:
        """GRPO's own sampling, where processes may have unequally many rows."""
        sampled = [one for (one,) in self.sample(prefixes, 1, self.args.max_completion_length, main_stream=True)]
        served = self.policy.serving is not None
        return Rollout(
            [one.token_ids for one in sampled],
            [one.logprobs or [None] * len(one.token_ids) for one in sampled] if served else None,
        )

    def _replaced(self, rollout: Rollout, found: Rollout) -> Rollout:
        """A rollout with other rows in the place of those explored; what they lack stands for what GRPO's have."""
        blank = [[None] * len(ids) for ids in found.completion_ids]
        whole = [[1] * len(ids) for ids in rollout.completion_ids]
        return Rollout(
            self._put(rollout.completion_ids, found.completion_ids),
            rollout.logprobs and self._put(rollout.logprobs, found.logprobs or blank),
            None if found.loss_mask is None else self._put(whole, found.loss_mask),
            self._put(rollout.known_rewards, found.known_rewards),
            self._put(rollout.extra, found.extra or [{} for _ in self.rows]),
        )

    def _put(self, values: Any, explored: Any) -> list[Any]:
        """Values `[B]` with others in the explored rows."""
        merged = list(values)
        for row, value in zip(self.rows, explored, strict=True):
            merged[row] = value
        return merged

    def credit(self, output: RowDict, completion_ids: list[list[int]], own: Credit) -> torch.Tensor:
        """Advantages, `(B,)` or `(B, T)`: the method's `own` on explored main rows, GRPO's on the others."""
        if not self.any_explored or self.adds:
            return output["advantages"]
        deciding = self.policy.ranks.local(self.scorer.success())
        return self._credited(output, [completion_ids[row] for row in self.rows], deciding[self.rows], own)

    def streams(self, own: Credit) -> dict[str, tuple[ScoredRows, float]]:
        """The explored rows that join the main ones, with the method's `own` credit."""
        if not self.any_explored or not self.adds:
            return {}
        beside, self._beside = self._beside, Rows([], [], [], [], self.size)
        scored = self.scorer.score("explored", beside)
        assert scored is not None
        self.rows = list(range(len(beside)))
        scored.rows["advantages"] = self._credited(scored.rows, beside.completion_ids, scored.success_rewards, own)
        return {"explored": (scored, 1.0)}

    def _credited(
        self, rows: RowDict, completion_ids: list[list[int]], deciding: torch.Tensor, own: Credit
    ) -> torch.Tensor:
        advantages = rows["advantages"]
        index = torch.tensor(self.rows, dtype=torch.long, device=advantages.device)
        credited = own(select_rows(rows, index), completion_ids, deciding)
        if credited.dim() == 2:
            advantages = advantages.unsqueeze(1).repeat(1, credited.shape[1])
        return advantages.index_copy(0, index, credited)

    def columns(self, found: dict[str, list[Any]], empty: dict[str, Any], num_rows: int) -> dict[str, list[Any]]:
        """Columns `[B]` of the completions table: what the method says of its rows, and `empty` of GRPO's."""
        if not self.any_explored or self.adds:
            return {name: [value] * num_rows for name, value in empty.items()}
        return {name: self._put([value] * num_rows, found[name]) for name, value in empty.items()}
