"""BranPO: trajectories of agents are left near their tail, and contrasting continuations take the credit there."""

import itertools
import math
import sys
import time
import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from trl.trainer.utils import nanstd

from trl_explore.agents.forks import Forks
from trl_explore.agents.states import KeptStates
from trl_explore.agents.trajectories import Branch, Trajectory
from trl_explore.agents.turns import Turns
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
    suffix_mask,
    turns,
)
from trl_explore.rows.rollouts import Rows
from trl_explore.rows.scorer import ScoredRows
from trl_explore.rows.streams import RowDict

from .base import ExplorationTrainer
from .branpo_config import BranPOConfig
from .requires import Requires

REDUNDANCY_DEPTH = 2  # from the penultimate response, section 4.4


@dataclass
class Plan:
    """
    Where a trajectory is left.

    Args:
        depths (`list[int]`):
            Responses to go back, round by round; empty for a trajectory that is not branched.
        tries (`int`):
            Continuations per round.
        shorter (`bool`):
            Whether a shorter success is looked for, and not a contrast.
    """

    depths: list[int]
    tries: int
    shorter: bool = False


class BranPOTrainer(ExplorationTrainer):
    """
    GRPO for multi-turn agents with contrastive branches near the tail of their trajectories.

    Method of [Training Multi-Turn Search Agent via Contrastive Dynamic Branch
    Sampling](https://huggingface.co/papers/2602.03719). What changes with respect to GRPO, per generation batch:

    1. After the rollouts of a prompt are scored, each is left before its last response and continued anew, then before
       the one before it, as deep and as often as its reward and its group's accuracy ask for. The first continuation
       whose success differs is kept as one more row.
    2. The shared prefix is credited with the mean reward of both, against the prompt's other prefixes; the two
       suffixes are credited against all suffixes of the prompt. The branch's row trains its suffix only.
    3. Successes that took more turns than their group's others look for a shorter way instead; where there is one,
       what they did beyond the fork is not reinforced.

    A batch in which no branch is kept gives GRPO's parameters bit for bit. Rows of branches are averaged together with
    the initial ones, as if they were one batch. Deviations from the paper and open points are in `trainers/README.md`.

    The constructor takes what [`~trl.GRPOTrainer`] takes; `args` is a [`BranPOConfig`] or a plain
    [`~trl.GRPOConfig`]. `tools` and `environment_factory` are TRL's; without them, completions of a single turn are
    sampled anew from the prompt. Vision-language models and `rollout_func` are refused.

    Raises:
        RuntimeError: While training, if every tool call of a generation batch raised (a dead service); the last
            checkpoint is written before.
    """

    method = "branpo"

    config_class = BranPOConfig
    requires = Requires(
        samples=True, extra_rows=True, pooled=True, whole_groups=True, tools=True, turns=True, watched_tools=True
    )
    num_generations: int
    turns: Turns
    forks: Forks
    _branch_rows: ScoredRows | None = None
    _columns: dict[str, list[Any]] = {}
    _sampled = _incomplete = 0

    def check(self, args: Any, *, tools: Any, environment_factory: Any) -> None:
        if not tools and environment_factory is None:
            for name in ("interaction_limits", "eval_interaction_limit", "max_tool_calling_iterations"):
                if vars(args)[name] is not None:
                    raise ValueError(
                        f"`{name}={vars(args)[name]}` is for trajectories of several turns, but there are neither "
                        "`tools` nor an `environment_factory`: pass one of them, or leave the field out."
                    )
        super().check(args, tools=tools, environment_factory=environment_factory)

    def setup(self) -> None:
        args = self.args
        depths = args.branch_depth_hard, args.branch_depth, args.branch_depth_solved, REDUNDANCY_DEPTH
        num_turns = sys.maxsize if args.branch_selection == "random" else max(depths)
        states = KeptStates(self, self.turns.world, wanted=args.environment_state, num_turns=num_turns)
        self.forks = Forks(self, self.turns, self.sample, states, self.watch, self.interaction_limit)
        super().setup()
        if not self.tools:
            warnings.warn(
                "BranPO branches near the tail of trajectories of several turns, but there are neither `tools` nor an "
                "`environment_factory` with tools: every completion is one turn, and a branch is one more completion "
                "of the same prompt. Pass one of them; `DeepGRPOTrainer` branches within completions of one turn.",
                stacklevel=2,
            )

    # ------------------------------------------------------------------------------------------------ the algorithm

    def search(self, output: RowDict) -> None:
        start = time.perf_counter()
        deciding = self.ranks.local(self.scorer.success()).tolist()
        plans = self._plans(deciding, output)
        kept = self._kept_branches(plans, deciding)
        self.log_metric("branch/seconds", time.perf_counter() - start)
        self._log_branches(plans, kept)
        if self.log_completions:
            self._columns = self._describe(plans, kept)
        rows, branches = self._branch_advantages(self.ranks.local(self.scorer.totals()).tolist(), kept)
        self._branch_rows = self._score_branches(kept, branches)
        self._credit = {row: self._own_credit(row, kept.get(row), plans[row], *rows[row]) for row in rows}

    def assign_advantages(self, output: RowDict) -> torch.Tensor:
        if self._branch_rows is None:
            return output["advantages"]
        advantages = output["advantages"].unsqueeze(1).repeat(1, output["completion_ids"].shape[1])
        for row, own in self._credit.items():
            advantages[row, : len(own)] = torch.tensor(own, device=advantages.device)
        return advantages

    def extra_streams(self, output, examples, rewards):
        return {} if self._branch_rows is None else {"branch": (self._branch_rows, 1.0)}

    @property
    def trajectories(self) -> list[Trajectory]:
        """The main rows as they were rolled out."""
        return self.forks.trajectories

    def _own_credit(self, row: int, branch: Branch | None, plan: Plan, base: float, suffix: float) -> list[float]:
        """Credit of the tokens of a main row of a prompt with branches, `[T]`."""
        trajectory = self.trajectories[row]
        fork = trajectory.turns[-1][0] if branch is None else branch.start  # before the last response
        redundant = branch is not None and plan.shorter
        return credit(base, suffix, fork, num_tokens=len(trajectory.completion_ids), redundant=redundant)

    def _plans(self, rewards: list[float], output: RowDict) -> list[Plan]:
        """Where every main row of this process is left (Eq. 15, 16 and section 4.4)."""
        args, size = self.args, self.num_generations
        lengths = [len(trajectory.turns) for trajectory in self.trajectories]
        forks = partial(fork_depths, selection=args.branch_selection, generator=self.exploration_generator)
        trained = output["completion_mask"].any(dim=1).tolist()
        plans = []
        for g in range(0, len(rewards), size):
            group = rewards[g : g + size]
            accuracy = group_accuracy(group, definition=args.accuracy, threshold=args.success_threshold)
            longer = seeks_shorter(group, lengths[g : g + size], accuracy=accuracy, threshold=args.success_threshold)
            for row, reward in enumerate(group, g):
                if math.isnan(reward) or not trained[row] or (self.turns.failed and self.turns.failed[row]):
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

    def _kept_branches(self, plans: list[Plan], rewards: list[float]) -> dict[int, Branch]:
        """The kept branch of every main row that has one: all rows of the batch go one response back at a time."""
        kept: dict[int, Branch] = {}
        self._sampled = self._incomplete = 0
        for number in range(self.ranks.most(max(len(plan.depths) for plan in plans))):
            requests = [
                (row, len(self.trajectories[row].turns) - plan.depths[number], plan.tries)
                for row, plan in enumerate(plans)
                if row not in kept and number < len(plan.depths)
            ]
            branches = self.forks.leave(requests)
            complete = [branch for branch in branches if branch.complete]
            self.forks.judge(complete, self.scorer)
            for row, own in itertools.groupby(complete, key=lambda branch: branch.row):
                found = list(own)
                place = self._first_wanted(found, plans[row], rewards[row])
                if place is not None:
                    kept[row] = found[place]
            self._sampled += sum(branch.num_sampled for branch in branches)
            self._incomplete += len(branches) - len(complete)
        return kept

    def _total(self, branch: Branch) -> float:
        return self.scorer.totals(torch.tensor([branch.rewards])).item()

    def _first_wanted(self, found: list[Branch], plan: Plan, reward: float) -> int | None:
        threshold = self.args.success_threshold
        deciding = self.scorer.success(torch.tensor([branch.rewards for branch in found])).tolist()
        if not plan.shorter:
            return first_contrastive(deciding, reward, threshold=threshold)
        original = len(self.trajectories[found[0].row].turns)
        return first_shorter(deciding, [len(turns(b.loss_mask)) for b in found], original, threshold=threshold)

    def _branch_advantages(
        self, rewards: list[float], kept: dict[int, Branch]
    ) -> tuple[dict[int, tuple[float, float]], dict[int, float]]:
        """Advantages of prefix and suffix of the rows of prompts with branches, and of the branches (Eq. 10-12)."""
        size = self.num_generations
        rows, branches = {}, {}
        for g in sorted({row - row % size for row in kept}):
            found = [[rewards[row]] + ([self._total(kept[row])] if row in kept else []) for row in range(g, g + size)]
            scale = "group" if self.scale_rewards == "group" else "none"
            base, suffixes = branch_advantages(found, group=self.args.branch_group, scale=scale)
            if self.scale_rewards == "batch":
                std = nanstd(self.scorer.totals()).item() + 1e-4
                base, suffixes = [b / std for b in base], [[s / std for s in own] for own in suffixes]
            for row in range(g, g + size):
                rows[row] = base[row - g], suffixes[row - g][0]
                if row in kept:
                    branches[row] = suffixes[row - g][1]
        return rows, branches

    def _score_branches(self, kept: dict[int, Branch], advantages: dict[int, float]) -> ScoredRows | None:
        """The kept branches as rows of training; their prefixes only condition."""
        rows = sorted(kept)
        scored = self.scorer.score(
            "branch",
            Rows(
                examples=[self.forks.example(row) for row in rows],
                prompt_ids=[self.trajectories[row].prompt_ids for row in rows],
                completion_ids=[kept[row].completion_ids for row in rows],
                loss_mask=[suffix_mask(kept[row].loss_mask, kept[row].start) for row in rows],
                group_size=1,
                known_rewards=[kept[row].rewards for row in rows],
                completions=[kept[row].messages for row in rows],
                parents=[*rows],
                logprobs=[kept[row].logprobs or [] for row in rows] if self.use_vllm else None,
            ),
        )
        if scored is not None:
            for place, row in enumerate(rows):
                scored.rows["advantages"][place] = advantages[row]
        return scored

    # -------------------------------------------------------------------------------------------- limits and metrics

    def interaction_limit(self) -> int | None:
        """Rounds of tool calls that the trajectories of the next batch may have; `None` for any number."""
        limit = self.args.interaction_limit(self.state.global_step)
        return limit if self.is_training else self.args.eval_interaction_limit or limit

    def _describe(self, plans: list[Plan], kept: dict[int, Branch]) -> dict[str, list[Any]]:
        """What became of every main row of this process, for the completions table."""
        outcomes = ["none" if plan.depths else "not branched" for plan in plans]
        depths = [math.nan] * len(plans)
        for row, branch in kept.items():
            outcomes[row] = "redundant" if plans[row].shorter else "contrastive"
            depths[row] = len(self.trajectories[row].turns) - branch.turn
        lengths = [len(trajectory.turns) for trajectory in self.trajectories]
        return {"turns": lengths, "branch": outcomes, "branch_depth": depths}

    def completion_columns(self) -> dict[str, list[Any]]:
        return self._columns

    def _log_branches(self, plans: list[Plan], kept: dict[int, Branch]) -> None:
        trajectories = self.trajectories
        total = self.ranks.summed(
            {
                "rows": len(trajectories),
                "branched": sum(bool(plan.depths) for plan in plans),
                "contrastive": sum(not plans[row].shorter for row in kept),
                "redundant": sum(plans[row].shorter for row in kept),
                "depth": sum(len(trajectories[row].turns) - branch.turn for row, branch in kept.items()),
                "turns": sum(len(trajectory.turns) for trajectory in trajectories),
                "tokens": self._sampled,
                "main_tokens": sum(sum(trajectory.loss_mask) for trajectory in trajectories),
                "incomplete": self._incomplete,
            }
        )
        for name in ("branched", "contrastive", "redundant"):
            self.log_metric(f"branch/{name}_fraction", total[name] / total["rows"])
        if kept_rows := total["contrastive"] + total["redundant"]:
            self.log_metric("branch/depth", total["depth"] / kept_rows)
        self.log_metric("branch/sampled_tokens", total["tokens"])
        self.log_metric("branch/token_ratio", total["tokens"] / (total["tokens"] + total["main_tokens"]))
        self.log_metric("branch/incomplete", total["incomplete"])
        self.log_metric("agent/turns", total["turns"] / total["rows"])
