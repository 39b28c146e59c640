"""Tree-GRPO's explorer: it expands the trajectories of a generation batch into trees of turns."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trl_explore.agent_trees.credit import leaf_advantages
from trl_explore.agent_trees.nodes import Span, draw_leaves, draw_nodes
from trl_explore.agents.environments import environment_error
from trl_explore.explorers.branch_explorer import Branches, BranchExplorer, ScoredGroup
from trl_explore.forks.engine import Forks
from trl_explore.forks.trajectories import Branch, Fork, Trajectory
from trl_explore.rows.policy import Policy
from trl_explore.rows.scorer import Scorer

if TYPE_CHECKING:
    from trl_explore.trainers.agent_tree_grpo_config import AgentTreeGRPOConfig
    from trl_explore.trainers.config import ExplorationConfig


@dataclass
class AgentTree:
    """A main row and its branches, in the order in which they were sampled."""

    leaves: list[Trajectory]  # the main row first
    spans: list[Span]  # of each leaf: the turns at which it can be forked
    reward: float  # total reward of the main row
    branches: list[Branch] = field(default_factory=list)  # all leaves but the main row

    def add(self, branch: Branch) -> None:
        """Add a leaf. It can be forked at the turns after `branch.turn`. Up to this turn, it has the same nodes as an
        earlier leaf."""
        leaf = branch.as_trajectory()
        self.branches.append(branch)
        self.leaves.append(leaf)
        self.spans.append(Span(branch.turn + 1, len(leaf.turns)))


class TurnTreeExplorer(BranchExplorer):
    """Expands every explored main row into a tree of turns. Compares each leaf with all leaves of its prompt, and with
    the leaves of its tree."""

    name = "turn_trees"
    credits_main_rows = True
    args: "AgentTreeGRPOConfig"

    def __init__(
        self, policy: Policy, forks: Forks, scorer: Scorer, *, args: "ExplorationConfig | None" = None
    ) -> None:
        super().__init__(policy, forks, scorer, args=args)
        self.trees: dict[int, AgentTree] = {}  # by main row
        self.num_sampled = self.num_dropped = 0  # tokens sampled for branches; branches whose environment raised

    @property
    def weight(self) -> None:
        return None

    @property
    def is_active(self) -> bool:
        return self.args.explores

    def explore(self, groups: Sequence[ScoredGroup]) -> Branches:
        start = time.perf_counter()
        self.grow(groups)
        credit = self.credit(groups)
        self.policy.log_metric("branch/seconds", time.perf_counter() - start)
        for name, value in self.metrics().items():
            self.policy.log_metric(name, value)
        branches: list[Branch] = []
        advantages: list[float | list[float]] = []
        for row, tree in sorted(self.trees.items()):
            if row in credit:  # else the tree has no branches
                branches += tree.branches
                advantages += credit[row][1:]  # the first is the main row's
        # In the paper, a node is trained once for each leaf below it. So each row trains its whole trajectory.
        rows = self.forks.rows(branches, group_size=1, trains_prefixes=True)
        main_advantages = {row: of_leaves[0] for row, of_leaves in credit.items()}
        return Branches(rows, advantages, main_advantages)

    def grow(self, groups: Sequence[ScoredGroup]) -> None:
        """Make `trees`: expand the main rows round by round, and then keep only the leaves that are trained."""
        args, generator = self.args, self.policy.exploration_generator
        self.trees = {}
        for group in groups:
            for trajectory, reward in zip(group.trajectories, group.rewards, strict=True):
                row = trajectory.main_row
                if not self.forks.has_failed(row):
                    self.trees[row] = AgentTree([trajectory], [Span(0, len(trajectory.turns))], reward)
        self.num_sampled = self.num_dropped = 0
        for _ in range(args.num_rounds):
            forks = []
            for tree in self.trees.values():
                drawn = draw_nodes(tree.spans, args.num_expansions, generator=generator)
                for (leaf, turn), number in drawn.items():
                    forks.append(Fork(tree.leaves[leaf], turn, number))
            branches = self.forks.sample_branches(forks)
            # Drop branches whose environment raised, in a tool or in `get_reward`: the policy did not cause that.
            sound = [branch for branch in branches if environment_error(branch.environment) is None]
            self.forks.judge(sound)  # before the next round, which uses the environments again
            usable = [branch for branch in sound if environment_error(branch.environment) is None]
            for branch in usable:
                self.trees[branch.row].add(branch)
            self.num_sampled += sum(branch.num_sampled for branch in branches)
            self.num_dropped += len(branches) - len(usable)
        for tree in self.trees.values():
            kept = draw_leaves(len(tree.branches), args.leaves_per_tree, generator=generator)
            tree.leaves = [tree.leaves[0], *(tree.leaves[place + 1] for place in kept)]  # the main row is first
            tree.branches = [tree.branches[place] for place in kept]

    def credit(self, groups: Sequence[ScoredGroup]) -> dict[int, list[float]]:
        """Return the advantages of the leaves of each main row, the main row first, in prompts with branches."""
        args, credit = self.args, {}
        std = 1.0
        if args.scale_rewards == "batch":
            std = self.batch_deviation(branch for tree in self.trees.values() for branch in tree.branches)
        scale = "group" if args.scale_rewards == "group" else "none"
        for group in groups:
            rewards_by_tree = []
            for place, main_reward in enumerate(group.rewards):
                leaf_rewards = [main_reward]
                tree = self.trees.get(group.first_row + place)
                if tree is not None:  # None: the environment of the main row raised
                    leaf_rewards += map(self.total_reward, tree.branches)
                rewards_by_tree.append(leaf_rewards)
            if all(len(leaf_rewards) == 1 for leaf_rewards in rewards_by_tree):
                continue  # without branches, GRPO's advantages stay
            advantages = leaf_advantages(rewards_by_tree, intra_weight=args.intra_weight, scale=scale)
            for place, values in enumerate(advantages):
                credit[group.first_row + place] = [value / std for value in values]
        return credit

    def columns(self, num_rows: int) -> dict[str, list[Any]]:
        if not self.is_active:
            return {}
        lengths = [len(trajectory.turns) for trajectory in self.forks.trajectories]
        leaves = [1] * num_rows
        for row, tree in self.trees.items():
            leaves[row] = len(tree.leaves)
        return {"turns": lengths, "leaves": leaves}

    def metrics(self) -> dict[str, float]:
        """Return the metrics of a batch's trees. Every process must call it."""
        trajectories = self.forks.trajectories
        num_contrasts = num_leaves = 0
        depth = 0.0
        for tree in self.trees.values():
            rewards = [tree.reward, *map(self.total_reward, tree.branches)]
            distinct = {reward for reward in rewards if not math.isnan(reward)}
            num_contrasts += len(distinct) > 1
            num_leaves += len(tree.branches)
            for branch in tree.branches:
                depth += branch.turn / len(branch.origin.turns)
        total = self.policy.ranks.summed(
            {
                "rows": len(trajectories),
                "turns": sum(len(trajectory.turns) for trajectory in trajectories),
                "trees": len(self.trees),
                "contrast": num_contrasts,
                "leaves": num_leaves,
                "depth": depth,
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
