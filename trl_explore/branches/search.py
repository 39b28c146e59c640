"""BranPO's search: where trajectories are left, which continuation is kept, and what its tokens are worth."""

import itertools
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from trl.trainer.utils import nanstd

from trl_explore.agents.forks import Forks
from trl_explore.agents.trajectories import Branch, suffix_mask, turns
from trl_explore.branches.choice import (
    branch_advantages,
    branch_count,
    credit,
    first_contrastive,
    first_shorter,
    fork_depths,
    group_accuracy,
    recursion_depth,
    seeks_shorter,
)
from trl_explore.rows.policy import Policy
from trl_explore.rows.rollouts import Rows
from trl_explore.rows.scorer import ScoredRows, Scorer

REDUNDANCY_DEPTH = 2  # from the penultimate response, section 4.4


@dataclass
class Plan:
    """Where a trajectory is left."""

    depths: list[int]  # responses to go back, round by round; empty where it is not branched
    tries: int  # continuations per round
    shorter: bool = False  # a shorter success is looked for, and not a contrast


class BranchSearch:
    """Looks for contrasting continuations of the trajectories of a batch."""

    def __init__(self, policy: Policy, scorer: Scorer, forks: Forks) -> None:
        self.policy, self.scorer, self.forks, self.args = policy, scorer, forks, policy.args
        self.num_sampled = self.num_incomplete = 0

    def plans(self, rewards: list[float], trained: list[bool]) -> list[Plan]:
        """Where every main row of this process is left (Eq. 15, 16 and section 4.4)."""
        args, size = self.args, self.args.num_generations
        lengths = [len(trajectory.turns) for trajectory in self.forks.trajectories]
        forks = partial(fork_depths, selection=args.branch_selection, generator=self.policy.exploration_generator)
        plans = []
        for g in range(0, len(rewards), size):
            group = rewards[g : g + size]
            accuracy = group_accuracy(group, definition=args.accuracy, threshold=args.success_threshold)
            longer = seeks_shorter(group, lengths[g : g + size], accuracy=accuracy, threshold=args.success_threshold)
            for row, reward in enumerate(group, g):
                if math.isnan(reward) or not trained[row] or self.forks.has_failed(row):
                    plans.append(Plan([], 0))
                elif longer[row - g] and args.redundancy_tries:
                    plans.append(
                        Plan(forks(lengths[row], 1, nearest=REDUNDANCY_DEPTH), args.redundancy_tries, shorter=True)
                    )
                else:
                    tries = branch_count(
                        accuracy, num_branches=args.num_branches, num_branches_solved=args.num_branches_solved
                    )
                    deepest = recursion_depth(
                        reward,
                        accuracy,
                        threshold=args.success_threshold,
                        depth=args.branch_depth,
                        depth_hard=args.branch_depth_hard,
                        depth_solved=args.branch_depth_solved,
                    )
                    plans.append(Plan(forks(lengths[row], deepest if tries else 0), tries))
        return plans

    def kept_branches(self, plans: list[Plan], rewards: list[float]) -> dict[int, Branch]:
        """The kept branch of every main row that has one: all rows of the batch go one response back at a time."""
        kept: dict[int, Branch] = {}
        self.num_sampled = self.num_incomplete = 0
        for number in range(self.policy.ranks.most(max(len(plan.depths) for plan in plans))):
            requests = [
                (row, len(self.forks.trajectories[row].turns) - plan.depths[number], plan.tries)
                for row, plan in enumerate(plans)
                if row not in kept and number < len(plan.depths)
            ]
            branches = self.forks.branch(requests)
            complete = [branch for branch in branches if branch.complete]
            self.forks.judge(complete, self.scorer)
            for row, own in itertools.groupby(complete, key=lambda branch: branch.row):
                found = list(own)
                place = self._first_wanted(found, plans[row], rewards[row])
                if place is not None:
                    kept[row] = found[place]
            self.num_sampled += sum(branch.num_sampled for branch in branches)
            self.num_incomplete += len(branches) - len(complete)
        return kept

    def _total(self, branch: Branch) -> float:
        return self.scorer.totals(torch.tensor([branch.rewards])).item()

    def _first_wanted(self, found: list[Branch], plan: Plan, reward: float) -> int | None:
        threshold = self.args.success_threshold
        deciding = self.scorer.success(torch.tensor([branch.rewards for branch in found])).tolist()
        if not plan.shorter:
            return first_contrastive(deciding, reward, threshold=threshold)
        original = len(self.forks.trajectories[found[0].row].turns)
        return first_shorter(deciding, [len(turns(b.loss_mask)) for b in found], original, threshold=threshold)

    def advantages(
        self, rewards: list[float], kept: dict[int, Branch]
    ) -> tuple[dict[int, tuple[float, float]], dict[int, float]]:
        """Advantages of prefix and suffix of the rows of prompts with branches, and of the branches (Eq. 10-12)."""
        size = self.args.num_generations
        rows, branches = {}, {}
        for g in sorted({row - row % size for row in kept}):
            found = [[rewards[row]] + ([self._total(kept[row])] if row in kept else []) for row in range(g, g + size)]
            scale = "group" if self.args.scale_rewards == "group" else "none"
            base, suffixes = branch_advantages(found, group=self.args.branch_group, scale=scale)
            if self.args.scale_rewards == "batch":
                std = nanstd(self.scorer.totals()).item() + 1e-4
                base, suffixes = [b / std for b in base], [[s / std for s in own] for own in suffixes]
            for row in range(g, g + size):
                rows[row] = base[row - g], suffixes[row - g][0]
                if row in kept:
                    branches[row] = suffixes[row - g][1]
        return rows, branches

    def score(self, kept: dict[int, Branch], advantages: dict[int, float]) -> ScoredRows | None:
        """The kept branches as rows of training; their prefixes only condition."""
        rows = sorted(kept)
        scored = self.scorer.score(
            "branch",
            Rows(
                examples=[self.forks.example(row) for row in rows],
                prompt_ids=[self.forks.trajectories[row].prompt_ids for row in rows],
                completion_ids=[kept[row].completion_ids for row in rows],
                loss_mask=[suffix_mask(kept[row].loss_mask, kept[row].start) for row in rows],
                group_size=1,
                known_rewards=[kept[row].rewards for row in rows],
                extra=[kept[row].extra for row in rows],
                completions=[kept[row].messages for row in rows],
                parents=[*rows],
                logprobs=[kept[row].logprobs or [] for row in rows] if self.policy.serving is not None else None,
            ),
        )
        if scored is not None:
            for place, row in enumerate(rows):
                scored.rows["advantages"][place] = advantages[row]
        return scored

    def credit_of(self, row: int, branch: Branch | None, plan: Plan, base: float, suffix: float) -> list[float]:
        """Credit of the tokens of a main row of a prompt with branches, `[T]`."""
        trajectory = self.forks.trajectories[row]
        fork = trajectory.turns[-1][0] if branch is None else branch.start  # before the last response
        redundant = branch is not None and plan.shorter
        return credit(base, suffix, fork, num_tokens=len(trajectory.completion_ids), redundant=redundant)

    def columns(self, plans: list[Plan], kept: dict[int, Branch]) -> dict[str, list[Any]]:
        """What became of every main row of this process, for the completions table."""
        outcomes = ["none" if plan.depths else "not branched" for plan in plans]
        depths = [math.nan] * len(plans)
        for row, branch in kept.items():
            outcomes[row] = "redundant" if plans[row].shorter else "contrastive"
            depths[row] = len(self.forks.trajectories[row].turns) - branch.turn
        lengths = [len(trajectory.turns) for trajectory in self.forks.trajectories]
        return {"turns": lengths, "branch": outcomes, "branch_depth": depths}

    def metrics(self, plans: list[Plan], kept: dict[int, Branch]) -> dict[str, float]:
        """What is logged of a batch's branches; every process calls it."""
        trajectories = self.forks.trajectories
        total = self.policy.ranks.summed(
            {
                "rows": len(trajectories),
                "branched": sum(bool(plan.depths) for plan in plans),
                "contrastive": sum(not plans[row].shorter for row in kept),
                "redundant": sum(plans[row].shorter for row in kept),
                "depth": sum(len(trajectories[row].turns) - branch.turn for row, branch in kept.items()),
                "turns": sum(len(trajectory.turns) for trajectory in trajectories),
                "tokens": self.num_sampled,
                "main_tokens": sum(sum(trajectory.loss_mask) for trajectory in trajectories),
                "incomplete": self.num_incomplete,
            }
        )
        names = ("branched", "contrastive", "redundant")
        metrics = {f"branch/{name}_fraction": total[name] / total["rows"] for name in names}
        if kept_rows := total["contrastive"] + total["redundant"]:
            metrics["branch/depth"] = total["depth"] / kept_rows
        metrics["branch/sampled_tokens"] = total["tokens"]
        metrics["branch/token_ratio"] = total["tokens"] / (total["tokens"] + total["main_tokens"])
        metrics["branch/incomplete"] = total["incomplete"]
        metrics["agent/turns"] = total["turns"] / total["rows"]
        return metrics
