"""The explorers of TreeRL and AttnRL: they fork completions, and credit all completions of a prompt as one tree."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from trl_explore.chains.leaves import TreeCompletion, chain_of
from trl_explore.chains.uncertain import (
    ForkPoint,
    choose_forks,
    choose_trained,
    first_text_end,
    open_forks,
    uncertainty,
)
from trl_explore.chains.values import token_advantages
from trl_explore.explorers.branch_explorer import Branches, BranchExplorer, ScoredGroup
from trl_explore.forks.engine import Forks
from trl_explore.forks.trajectories import Branch, Fork, Trajectory
from trl_explore.rewards.success import succeeded
from trl_explore.rows.policy import Policy
from trl_explore.rows.scorer import Scorer
from trl_explore.rows.truncation import is_trained

if TYPE_CHECKING:
    from trl_explore.trainers.attn_rl_config import AttnRLConfig
    from trl_explore.trainers.tree_rl_config import TreeRLConfig


@dataclass
class CompletionTree:
    """The completions of one prompt. The first `num_generations` leaves are GRPO's completions (chains)."""

    row: int  # first main row of the prompt
    prompt_ids: list[int]
    leaves: list[TreeCompletion]
    trajectories: list[Trajectory]  # the completion of each leaf, `[L]`
    branches: dict[int, Branch] = field(default_factory=dict)  # the leaves that are branches, by index in `leaves`
    trained: list[int] = field(default_factory=list)  # indices of the leaves whose rows are trained

    def add(self, branch: Branch, parent: int) -> TreeCompletion:
        """Add a branch that forks from the leaf at index `parent`. Return the new leaf."""
        logprobs = None if branch.logprobs is None else branch.logprobs[branch.start :]
        leaf = TreeCompletion(branch.completion_ids[branch.start :], parent, branch.start, logprobs)
        self.branches[len(self.leaves)] = branch
        self.leaves.append(leaf)
        self.trajectories.append(branch.as_trajectory())
        return leaf


