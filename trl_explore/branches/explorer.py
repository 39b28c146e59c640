"""BranPO's explorer: it samples other endings of trajectories, and compares both endings."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from trl_explore.agents.environments import environment_error
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
from trl_explore.explorers.branch_explorer import Branches, BranchExplorer, ScoredGroup
from trl_explore.forks.engine import Forks
from trl_explore.forks.trajectories import Branch, Fork, Trajectory, turns
from trl_explore.rows.policy import Policy
from trl_explore.rows.scorer import Scorer

if TYPE_CHECKING:
    from trl_explore.trainers.branpo_config import BranPOConfig
    from trl_explore.trainers.config import ExplorationConfig


REDUNDANCY_DEPTH = 2  # fork before the second-to-last response, section 4.4


@dataclass
class Plan:
    """Plan of the forks in a trajectory."""

    depths: list[int]  # number of responses to sample again, one number per round; empty: the trajectory is not forked
    tries: int  # number of endings per round
    shorter: bool = False  # True: look for a shorter success. False: look for an ending with the other outcome


class TailBranchExplorer(BranchExplorer):
    """
    Samples other endings of trajectories in rounds, and keeps at most one ending of each trajectory.

    Each round forks a trajectory at the next depth of its plan. By default, this is one response further back than in
    the round before. The first ending with the other outcome is kept. If the plan looks for a shorter success, the
    first shorter success is kept. A trajectory with a kept ending is not forked again.
    """

    name = "tail_branches"
    credits_main_rows = True
    args: "BranPOConfig"

    def __init__(
        self, policy: Policy, forks: Forks, scorer: Scorer, *, args: "ExplorationConfig | None" = None
    ) -> None:
        super().__init__(policy, forks, scorer, args=args)
        self.num_sampled = self.num_incomplete = 0  # tokens of endings; endings that were cut off or failed
        self._plans: dict[int, Plan] = {}  # plans of this batch, by main row
        self._kept: dict[int, Branch] = {}  # kept ending of each main row that has one

    @property
    def weight(self) -> None:
        return None

    def explore(self, groups: Sequence[ScoredGroup]) -> Branches:
        start = time.perf_counter()
        self._plans = self.plans(groups)
        self._kept = self.kept_branches(groups, self._plans)
        self.policy.log_metric("branch/seconds", time.perf_counter() - start)
        for name, value in self.metrics(self._plans, self._kept).items():
            self.policy.log_metric(name, value)
        rewards: dict[int, float] = {}
        for group in groups:
            for trajectory, reward in zip(group.trajectories, group.rewards, strict=True):
                rewards[trajectory.main_row] = reward
        row_advantages, ending_advantages = self.advantages(rewards, self._kept)
        main_advantages: dict[int, float | list[float]] = {}
        for row, (prefix, ending) in row_advantages.items():
            main_advantages[row] = self.credit_of(row, prefix, ending)
        kept_rows = sorted(self._kept)
        rows = self.forks.rows([self._kept[row] for row in kept_rows], group_size=1, trains_prefixes=False)
        return Branches(rows, [ending_advantages[row] for row in kept_rows], main_advantages)

    # ------------------------------------------------------------------------------------------------- sample endings

    def plans(self, groups: Sequence[ScoredGroup]) -> dict[int, Plan]:
        """Return the plan of each main row (Eq. 15, 16 and section 4.4)."""
        args, threshold = self.args, self.args.success_threshold
        depths_of = partial(fork_depths, selection=args.branch_selection, generator=self.policy.exploration_generator)
        plans: dict[int, Plan] = {}
        for group in groups:
            rewards = list(group.deciding)
            lengths = [len(trajectory.turns) for trajectory in group.trajectories]
            accuracy = group_accuracy(rewards, definition=args.accuracy, threshold=threshold)
            redundant = seeks_shorter(rewards, lengths, accuracy=accuracy, threshold=threshold)
            for place, (length, reward) in enumerate(zip(lengths, rewards, strict=True)):
                row = group.first_row + place
                if math.isnan(reward) or not group.is_trained[place] or self.forks.has_failed(row):
                    plans[row] = Plan([], 0)
                    continue
                if redundant[place] and args.redundancy_tries:
                    depths = depths_of(length, 1, nearest=REDUNDANCY_DEPTH)
                    plans[row] = Plan(depths, args.redundancy_tries, shorter=True)
                    continue
                tries = branch_count(
                    accuracy, num_branches=args.num_branches, num_branches_solved=args.num_branches_solved
                )
                deepest = recursion_depth(
                    reward,
                    accuracy,
                    threshold=threshold,
                    depth=args.branch_depth,
                    depth_hard=args.branch_depth_hard,
                    depth_solved=args.branch_depth_solved,
                )
                if not tries:
                    deepest = 0
                plans[row] = Plan(depths_of(length, deepest), tries)
        return plans

    def kept_branches(self, groups: Sequence[ScoredGroup], plans: dict[int, Plan]) -> dict[int, Branch]:
        """Sample endings in rounds: each round forks the main rows at the next depth of their plan. Return the kept
        ending of every main row that has one."""
        trajectories: dict[int, Trajectory] = {}
        deciding: dict[int, float] = {}
        for group in groups:
            for trajectory, reward in zip(group.trajectories, group.deciding, strict=True):
                trajectories[trajectory.main_row] = trajectory
                deciding[trajectory.main_row] = reward
        kept: dict[int, Branch] = {}
        self.num_sampled = self.num_incomplete = 0
        num_rounds = max((len(plan.depths) for plan in plans.values()), default=0)
        for round_number in range(self.policy.ranks.most(num_rounds)):
            forks = []
            for row, plan in plans.items():
                if row not in kept and round_number < len(plan.depths):
                    turn = len(trajectories[row].turns) - plan.depths[round_number]
                    forks.append(Fork(trajectories[row], turn, plan.tries))
            branches = self.forks.sample_branches(forks)
            complete = [branch for branch in branches if branch.complete]
            self.forks.judge(complete)
            # `get_reward` may have raised: drop these endings, too.
            usable = [branch for branch in complete if environment_error(branch.environment) is None]
            endings: dict[int, list[Branch]] = {}  # by main row
            for branch in usable:
                endings.setdefault(branch.row, []).append(branch)
            for row, found in endings.items():
                place = self._first_wanted(found, plans[row], deciding[row])
                if place is not None:
                    kept[row] = found[place]
            self.num_sampled += sum(branch.num_sampled for branch in branches)
            self.num_incomplete += len(branches) - len(usable)
        return kept

    def _first_wanted(self, found: list[Branch], plan: Plan, reward: float) -> int | None:
        """Return the index of the first ending that the row's plan looks for, or None."""
        threshold = self.args.success_threshold
        deciding = self.scorer.success(torch.tensor([branch.rewards for branch in found])).tolist()
        if not plan.shorter:
            return first_contrastive(deciding, reward, threshold=threshold)
        lengths = [len(turns(branch.loss_mask)) for branch in found]
        return first_shorter(deciding, lengths, len(found[0].origin.turns), threshold=threshold)

    # --------------------------------------------------------------------------------------------------------- credit

    def advantages(
        self, rewards: dict[int, float], kept: dict[int, Branch]
    ) -> tuple[dict[int, tuple[float, float]], dict[int, float]]:
        """
        Return the advantages in prompts with a kept ending (Eq. 10-12). Every process must call this method.

        Args:
            rewards (`dict[int, float]`):
                Total reward of each explored main row.
            kept (`dict[int, Branch]`):
                Kept ending of each main row that has one.

        Returns:
            `tuple[dict, dict]`: The advantages of prefix and ending of each main row; and the advantage of each kept
            ending, by main row.
        """
        size = self.args.num_generations
        std = 1.0
        if self.args.scale_rewards == "batch":
            std = self.batch_deviation(kept.values())
        row_advantages: dict[int, tuple[float, float]] = {}
        ending_advantages: dict[int, float] = {}
        first_rows = {row - row % size for row in kept}  # first main rows of the prompts with a kept ending
        for first in sorted(first_rows):
            ending_rewards = []
            for row in range(first, first + size):
                ending_rewards.append([rewards[row]])
                if row in kept:
                    ending_rewards[-1].append(self.total_reward(kept[row]))
            scale = "group" if self.args.scale_rewards == "group" else "none"
            prefixes, endings = branch_advantages(ending_rewards, group=self.args.branch_group, scale=scale)
            for place, row in enumerate(range(first, first + size)):
                row_advantages[row] = prefixes[place] / std, endings[place][0] / std
                if row in kept:
                    ending_advantages[row] = endings[place][1] / std
        return row_advantages, ending_advantages

    def credit_of(self, row: int, prefix: float, ending: float) -> list[float]:
        """Return the advantages of the tokens of a main row, `[T]`."""
        trajectory, branch = self.forks.trajectories[row], self._kept.get(row)
        # Without a kept ending, the last response is the ending.
        start = trajectory.turns[-1][0] if branch is None else branch.start
        redundant = branch is not None and self._plans[row].shorter
        return credit(prefix, ending, start, num_tokens=len(trajectory.completion_ids), redundant=redundant)

    # --------------------------------------------------------------------------------------------- table and metrics

    def columns(self, num_rows: int) -> dict[str, list[Any]]:
        lengths = [len(trajectory.turns) for trajectory in self.forks.trajectories]
        outcomes = ["not branched"] * num_rows
        depths = [math.nan] * num_rows
        for row, plan in self._plans.items():
            if plan.depths:
                outcomes[row] = "none"
        for row, branch in self._kept.items():
            outcomes[row] = "redundant" if self._plans[row].shorter else "contrastive"
            depths[row] = lengths[row] - branch.turn
        return {"turns": lengths, "branch": outcomes, "branch_depth": depths}

    def metrics(self, plans: dict[int, Plan], kept: dict[int, Branch]) -> dict[str, float]:
        """Return the metrics of a batch's endings. Every process must call it."""
        trajectories = self.forks.trajectories
        total = self.policy.ranks.summed(
            {
                "rows": len(trajectories),
                "branched": sum(bool(plan.depths) for plan in plans.values()),
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
