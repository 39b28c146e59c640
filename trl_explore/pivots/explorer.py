"""DEEP-GRPO's explorer: pivots inside the failed completions of a batch, and branches that are sampled from them."""

import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from trl_explore.explorers.branch_explorer import Branches, BranchExplorer, ScoredGroup
from trl_explore.explorers.explorer import PlainSampling
from trl_explore.forks.engine import Forks
from trl_explore.forks.trajectories import Trajectory
from trl_explore.pivots.choice import (
    BranchPoint,
    Pivot,
    draw_pivots,
    drop_empty_end,
    pivot_distribution,
    relative_depths,
    rows_to_branch_from,
    segment_delimiters,
    segment_fixed,
    turn_starts,
)
from trl_explore.pivots.estimator import SuccessEstimator
from trl_explore.rewards.success import failed, succeeded
from trl_explore.rows.policy import Policy
from trl_explore.rows.rollouts import Continuation, Rollout, Rows
from trl_explore.rows.scorer import ScoredRows, Scorer
from trl_explore.saving.checkpoints import path_inside
from trl_explore.saving.plain_values import from_plain, to_plain
from trl_explore.saving.whole_files import MethodFile

if TYPE_CHECKING:
    from trl_explore.trainers.config import ExplorationConfig
    from trl_explore.trainers.deep_grpo_config import DeepGRPOConfig


