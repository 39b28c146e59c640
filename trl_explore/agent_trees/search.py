"""Grows the trajectories of a generation batch into trees of turns, and credits their leaves."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from trl.trainer.utils import nanstd

from trl_explore.agent_trees.credit import leaf_advantages
from trl_explore.agent_trees.nodes import Span, draw_leaves, draw_nodes
from trl_explore.agents.environments import environment_error
from trl_explore.agents.forks import Forks
from trl_explore.agents.trajectories import Branch, Fork, Trajectory
from trl_explore.rows.policy import Policy
from trl_explore.rows.rollouts import Rows
from trl_explore.rows.scorer import ScoredRows, Scorer
from trl_explore.rows.streams import RowDict


@dataclass
class AgentTree:
    """A main row, and what left it; leaves are in the order in which they were sampled."""

    leaves: list[Trajectory]  # the main row first
    spans: list[Span]  # turns at which each can be left
    branches: list[Branch] = field(default_factory=list)  # the leaves but the first

    def add(self, branch: Branch) -> None:
        """One leaf more."""
        leaf = branch.as_trajectory()
        self.branches.append(branch)
        self.leaves.append(leaf)
        self.spans.append(Span(branch.turn + 1, len(leaf.turns)))


class AgentTrees:
    """One tree per explored main row; every process calls each method equally often."""

    def __init__(self, policy: Policy, scorer: Scorer, forks: Forks) -> None:
        self.policy, self.scorer, self.forks, self.args = policy, scorer, forks, policy.args
        self.trees: dict[int, AgentTree] = {}  # by main row
        self.credit: dict[int, list[float]] = {}  # of leaves, the main row's first, where a prompt has branches
        self.num_sampled = self.num_dropped = 0

    def grow(self, explored: list[bool]) -> None:
        """Expand the explored main rows `[B]`, round by round, and keep the leaves that are trained."""
        args, generator = self.args, self.policy.exploration_generator
        self.trees = {
            row: AgentTree([trajectory], [Span(0, len(trajectory.turns))])
            for row, trajectory in enumerate(self.forks.trajectories)
            if explored[row] and not self.forks.has_failed(row)
        }
        self.num_sampled = self.num_dropped = 0
        for _ in range(args.num_rounds):
            forks = [
                Fork(tree.leaves[leaf], turn, number)
                for tree in self.trees.values()
                for (leaf, turn), number in draw_nodes(tree.spans, args.num_expansions, generator=generator).items()
            ]
            branches = self.forks.leave(forks)
            # An exception of the environment is no outcome of what the policy did.
            sound = [branch for branch in branches if environment_error(branch.environment) is None]
            self.forks.judge(sound, self.scorer)  # environments are used again in the next round
            for branch in sound:
                self.trees[branch.row].add(branch)
            self.num_sampled += sum(branch.num_sampled for branch in branches)
            self.num_dropped += len(branches) - len(sound)
        for tree in self.trees.values():
            kept = draw_leaves(len(tree.branches), args.leaves_per_tree, generator=generator)
            tree.branches = [tree.branches[place] for place in kept]
            tree.leaves = [tree.leaves[0], *(tree.leaves[place + 1] for place in kept)]

    def compare(self) -> None:
        """Credit the leaves of every prompt that has branches."""
        size, args = self.args.num_generations, self.args
        rewards = self.policy.ranks.local(self.scorer.totals()).tolist()
        batch_std = nanstd(self.scorer.totals()).item() + 1e-4
        scale = "group" if args.scale_rewards == "group" else "none"
        self.credit = {}
        for g in range(0, len(rewards), size):
            branches = [self.trees[row].branches if row in self.trees else [] for row in range(g, g + size)]
            if not any(branches):
                continue
            found = [[rewards[g + i], *map(self._total, own)] for i, own in enumerate(branches)]
            for row, own in enumerate(leaf_advantages(found, intra_weight=args.intra_weight, scale=scale), g):
                self.credit[row] = [value / batch_std for value in own] if args.scale_rewards == "batch" else own

    def _total(self, branch: Branch) -> float:
        return self.scorer.totals(torch.tensor([branch.rewards])).item()

    def advantages(self, output: RowDict) -> torch.Tensor:
        """Advantages `(B,)` of the main rows: GRPO's where nothing has grown in the prompt."""
        advantages = output["advantages"].clone()
        for row, own in self.credit.items():
            advantages[row] = own[0]
        return advantages

    def rows(self) -> ScoredRows | None:
        """Branches as rows of training, each with its whole trajectory: a node is trained once per leaf behind it."""
        branches = [branch for _, tree in sorted(self.trees.items()) for branch in tree.branches]
        scored = self.scorer.score(
            "branch",
            Rows(
                examples=[self.forks.example(branch.row) for branch in branches],
                prompt_ids=[branch.origin.prompt_ids for branch in branches],
                completion_ids=[branch.completion_ids for branch in branches],
                loss_mask=[branch.loss_mask for branch in branches],
                group_size=1,
                known_rewards=[branch.rewards for branch in branches],
                extra=[branch.extra for branch in branches],
                completions=[branch.messages for branch in branches],
                parents=[branch.row for branch in branches],
                shared=[branch.start for branch in branches],
                logprobs=[branch.logprobs or [] for branch in branches] if self.policy.serving is not None else None,
            ),
        )
        if scored is not None:
            values = [value for row in sorted(self.trees) for value in self.credit.get(row, [])[1:]]
            own = torch.tensor(values, device=scored.rows["advantages"].device)
            scored.rows["advantages"][: len(values)] = own
        return scored

    def columns(self) -> dict[str, list[Any]]:
        """What the completions table says of the main rows of this process."""
        lengths = [len(trajectory.turns) for trajectory in self.forks.trajectories]
        trees = [self.trees.get(row) for row in range(len(lengths))]
        return {"turns": lengths, "leaves": [len(tree.leaves) if tree else 1 for tree in trees]}

    def metrics(self) -> dict[str, float]:
        """What is logged of a batch's trees."""
        trajectories = self.forks.trajectories
        rewards = self.policy.ranks.local(self.scorer.totals()).tolist()
        worths = [{rewards[row], *map(self._total, tree.branches)} for row, tree in self.trees.items()]
        branches = [branch for tree in self.trees.values() for branch in tree.branches]
        total = self.policy.ranks.summed(
            {
                "rows": len(trajectories),
                "turns": sum(len(trajectory.turns) for trajectory in trajectories),
                "trees": len(self.trees),
                "contrast": sum(len({worth for worth in own if not math.isnan(worth)}) > 1 for own in worths),
                "leaves": len(branches),
                "depth": sum(branch.turn / len(branch.origin.turns) for branch in branches),
                "tokens": self.num_sampled,
                "main_tokens": sum(sum(trajectory.loss_mask) for trajectory in trajectories),
                "dropped": self.num_dropped,
            }
        )
        return {
            "branch/trees": total["trees"],
            "branch/contrast_fraction": total["contrast"] / max(total["trees"], 1),
            "branch/mean_depth": total["depth"] / max(total["leaves"], 1),
            "branch/sampled_tokens": total["tokens"],
            "branch/token_ratio": total["tokens"] / (total["tokens"] + total["main_tokens"]),
            "branch/dropped": total["dropped"],
            "agent/turns": total["turns"] / total["rows"],
        }
