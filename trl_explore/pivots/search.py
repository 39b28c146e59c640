"""DEEP-GRPO's search: pivots inside the failed completions of a batch, and branches that are sampled from them."""

import warnings
from typing import Any

import torch

from trl_explore.agents.forks import Forks
from trl_explore.agents.trajectories import Fork, suffix_mask
from trl_explore.pivots.choice import (
    BranchPoint,
    Pivot,
    draw_pivots,
    drop_empty_end,
    failed_rows,
    pivot_distribution,
    relative_depths,
    segment_delimiters,
    segment_fixed,
    turn_starts,
)
from trl_explore.pivots.estimator import SuccessEstimator
from trl_explore.rewards.success import failed, succeeded
from trl_explore.rows.policy import Policy
from trl_explore.rows.rollouts import Continuation, Rows
from trl_explore.rows.scorer import ScoredRows, Scorer
from trl_explore.sampling.sampler import Sampler
from trl_explore.saving.plain_values import to_plain


class PivotSearch:
    """Chooses pivots (Eq. 1) and samples branches from them."""

    def __init__(
        self, policy: Policy, scorer: Scorer, estimator: SuccessEstimator, forks: Forks | None = None
    ) -> None:
        self.policy, self.scorer, self.estimator, self.args = policy, scorer, estimator, policy.args
        self.forks = forks  # of an agent; it may be left at its turns, and inside the last one
        # Equal on all processes: it decides which pivots of the whole batch are kept.
        self.shared_generator = torch.Generator().manual_seed(policy.args.seed)
        self.num_batches = 0
        self._delimiter_cache: dict[int, str] = {}
        self._distributions: dict[tuple[int, int], torch.Tensor] = {}  # of this batch, by points and possible ones
        self._num_cut = 0  # completions with a cut, of those that pivots were drawn in
        self._warned = False

    def choose(
        self,
        examples: list[dict[str, Any]],
        prompt_ids: list[list[int]],
        completion_ids: list[list[int]],
        explored: torch.Tensor | None = None,
    ) -> list[BranchPoint]:
        """Where the failed completions of a batch, of the rows `explored` `(N,)`, are left; every process calls it."""
        most = self.budget(completion_ids)
        self._distributions.clear()  # the estimator has learned since
        rewards = self.scorer.success()
        chosen = failed_rows(
            rewards,
            threshold=self.args.success_threshold,
            group_size=self.args.num_generations,
            branch_from=self.args.branch_from,
        )
        chosen = chosen if explored is None else chosen & explored
        failures = failed(rewards, threshold=self.args.success_threshold)
        self.policy.log_metric("pivots/failure_fraction", failures.float().mean().item())
        pivots = [
            p
            for row in self.policy.ranks.local(chosen).nonzero().squeeze(1).tolist()
            if self.forks is None or not self.forks.has_failed(row)
            for p in self.draw(row, completion_ids[row], most)
        ]
        self._warn_without_cuts(int(chosen.sum()))
        if self.args.max_pivots_per_batch is not None:
            pivots = self._capped(pivots, self.args.max_pivots_per_batch)
        return [
            BranchPoint(
                example=dict(examples[p.row]) if self.forks is None else self.forks.example(p.row),
                prompt_ids=prompt_ids[p.row],
                prefix_ids=completion_ids[p.row][: p.start],
                depth=p.depth,
                row=p.row,
            )
            for p in pivots
        ]

    def _warn_without_cuts(self, num_drawn: int) -> None:
        if self._warned or not num_drawn or self.args.pivot_selection == "root":
            return
        self._warned = True  # looked at once, in the first batch with a failure
        if self.policy.ranks.gathered(self._num_cut).sum() == 0 and self.policy.accelerator.is_main_process:
            fixed = self.args.segmentation == "fixed"
            where = "shorter than a segment" if fixed else f"without any of {self.args.segment_delimiters!r}"
            fields = "a smaller `segment_length`" if fixed else "other `segment_delimiters`, or `segmentation='fixed'`"
            warnings.warn(
                f"All {num_drawn} failed completions of the first batch with failures are {where}, so that they could "
                f"not be cut: branches start from the prompt. Choose {fields}.",
                stacklevel=2,
            )

    def draw(self, row: int, ids: list[int], most: int) -> list[Pivot]:
        """Pivots of one completion; none has more than `most` tokens."""
        starts = drop_empty_end(
            self._starts(row, ids, most), ids, self.policy.tokenizer, end_ids=self.policy.eos_token_ids
        )
        depths = relative_depths(len(starts))
        self._num_cut += len(starts) > 1
        last = max(0, most - (self.args.min_remaining_tokens or max(1, most // 10)))
        num_possible = sum(start <= last for start in starts)  # the first so many
        if self.args.pivot_selection == "root":
            # As many groups as there would be elsewhere, so that the control has its rivals' budget.
            return [Pivot(row, 0, float(depths[0]))] * min(self.args.num_pivots, num_possible)
        if (len(starts), num_possible) not in self._distributions:
            self._distributions[len(starts), num_possible] = self._distribution(depths, num_possible)
        probs = self._distributions[len(starts), num_possible]
        drawn = draw_pivots(probs, self.args.num_pivots, generator=self.policy.exploration_generator)
        return [Pivot(row, starts[t], float(depths[t])) for t in drawn]

    def _distribution(self, depths: torch.Tensor, num_possible: int) -> torch.Tensor:
        possible = torch.arange(len(depths)) < num_possible
        if self.args.pivot_selection == "uniform":
            return pivot_distribution(torch.ones_like(depths), gamma=0.0, possible=possible)
        return pivot_distribution(self.estimator.predict(depths), gamma=self.args.depth_bias, possible=possible)

    def _starts(self, row: int, ids: list[int], most: int) -> list[int]:
        if self.forks is None:
            return self._segment(ids, most)
        turns = self.forks.trajectories[row].turns
        return turn_starts(turns, self._segment(ids[slice(*turns[-1])], most))

    def _segment(self, ids: list[int], most: int) -> list[int]:
        if self.args.segmentation == "fixed":
            return segment_fixed(len(ids), length=self.args.segment_length or min(50, most))
        return segment_delimiters(
            ids, self.policy.tokenizer, delimiters=self.args.segment_delimiters, cache=self._delimiter_cache
        )

    def budget(self, completion_ids: list[list[int]]) -> int:
        """Most tokens of a completion. With `max_completion_length=None` the backend decides that for the main rows;
        branches then end where the longest main row of this process ends."""
        return self.args.max_completion_length or max(map(len, completion_ids))

    def _capped(self, pivots: list[Pivot], limit: int) -> list[Pivot]:
        """Keep `limit` pivots of the whole batch: every completion's first one before anybody's second."""
        turns: list[int] = []
        for i, pivot in enumerate(pivots):
            turns.append(turns[-1] + 1 if i and pivots[i - 1].row == pivot.row else 0)
        per_process = self.policy.ranks.objects([turns])
        everyone = torch.tensor([turn for of_process in per_process for turn in of_process], dtype=torch.float64)
        tie_break = torch.rand(len(everyone), generator=self.shared_generator, dtype=torch.float64)
        kept = set((everyone + tie_break).argsort()[:limit].tolist())
        first = sum(len(of_process) for of_process in per_process[: self.policy.ranks.index])
        return [pivot for i, pivot in enumerate(pivots, start=first) if i in kept]

    def branch(self, points: list[BranchPoint], sample: Sampler, most: int) -> None:
        """Sample the branches, all of them in one call, to completions of at most so many tokens."""
        if self.forks is not None:
            return self._branch_trajectories(points, self.forks)
        prefixes = [b.prompt_ids + b.prefix_ids for b in points]
        with sample.rollout():
            continuations = sample(
                prefixes,
                self.args.num_branches,
                [most - len(b.prefix_ids) for b in points],
                begun=[len(b.prefix_ids) for b in points],
            )
        for point, branches in zip(points, continuations, strict=True):
            point.branches = branches

    def _branch_trajectories(self, points: list[BranchPoint], forks: Forks) -> None:
        """An agent goes on with its tools, from the state of its environment, and is judged where that stands."""
        number, left = self.args.num_branches, []
        for point in points:
            assert point.row is not None
            origin, start = forks.trajectories[point.row], len(point.prefix_ids)
            turn = sum(first <= start for first, _ in origin.turns) - 1
            left.append(Fork(origin, turn, number, start))
        branches = forks.leave(left)
        forks.judge(branches, self.scorer)
        for i, point in enumerate(points):
            point.trajectories = own = branches[i * number : (i + 1) * number]
            point.branches = [
                Continuation(b.completion_ids[b.start :], b.logprobs and b.logprobs[b.start :]) for b in own
            ]

    def rows(self, points: list[BranchPoint]) -> Rows:
        """Branches as rows of training; their prefixes only condition (Eq. 4)."""
        pairs = [(b, branch) for b in points for branch in b.branches]
        # The sampler saw the prefixes as prompts; they are not trained.
        logprobs = [[*[0.0] * len(b.prefix_ids), *(branch.logprobs or [])] for b, branch in pairs]
        agents = [trajectory for b in points for trajectory in b.trajectories]
        return Rows(
            examples=[dict(b.example) for b, _ in pairs],
            prompt_ids=[b.prompt_ids for b, _ in pairs],
            completion_ids=[b.prefix_ids + branch.token_ids for b, branch in pairs],
            loss_mask=[suffix_mask(b.loss_mask, b.start) for b in agents]
            or [[0] * len(b.prefix_ids) + [1] * len(branch.token_ids) for b, branch in pairs],
            group_size=self.args.num_branches,
            known_rewards=[b.rewards for b in agents],
            extra=[b.extra for b in agents],
            completions=[b.messages for b in agents],
            parents=[b.row for b, _ in pairs],
            logprobs=logprobs if self.policy.serving is not None else None,
        )

    def learn(self, points: list[BranchPoint], scored: ScoredRows | None) -> list[bool | None]:
        """Teach the estimator which pivots were recovered; all processes see all outcomes, in the same order. `None`
        is a pivot none of whose branches could be scored."""
        self.num_batches += 1
        solved: list[bool | None] = []
        if scored is not None:
            success = succeeded(scored.success_rewards, threshold=self.args.success_threshold)
            success = success.view(-1, self.args.num_branches)
            unknown = scored.success_rewards.isnan().view(-1, self.args.num_branches).all(dim=1).tolist()
            solved = [None if u else ok for ok, u in zip(success.any(dim=1).tolist(), unknown, strict=True)]
        known = [(b.depth, int(ok)) for b, ok in zip(points, solved, strict=True) if ok is not None]
        outcomes = self.policy.ranks.objects(known)
        if outcomes:
            self.estimator.add(*zip(*outcomes, strict=True))
        if self.num_batches % self.args.estimator_update_steps == 0:
            self.estimator.fit()
        return solved

    def metrics(
        self, points: list[BranchPoint], solved: list[bool | None], scored: ScoredRows | None, *, main_tokens: int
    ) -> dict[str, float]:
        """What is logged of a batch's pivots; every process calls it."""
        branches = [branch for b in points for branch in b.branches]
        spread = 0
        if scored is not None:
            advantages = scored.rows["advantages"][: len(scored.rewards)]
            spread = int(advantages.view(-1, self.args.num_branches).any(dim=1).sum())
        own = {
            "tried": len(points),
            "known": sum(ok is not None for ok in solved),
            "recovered": sum(ok is True for ok in solved),
            "informative": spread,
            "depth": sum(b.depth for b in points),
            "branches": len(branches),
            "tokens": sum(b.num_sampled for b in points),
            "main_tokens": main_tokens,
        }
        total = {name: self.policy.ranks.gathered(value).sum().item() for name, value in own.items()}
        metrics = {
            "tried": total["tried"],
            "success_weight": self.estimator.weight,
            "success_bias": self.estimator.bias,
            "token_ratio": total["tokens"] / total["main_tokens"],
            "sampled_tokens": total["tokens"],
        }
        if total["known"]:
            metrics["recovered_fraction"] = total["recovered"] / total["known"]
        if total["tried"]:
            metrics["informative_fraction"] = total["informative"] / total["tried"]
            metrics["mean_depth"] = total["depth"] / total["tried"]
            metrics["mean_suffix_length"] = total["tokens"] / total["branches"]
        return metrics


def check_columns(example: dict[str, Any]) -> None:
    """Examples wait in checkpoints for their branches; what cannot wait there is told before the first step."""
    for name, value in example.items():
        try:
            to_plain(value)
        except TypeError as error:
            raise ValueError(
                f"`deferred_branching=True` keeps examples in checkpoints, which cannot hold the {error} of the "
                f"column {name!r}: convert the column, for example to text, or set `deferred_branching=False`."
            ) from None