class PivotExplorer(BranchExplorer):
    """Cuts failed completions into segments, draws pivots among their starts (Eq. 1), and samples branches from the
    pivots. A branch's advantage is relative to the other branches of its pivot."""

    name = "pivots"
    stream = "aux"
    args: "DeepGRPOConfig"

    def __init__(
        self, policy: Policy, forks: Forks, scorer: Scorer, *, args: "ExplorationConfig | None" = None
    ) -> None:
        super().__init__(policy, forks, scorer, args=args)
        args = self.args
        self.estimator = SuccessEstimator(
            buffer_size=args.estimator_buffer_size, l2=args.estimator_l2, min_samples=args.estimator_min_samples
        )
        # Equal on all processes: it decides which pivots of the whole batch are kept.
        self.shared_generator = torch.Generator().manual_seed(args.seed)
        self.num_batches = 0
        self._num_kept = 0  # number of pivots of this batch so far, with `max_pivots_per_batch`
        file = None
        if args.hard_states_file:
            file = path_inside(args.output_dir, args.hard_states_file, field="hard_states_file")
        self.hard_states = MethodFile(file, writes=policy.accelerator.is_main_process)
        self._points: list[BranchPoint] = []  # pivots whose branches are trained with this batch
        self._queue: list[BranchPoint] = []  # pivots that wait for their branches (`deferred_branching`)
        self._pivot_depths: dict[int, float] = {}  # depth of the first pivot of each main row that has one
        self._recovered: dict[int, bool] = {}  # by main row with scored branches: True if one of them succeeded
        self._delimiter_cache: dict[int, str] = {}
        # Pivot distributions of this batch, by number of segments and number of possible pivots.
        self._distributions: dict[tuple[int, int], torch.Tensor] = {}
        self._num_cut = 0  # number of completions with more than one segment that `draw` got
        self._warned = False
        self._own_seconds = 0.0  # time without sampling and scoring

    @property
    def weight(self) -> float:
        return self.args.aux_loss_weight

    # ------------------------------------------------------------------------------------------------- sample branches

    def begin_batch(self) -> None:
        self._num_kept = 0

    def explore(self, groups: Sequence[ScoredGroup]) -> Branches:
        start = time.perf_counter()
        chosen = self.choose(groups)
        self._own_seconds = time.perf_counter() - start
        self._recovered = {}
        self._pivot_depths = {}
        for point in chosen:
            self._pivot_depths.setdefault(point.origin.main_row, point.depth)
        if not self.args.deferred_branching:
            self._points = chosen
            number = self.args.num_branches
            branches = self.forks.sample_branches([point.fork(number) for point in chosen])
            if self.forks.is_agent:
                self.forks.judge(branches)
            for place, point in enumerate(chosen):
                point.branches = branches[place * number : (place + 1) * number]
        else:
            check_columns(self.forks.trajectories[0].example)
            # The branches of the previous batch's pivots were sampled together with this batch, so train them now.
            self._points, self._queue = self._queue, []
            for point in chosen:
                self._queue.append(replace(point, origin=replace(point.origin, row=None)))
        start = time.perf_counter()
        rows = self.rows(self._points)
        self._own_seconds += time.perf_counter() - start
        return Branches(rows)

    def rows(self, points: list[BranchPoint]) -> Rows:
        """Return the branches as training rows. Their prefixes are not trained (Eq. 4)."""
        branches = []
        for point in points:
            branches += point.branches
        return self.forks.rows(branches, group_size=self.args.num_branches, trains_prefixes=False)

    @property
    def samples_with_main(self) -> bool:
        return self.args.deferred_branching

    def rollout(self, prompt_ids: list[list[int]], plain: PlainSampling) -> Rollout:
        """Sample the main rows and the waiting branches in one call."""
        number, num_main = self.args.num_branches, len(prompt_ids)
        prefixes = []
        for point in self._queue:
            prefixes += [point.origin.prompt_ids + point.prefix_ids] * number
        sampled = plain(prompt_ids + prefixes)
        main_logprobs = None if sampled.logprobs is None else sampled.logprobs[:num_main]
        main = Rollout(sampled.completion_ids[:num_main], main_logprobs)
        most = self.args.max_completion_length or max(map(len, main.completion_ids))
        row = num_main
        for point in self._queue:
            # Without `max_completion_length`, `most` depends on the batch, so it can be less than `point.start`.
            budget = max(1, most - point.start)
            point.branches = []
            for _ in range(number):
                logprobs = None if sampled.logprobs is None else sampled.logprobs[row][:budget]
                continuation = Continuation(sampled.completion_ids[row][:budget], logprobs)
                point.branches.append(self.forks.begin_branch(point.fork(number), continuation))
                row += 1
        return main

    # --------------------------------------------------------------------------------------------------- choose pivots

    def choose(self, groups: Sequence[ScoredGroup]) -> list[BranchPoint]:
        """Return the pivots of a round of sampling. Every process must call it."""
        args, most = self.args, self.forks.longest_completion()
        self._distributions.clear()  # the estimator may have changed since
        deciding = self.scorer.success()
        failures = failed(deciding, threshold=args.success_threshold)
        self.policy.log_metric("pivots/failure_fraction", failures.float().mean().item())
        # A group may be on several processes, so look at the rows of all processes.
        all_rows = rows_to_branch_from(
            deciding,
            threshold=args.success_threshold,
            group_size=self.args.num_generations,
            branch_from=args.branch_from,
        )
        chosen = self.policy.ranks.local(all_rows).tolist()
        pivots: list[Pivot] = []
        num_chosen = 0
        for group in groups:
            for trajectory in group.trajectories:
                row = trajectory.main_row
                num_chosen += chosen[row]
                if chosen[row] and not self.forks.has_failed(row):
                    pivots += self.draw(row, trajectory, most)
        self._warn_without_cuts(num_chosen)
        if args.max_pivots_per_batch is not None:
            pivots = self._capped(pivots, args.max_pivots_per_batch - self._num_kept)
        points = []
        for pivot in pivots:
            points.append(BranchPoint(self.forks.trajectories[pivot.row], pivot.start, pivot.depth))
        return points

    def _warn_without_cuts(self, num_chosen: int) -> None:
        """Warn once, in the first batch with a failure, if no failed completion has more than one segment. Every
        process must call it."""
        if self._warned or self.args.pivot_selection == "root":
            return
        total = self.policy.ranks.summed({"chosen": num_chosen, "cut": self._num_cut})
        if not total["chosen"]:
            return
        self._warned = True
        if not total["cut"] and self.policy.accelerator.is_main_process:
            if self.args.segmentation == "fixed":
                where, fields = "shorter than a segment", "a smaller `segment_length`"
            else:
                where = f"without any of {self.args.segment_delimiters!r}"
                fields = "other `segment_delimiters`, or `segmentation='fixed'`"
            warnings.warn(
                f"All {int(total['chosen'])} failed completions of the first batch with failures are {where}, so that "
                f"they could not be cut: branches start from the prompt. Choose {fields}.",
                stacklevel=2,
            )

    def draw(self, row: int, trajectory: Trajectory, most: int) -> list[Pivot]:
        """
        Draw pivots in a completion.

        Args:
            row (`int`):
                Index of the completion's main row on this process.
            trajectory ([`Trajectory`]):
                The completion.
            most (`int`):
                Maximum number of tokens of a branch with its prefix.
        """
        starts = drop_empty_end(
            self._starts(trajectory, most),
            trajectory.completion_ids,
            self.policy.tokenizer,
            end_ids=self.policy.eos_token_ids,
        )
        depths = relative_depths(len(starts))
        self._num_cut += len(starts) > 1
        # A branch must have tokens left to reach an answer: by default a tenth of the limit.
        min_remaining = self.args.min_remaining_tokens or max(1, most // 10)
        last_start = max(0, most - min_remaining)
        # Pivots can be at the starts of the first `num_possible` segments.
        num_possible = sum(start <= last_start for start in starts)
        if self.args.pivot_selection == "root":
            # Use the same number of pivots as the method, so that this control samples a similar number of tokens.
            return [Pivot(row, 0, float(depths[0]))] * min(self.args.num_pivots, num_possible)
        if (len(starts), num_possible) not in self._distributions:
            self._distributions[len(starts), num_possible] = self._distribution(depths, num_possible)
        probs = self._distributions[len(starts), num_possible]
        drawn = draw_pivots(probs, self.args.num_pivots, generator=self.policy.exploration_generator)
        return [Pivot(row, starts[t], float(depths[t])) for t in drawn]

    def _distribution(self, depths: torch.Tensor, num_possible: int) -> torch.Tensor:
        """Return the probability of each segment's start (Eq. 1), `(S,)`."""
        possible = torch.arange(len(depths)) < num_possible
        if self.args.pivot_selection == "uniform":
            return pivot_distribution(torch.ones_like(depths), gamma=0.0, possible=possible)
        return pivot_distribution(self.estimator.predict(depths), gamma=self.args.depth_bias, possible=possible)

    def _starts(self, trajectory: Trajectory, most: int) -> list[int]:
        """Return the first token of each segment. An agent has one at each turn, and more inside its last turn."""
        ids = trajectory.completion_ids
        if not self.forks.is_agent:
            return self._segment(ids, most)
        first, end = trajectory.turns[-1]
        return turn_starts(trajectory.turns, self._segment(ids[first:end], most))

    def _segment(self, ids: list[int], most: int) -> list[int]:
        """Return the first token of each segment of some tokens."""
        if self.args.segmentation == "fixed":
            return segment_fixed(len(ids), length=self.args.segment_length or min(50, most))
        return segment_delimiters(
            ids, self.policy.tokenizer, delimiters=self.args.segment_delimiters, cache=self._delimiter_cache
        )

    def _capped(self, pivots: list[Pivot], limit: int) -> list[Pivot]:
        """Keep `limit` pivots of the round on all processes. The first pivots of all completions are kept before any
        second pivot, and so on. Random numbers decide between pivots of equal rank."""
        numbers: list[int] = []  # number of each pivot in its completion, from 0
        for i, pivot in enumerate(pivots):
            is_first = i == 0 or pivots[i - 1].row != pivot.row
            numbers.append(0 if is_first else numbers[-1] + 1)
        per_process = self.policy.ranks.objects([numbers])
        all_numbers: list[int] = []
        for process_numbers in per_process:
            all_numbers += process_numbers
        priority = torch.tensor(all_numbers, dtype=torch.float64)
        tie_break = torch.rand(len(priority), generator=self.shared_generator, dtype=torch.float64)  # in [0, 1)
        kept = set((priority + tie_break).argsort()[:limit].tolist())
        self._num_kept += len(kept)
        first = sum(map(len, per_process[: self.policy.ranks.index]))  # index of this process's first pivot
        return [pivot for i, pivot in enumerate(pivots, start=first) if i in kept]

    # --------------------------------------------------------------------------------------------- learn from branches

    def after_scoring(self, branches: Branches, scored: ScoredRows | None) -> None:
        start = time.perf_counter()
        points = self._points
        solved = self.learn(points, scored)
        for point, is_solved in zip(points, solved, strict=True):
            row = point.origin.row
            if row is not None and is_solved is not None:
                self._recovered[row] = is_solved or self._recovered.get(row, False)
        self._own_seconds += time.perf_counter() - start
        for name, value in self.metrics(points, solved, scored).items():
            self.policy.log_metric(f"pivots/{name}", value)
        self.policy.log_metric("pivots/own_seconds", self._own_seconds)
        if self.args.hard_states_file is not None:
            records = []
            for point, is_solved in zip(points, solved, strict=True):
                if is_solved is False:
                    records.append(point.record(self.policy.state.global_step, self.policy.tokenizer.decode))
            self.hard_states.append(self.policy.ranks.objects(records))

    def learn(self, points: list[BranchPoint], scored: ScoredRows | None) -> list[bool | None]:
        """
        Teach the estimator which pivots were recovered. All processes use the outcomes of all processes, in the same
        order.

        Returns:
            `list[bool | None]`: For each pivot, True if a branch succeeded. None if no branch has a reward.
        """
        self.num_batches += 1
        solved: list[bool | None] = []
        if scored is not None:
            rewards = scored.success_rewards.view(-1, self.args.num_branches)
            any_success = succeeded(rewards, threshold=self.args.success_threshold).any(dim=1).tolist()
            unknown = rewards.isnan().all(dim=1).tolist()
            for is_solved, is_unknown in zip(any_success, unknown, strict=True):
                solved.append(None if is_unknown else is_solved)
        known = []
        for point, is_solved in zip(points, solved, strict=True):
            if is_solved is not None:
                known.append((point.depth, int(is_solved)))
        outcomes = self.policy.ranks.objects(known)
        if outcomes:
            depths, labels = zip(*outcomes, strict=True)
            self.estimator.add(depths, labels)
        if self.num_batches % self.args.estimator_update_steps == 0:
            self.estimator.fit()
        return solved

    def metrics(
        self, points: list[BranchPoint], solved: list[bool | None], scored: ScoredRows | None
    ) -> dict[str, float]:
        """Return the metrics of a batch's pivots. Every process must call it."""
        num_informative = 0
        if scored is not None:
            advantages = scored.rows["advantages"][: len(scored.rewards)]
            num_informative = int(advantages.view(-1, self.args.num_branches).any(dim=1).sum())
        own = {
            "tried": len(points),
            "known": sum(is_solved is not None for is_solved in solved),
            "recovered": sum(is_solved is True for is_solved in solved),
            "informative": num_informative,
            "depth": sum(point.depth for point in points),
            "branches": sum(len(point.branches) for point in points),
            "tokens": sum(point.num_sampled for point in points),
            "main_tokens": sum(len(trajectory.completion_ids) for trajectory in self.forks.trajectories),
        }
        total = self.policy.ranks.summed(own)
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

    def columns(self, num_rows: int) -> dict[str, list[Any]]:
        depths, recovered = [], []
        for row in range(num_rows):
            depths.append(self._pivot_depths.get(row, math.nan))
            recovered.append(float(self._recovered.get(row, math.nan)))
        return {"pivot_depth": depths, "recovered": recovered}

    # ----------------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        queue = []
        for point in self._queue:
            queue.append([to_plain(point.origin.example), point.origin.prompt_ids, point.prefix_ids, point.depth])
        return {
            "estimator": self.estimator.state_dict(),
            "shared_generator": self.shared_generator.get_state(),
            "num_generation_batches": self.num_batches,
            "hard_states_bytes": self.hard_states.size,
            "queue": queue,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.estimator.load_state_dict(state["estimator"])
        self.shared_generator.set_state(state["shared_generator"])
        self.num_batches = state["num_generation_batches"]
        self._queue = []
        if self.args.deferred_branching:
            for example, prompt_ids, prefix_ids, depth in state["queue"]:
                # The completion needs at least one token after the prefix, because a fork is inside a turn.
                ids = [*prefix_ids, self.policy.eos_token_ids[0]]
                origin = Trajectory(None, from_plain(example), prompt_ids, ids, loss_mask=[1] * len(ids))
                self._queue.append(BranchPoint(origin, len(prefix_ids), depth))
        self.hard_states.cut_back(state["hard_states_bytes"])

    def forget_data(self) -> None:
        self._points, self._queue = [], []  # waiting branches continue prompts of the old data


def check_columns(example: dict[str, Any]) -> None:
    """Raise ValueError if an example has a column that a checkpoint cannot hold. With `deferred_branching`, examples
    wait in checkpoints for their branches."""
    for name, value in example.items():
        try:
            to_plain(value)
        except TypeError as error:
            raise ValueError(
                f"`deferred_branching=True` keeps examples in checkpoints, which cannot hold the {error} of the "
                f"column {name!r}: convert the column, for example to text, or set `deferred_branching=False`."
            ) from None