class ForkExplorer(BranchExplorer):
    """Base class of explorers that fork the completions of a prompt, and credit all of them as leaves of one tree."""

    name = "forks"
    credits_main_rows = True
    args: "TreeRLConfig | AttnRLConfig"

    def __init__(self, policy: Policy, forks: Forks, scorer: Scorer) -> None:
        super().__init__(policy, forks, scorer)
        self.trees: list[CompletionTree] = []
        self.uncertainty: list[float] = []  # `-log p` at each fork
        self._texts: dict[int, str] = {}  # text of each token

    @property
    def weight(self) -> None:
        return None

    @property
    def needs_logprobs(self) -> bool:
        return self.args.fork_selection == "uncertain"

    @property
    def trained_leaves(self) -> int | None:
        """Return the number of leaves of each prompt that are trained. None: all."""
        return None

    def search(self) -> None:
        """Choose forks in `trees`, and pass them to [`grow`]. Every process must call [`grow`] the same number of
        times."""
        raise NotImplementedError

    def explore(self, groups: Sequence[ScoredGroup]) -> Branches:
        start = time.perf_counter()
        self.begin(groups)
        self.search()
        self.score()
        self.policy.log_metric("branch/seconds", time.perf_counter() - start)
        for name, value in self.metrics().items():
            self.policy.log_metric(name, value)
        size = self.args.num_generations
        branches: list[Branch] = []
        advantages: list[float | list[float]] = []
        main_advantages: dict[int, float | list[float]] = {}
        for tree in self.trees:
            tree_advantages = token_advantages(tree.leaves, tree.trained)
            for place in tree.trained:
                if place >= size:
                    branches.append(tree.branches[place])
                    advantages.append(tree_advantages[place])
            for place in range(size):
                main_advantages[tree.row + place] = tree_advantages[place]
        rows = self.forks.rows(branches, group_size=1, trains_prefixes=True)
        return Branches(rows, advantages, main_advantages)

    def begin(self, groups: Sequence[ScoredGroup]) -> None:
        """Make a tree of the completions of each prompt."""
        self.trees, self.uncertainty = [], []
        prefixes, completions = [], []
        for group in groups:
            leaves = []
            solved = self._solved(torch.tensor(group.deciding))
            for place, trajectory in enumerate(group.trajectories):
                leaf = TreeCompletion(trajectory.completion_ids, logprobs=trajectory.logprobs)
                leaf.reward, leaf.solved = group.rewards[place], solved[place]
                leaf.is_trained = is_trained(self.policy, leaf.token_ids)
                leaves.append(leaf)
                prefixes.append(trajectory.prompt_ids)
                completions.append(trajectory.completion_ids)
            trajectories = list(group.trajectories)
            tree = CompletionTree(group.first_row, trajectories[0].prompt_ids, leaves, trajectories)
            tree.trained = [place for place, leaf in enumerate(leaves) if leaf.is_trained]
            self.trees.append(tree)
        new_leaves: list[TreeCompletion] = []
        for tree in self.trees:
            new_leaves += tree.leaves
        num_unknown = sum(leaf.logprobs is None for leaf in new_leaves)
        # If a process lacks log-probabilities, all processes compute them, because the forward pass is collective.
        if self.needs_logprobs and self.policy.ranks.most(num_unknown):
            for leaf, values in zip(new_leaves, self.logprobs(prefixes, completions), strict=True):
                leaf.logprobs = values

    def logprobs(self, prefixes: list[list[int]], completion_ids: list[list[int]]) -> list[list[float | None]]:
        """Return the log-probabilities of completions after prefixes, from a forward pass of the policy."""
        num_rows = self.policy.ranks.most(len(prefixes))
        if num_rows == 0:
            return []
        # Every process must pass the same number of rows.
        fillers = [[self.policy.eos_token_ids[0]]] * (num_rows - len(prefixes))
        found = self.forks.sample.token_logprobs(prefixes + fillers, completion_ids + fillers)
        return [[*values] for values in found[: len(prefixes)]]

    def end(self, leaf: TreeCompletion) -> int:
        """Return the first token at which a completion may not be forked: the token after the first text of
        `fork_until`, or the end of the completion. Return 0, so that there is no fork, if the completion was cut off
        and `mask_truncated_completions` keeps it out of the loss."""
        if not leaf.is_trained:
            return 0
        # The parent's tokens before the fork contain no such text, so search only the tokens of the leaf itself.
        last_of_text = first_text_end(leaf.token_ids, self.policy.tokenizer, self.args.fork_until, cache=self._texts)
        return leaf.length if last_of_text is None else leaf.start + last_of_text + 1

    def grow(self, forks: Sequence[Sequence[ForkPoint]], number: int, *, logprobs: bool) -> None:
        """
        Sample branches from the forks of every tree, all in one call.

        Args:
            forks (`Sequence[Sequence[tuple[int, int]]]`):
                Forks of each tree: the index of a leaf, and the number of tokens to keep.
            number (`int`):
                Number of branches per fork.
            logprobs (`bool`):
                True if the log-probabilities of the branches are needed.
        """
        owners: list[tuple[CompletionTree, int]] = []  # tree of each branch, and index of the leaf that it forks from
        requests = []
        for tree, tree_forks in zip(self.trees, forks, strict=True):
            for place, token in tree_forks:
                self.uncertainty.append(uncertainty(tree.leaves, (place, token)))
                requests.append(Fork(tree.trajectories[place], 0, number, token))
                owners += [(tree, place)] * number
        leaves, prefixes = [], []
        for (tree, parent), branch in zip(owners, self.forks.sample_branches(requests), strict=True):
            leaf = tree.add(branch, parent)
            leaf.is_trained = is_trained(self.policy, leaf.token_ids)
            leaves.append(leaf)
            prefixes.append(tree.prompt_ids + branch.completion_ids[: branch.start])
        if logprobs and self.policy.serving is None:  # vLLM has reported the log-probabilities of the branches
            known = self.logprobs(prefixes, [leaf.token_ids for leaf in leaves])
            for leaf, values in zip(leaves, known, strict=True):
                leaf.logprobs = values

    def score(self) -> None:
        """Ask the reward functions about all branches, and choose the leaves that are trained."""
        branches, leaves = [], []
        for tree in self.trees:
            for place, branch in tree.branches.items():
                branches.append(branch)
                leaves.append(tree.leaves[place])
        self.forks.judge(branches)
        rewards = torch.tensor([branch.rewards for branch in branches], dtype=torch.float32)
        rewards = rewards.view(len(branches), len(self.scorer.names))
        totals, solved = self.scorer.totals(rewards).tolist(), self._solved(self.scorer.success(rewards))
        for leaf, total, is_solved in zip(leaves, totals, solved, strict=True):
            leaf.reward, leaf.solved = total, is_solved
        for tree in self.trees:
            tree.trained = choose_trained(
                tree.leaves, self.trained_leaves, generator=self.policy.exploration_generator
            )

    def _solved(self, deciding: torch.Tensor) -> list[bool]:
        """Return whether rewards count as successes."""
        return succeeded(deciding, threshold=self.args.success_threshold).tolist()

    def columns(self, num_rows: int) -> dict[str, list[Any]]:
        branches, values = [0] * num_rows, [math.nan] * num_rows
        for tree in self.trees:
            for place in tree.branches:
                branches[tree.row + chain_of(tree.leaves, place)] += 1
            rewards = [leaf.reward for leaf in tree.leaves if not math.isnan(leaf.reward)]
            if rewards:
                num_chains = len(tree.leaves) - len(tree.branches)
                values[tree.row : tree.row + num_chains] = [sum(rewards) / len(rewards)] * num_chains
        return {"branches": branches, "tree_value": values}

    def metrics(self) -> dict[str, float]:
        """Return the metrics of a generation batch's trees and branches, over all processes. Every process must call
        it."""
        pairs: list[tuple[TreeCompletion, TreeCompletion]] = []  # each branch, and the leaf that it forks from
        num_contrasts = num_trained = 0
        for tree in self.trees:
            known = {leaf.reward for leaf in tree.leaves if not math.isnan(leaf.reward)}
            num_contrasts += len(known) > 1
            num_trained += sum(place in tree.branches for place in tree.trained)
            for leaf in tree.leaves:
                if leaf.parent is not None:
                    pairs.append((leaf, tree.leaves[leaf.parent]))
        total = self.policy.ranks.summed(
            {
                "trees": len(self.trees),
                "contrast": num_contrasts,
                "forks": len(self.uncertainty),
                "uncertainty": sum(self.uncertainty),
                "branches": len(pairs),
                "depth": sum(leaf.start / parent.length for leaf, parent in pairs),
                # A comparison with NaN is False: branches without a reward do not count.
                "other": sum(abs(leaf.reward - parent.reward) > 0 for leaf, parent in pairs),
                "tokens": sum(len(leaf.token_ids) for leaf, _ in pairs),
                "solved": sum(leaf.solved for leaf, _ in pairs),
                "trained": num_trained,
                "main_tokens": sum(len(trajectory.completion_ids) for trajectory in self.forks.trajectories),
            }
        )
        metrics = {
            "forks": total["forks"],
            "sampled_tokens": total["tokens"],
            "token_ratio": total["tokens"] / (total["tokens"] + total["main_tokens"]),
        }
        if total["trees"]:
            metrics["contrast_fraction"] = total["contrast"] / total["trees"]
        if total["branches"]:
            metrics["depth"] = total["depth"] / total["branches"]
            if total["uncertainty"]:  # 0 if no probability is known
                metrics["uncertainty"] = total["uncertainty"] / total["forks"]
            metrics["other_fraction"] = total["other"] / total["branches"]
            metrics["success_fraction"] = total["solved"] / total["branches"]
            metrics["trained_fraction"] = total["trained"] / total["branches"]
            metrics["mean_suffix_length"] = total["tokens"] / total["branches"]
        return {f"branch/{name}": value for name, value in metrics.items()}


class UncertainForkExplorer(ForkExplorer):
    """TreeRL's explorer: forks completions at the tokens of highest `-log p`, in several rounds."""

    args: "TreeRLConfig"

    @property
    def is_active(self) -> bool:
        return self.args.explores

    @property
    def trained_leaves(self) -> int | None:
        return self.args.trained_leaves

    def search(self) -> None:
        args = self.args
        for number in range(args.num_rounds):
            forks = []
            for tree in self.trees:
                places = open_forks(tree.leaves, [self.end(leaf) for leaf in tree.leaves])
                forks.append(
                    choose_forks(
                        tree.leaves,
                        places,
                        args.num_forks,
                        selection=args.fork_selection,
                        generator=self.policy.exploration_generator,
                    )
                )
            is_last = number + 1 == args.num_rounds
            # Only the next round needs log-probabilities, to choose forks in the new branches.
            needs_logprobs = not is_last and args.fork_selection == "uncertain"
            self.grow(forks, args.branches_per_fork, logprobs=needs_logprobs)
