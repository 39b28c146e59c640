"""The search of TreeRL and AttnRL: completions are left at forks, continued, judged, and credited as one tree."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from trl_explore.chains.leaves import Leaf, chain_of, completion, completion_logprobs, shared_tokens
from trl_explore.chains.uncertain import Fork, choose_forks, drawn_leaves, open_places, said_at, uncertainty
from trl_explore.chains.values import token_advantages
from trl_explore.rewards.success import succeeded
from trl_explore.rows.policy import Policy
from trl_explore.rows.rollouts import Rows
from trl_explore.rows.scorer import ScoredRows, Scorer
from trl_explore.rows.streams import RowDict, row_tokens
from trl_explore.sampling.sampler import Sampler


@dataclass
class Tree:
    """The completions of one prompt; its chains are main rows of this process, from `row` on."""

    row: int
    example: dict[str, Any]
    prompt_ids: list[int]
    leaves: list[Leaf]
    trained: list[int] = field(default_factory=list)  # places of the leaves whose rows are trained


class ChainSearch:
    """Grows the chains of a generation batch into trees. Every process calls each method equally often."""

    def __init__(self, policy: Policy, scorer: Scorer, sample: Sampler) -> None:
        self.policy, self.scorer, self.sample, self.args = policy, scorer, sample, policy.args
        self.trees: list[Tree] = []
        self.any_trees = False  # on any process
        self.branch_rows: ScoredRows | None = None
        self.uncertainty: list[float] = []  # at the forks
        self._most = 0  # tokens of a completion
        self._texts: dict[int, str] = {}  # of tokens

    def begin(
        self,
        output: RowDict,
        examples: list[dict[str, Any]],
        completion_ids: list[list[int]],
        explored: torch.Tensor | None,
        *,
        reported: list[list[float | None]] | None,
        logprobs: bool,
    ) -> None:
        """The chains of a batch: the main rows `[B]` of this process in groups that are `explored`, `(N,)`; all for
        `None`. Where `logprobs` of their tokens are needed, they are those that were `reported`, or TRL's old ones, or
        those of a pass."""
        size, ranks, prompt_ids = self.args.num_generations, self.policy.ranks, row_tokens(output)[0]
        own = [True] * len(examples) if explored is None else ranks.local(explored).tolist()
        rewards, solved = ranks.local(self.scorer.totals()).tolist(), self._solved(ranks.local(self.scorer.success()))
        known = reported
        if known is None and logprobs and "old_per_token_logps" in output:
            old = output["old_per_token_logps"].tolist()
            known = [row[: len(ids)] for row, ids in zip(old, completion_ids, strict=True)]
        elif known is None and logprobs:
            known = self.logprobs(prompt_ids, completion_ids)
        of_tokens: list[Any] = known or [None] * len(examples)
        self.trees, self.branch_rows, self.uncertainty = [], None, []
        for row in [row for row in range(0, len(examples), size) if own[row]]:
            leaves = [
                Leaf(completion_ids[i], None, 0, of_tokens[i], rewards[i], solved[i]) for i in range(row, row + size)
            ]
            self.trees.append(Tree(row, examples[row], prompt_ids[row], leaves, list(range(size))))
        self.any_trees = ranks.most(len(self.trees)) > 0
        # Without a limit, branches end where the longest main row of this process ends.
        self._most = self.args.max_completion_length or max(map(len, completion_ids))

    def logprobs(self, prefixes: list[list[int]], completion_ids: list[list[int]]) -> list[list[float | None]]:
        """Log-probabilities of completions behind prefixes, by a pass of the policy."""
        number, filler = self.policy.ranks.most(len(prefixes)), [self.policy.eos_token_ids[0]]
        if number == 0:
            return []
        fill = [filler] * (number - len(prefixes))
        found = self.sample.token_logprobs(prefixes + fill, completion_ids + fill)
        return [[*values] for values in found[: len(prefixes)]]

    def forks(self, number: int, *, selection: str) -> list[list[Fork]]:
        """So many forks of every chain and what grows on it, for every tree, by how certain its tokens were."""
        options: dict[str, Any] = {"selection": selection, "generator": self.policy.exploration_generator}
        places = [open_places(tree.leaves, [self.end(leaf) for leaf in tree.leaves]) for tree in self.trees]
        return [
            choose_forks(tree.leaves, own, number, **options) for tree, own in zip(self.trees, places, strict=True)
        ]

    def end(self, leaf: Leaf) -> int:
        """The token of a completion from which on nothing is forked: behind what its answer begins with, and all where
        it was cut off and is not trained."""
        ends = (*self.policy.eos_token_ids, self.policy.tokenizer.pad_token_id)
        if self.args.mask_truncated_completions and leaf.token_ids[-1] not in ends:
            return 0
        said = said_at(leaf.token_ids, self.policy.tokenizer, self.args.fork_until, cache=self._texts)
        return leaf.length if said is None else leaf.start + said + 1

    def grow(self, forks: Sequence[Sequence[Fork]], number: int, *, logprobs: bool) -> None:
        """So many branches from the forks of every tree, all in one call; `logprobs`: those of their tokens are needed
        and the backend need not report them."""
        pairs = [(tree, fork) for tree, own in zip(self.trees, forks, strict=True) for fork in own]
        prefixes = [tree.prompt_ids + completion(tree.leaves, leaf)[:token] for tree, (leaf, token) in pairs]
        self.uncertainty += [uncertainty(tree.leaves, fork) for tree, fork in pairs]
        with self.sample.rollout():
            begun = [token for _, (_, token) in pairs]
            found = self.sample(prefixes, number, [self._most - token for token in begun], begun)
        branches = [
            (tree, prefix, Leaf(one.token_ids, leaf, token, one.logprobs))
            for (tree, (leaf, token)), prefix, own in zip(pairs, prefixes, found, strict=True)
            for one in own
        ]
        if logprobs and self.policy.serving is None:
            known = self.logprobs([p for _, p, _ in branches], [leaf.token_ids for _, _, leaf in branches])
            for (_, _, leaf), values in zip(branches, known, strict=True):
                leaf.logprobs = values
        for tree, _, leaf in branches:
            tree.leaves.append(leaf)

    def score(self, number: int | None) -> None:
        """Rewards of all branches, and the rows of those that are trained, `number` leaves per prompt."""
        branches = [(tree, i) for tree in self.trees for i, leaf in enumerate(tree.leaves) if leaf.parent is not None]
        completions = [completion(tree.leaves, i) for tree, i in branches]
        found, logged = self.scorer.judge(
            [tree.example for tree, _ in branches], completions, prompt_ids=[tree.prompt_ids for tree, _ in branches]
        )
        rewards = torch.tensor(found, dtype=torch.float32).view(len(branches), len(self.scorer.names))
        totals, solved = self.scorer.totals(rewards).tolist(), self._solved(self.scorer.success(rewards))
        for (tree, i), own, extra, total, ok in zip(branches, found, logged, totals, solved, strict=True):
            leaf = tree.leaves[i]
            leaf.rewards, leaf.extra, leaf.reward, leaf.solved = own, extra, total, ok
        size, generator = self.args.num_generations, self.policy.exploration_generator
        for tree in self.trees:
            tree.trained = drawn_leaves(tree.leaves, number, generator=generator)
        self.branch_rows = self._scored([(tree, i) for tree in self.trees for i in tree.trained if i >= size])

    def _solved(self, deciding: torch.Tensor) -> list[bool]:
        return succeeded(deciding, threshold=self.args.success_threshold).tolist()

    def _scored(self, branches: list[tuple[Tree, int]]) -> ScoredRows | None:
        """Rows of branches, prefixes included, with the advantages of their tokens."""
        completions = [completion(tree.leaves, i) for tree, i in branches]
        scored = self.scorer.score(
            "branch",
            Rows(
                examples=[tree.example for tree, _ in branches],
                prompt_ids=[tree.prompt_ids for tree, _ in branches],
                completion_ids=completions,
                loss_mask=[[1] * len(ids) for ids in completions],
                group_size=1,
                known_rewards=[tree.leaves[i].rewards for tree, i in branches],
                extra=[tree.leaves[i].extra for tree, i in branches],
                parents=[tree.row + chain_of(tree.leaves, i) for tree, i in branches],
                shared=[shared_tokens(tree.leaves)[i][chain_of(tree.leaves, i)] for tree, i in branches],
                logprobs=[completion_logprobs(tree.leaves, i) for tree, i in branches]
                if self.policy.serving is not None
                else None,
            ),
        )
        if scored is not None:
            wide = torch.zeros_like(scored.rows["completion_ids"], dtype=torch.float32)
            credit = {id(tree): token_advantages(tree.leaves, tree.trained) for tree in self.trees}
            _fill(wide, dict(enumerate(credit[id(tree)][i] for tree, i in branches)))
            scored.rows["advantages"] = wide
        return scored

    def advantages(self, output: RowDict) -> torch.Tensor:
        """Advantages of the main rows: of their tokens in trees, GRPO's in others."""
        if not self.any_trees:
            return output["advantages"]
        wide = output["advantages"].unsqueeze(1).repeat(1, output["completion_ids"].shape[1])
        for tree in self.trees:
            of_chains = token_advantages(tree.leaves, tree.trained)[: self.args.num_generations]
            _fill(wide, dict(enumerate(of_chains, tree.row)))
        return wide

    def columns(self, num_rows: int) -> dict[str, list[Any]]:
        """What the completions table says of the main rows of this process."""
        branches, values = [0] * num_rows, [math.nan] * num_rows
        for tree in self.trees:
            known = [leaf.reward for leaf in tree.leaves if not math.isnan(leaf.reward)]
            for i, leaf in enumerate(tree.leaves):
                branches[tree.row + chain_of(tree.leaves, i)] += leaf.parent is not None
            for row in range(tree.row, tree.row + self.args.num_generations):
                values[row] = sum(known) / len(known) if known else math.nan
        return {"branches": branches, "tree_value": values}

    def metrics(self, main_tokens: int) -> dict[str, float]:
        """What is logged of a batch's branches; every process calls it."""
        branches = [(tree, leaf) for tree in self.trees for leaf in tree.leaves if leaf.parent is not None]
        left = [(leaf, tree.leaves[leaf.parent]) for tree, leaf in branches if leaf.parent is not None]
        known = [{leaf.reward for leaf in tree.leaves if not math.isnan(leaf.reward)} for tree in self.trees]
        total = self.policy.ranks.summed(
            {
                "trees": len(self.trees),
                "contrast": sum(len(rewards) > 1 for rewards in known),
                "forks": len(self.uncertainty),
                "uncertainty": sum(self.uncertainty),
                "branches": len(branches),
                "depth": sum(leaf.start / parent.length for leaf, parent in left),
                "other": sum(abs(leaf.reward - parent.reward) > 0 for leaf, parent in left),  # not where one is NaN
                "tokens": sum(len(leaf.token_ids) for leaf, _ in left),
                "solved": sum(leaf.solved for leaf, _ in left),
                "trained": sum(len(tree.trained) - self.args.num_generations for tree in self.trees),
                "main_tokens": main_tokens,
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
            if total["uncertainty"]:  # where it is known
                metrics["uncertainty"] = total["uncertainty"] / total["forks"]
            metrics["other_fraction"] = total["other"] / total["branches"]
            metrics["success_fraction"] = total["solved"] / total["branches"]
            metrics["trained_fraction"] = total["trained"] / total["branches"]
            metrics["mean_suffix_length"] = total["tokens"] / total["branches"]
        return {f"branch/{name}": value for name, value in metrics.items()}


def _fill(wide: torch.Tensor, rows: dict[int, list[float]]) -> None:
    """Put values of rows into `(B, T)`."""
    for row, values in rows.items():
        wide[row, : len(values)] = torch.tensor(values, device=wide.device)
