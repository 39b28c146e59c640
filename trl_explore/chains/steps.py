"""Where AttnRL forks: which chains, by how often a prompt is solved, and which of their steps, by influence."""

import math
import time
import warnings
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from trl_explore.chains.explorer import CompletionTree, ForkExplorer
from trl_explore.chains.influence import forked_chains, influential_steps, open_steps
from trl_explore.chains.leaves import TreeCompletion
from trl_explore.chains.reading import AttentionReader
from trl_explore.chains.uncertain import Place, uncertainty
from trl_explore.forks.engine import Forks
from trl_explore.pivots.choice import drop_empty_end, segment_delimiters, segment_fixed
from trl_explore.rows.policy import Policy
from trl_explore.rows.scorer import Scorer

if TYPE_CHECKING:
    from trl_explore.trainers.attn_rl_config import AttnRLConfig


@dataclass
class Cut:
    """The steps of a chain."""

    starts: list[int]  # `[S]`
    end: int  # token from which on nothing is forked
    influence: list[float]  # `[S]`


class StepForks:
    """Chooses the forks of a generation batch. `sum` and `number` are those of the mean influence in prompts that all
    their chains solved, over the run: such a prompt is forked where it has more than their mean."""

    def __init__(self, policy: Policy, chains: ForkExplorer, reader: AttentionReader) -> None:
        self.policy, self.chains, self.reader, self.args = policy, chains, reader, policy.args
        self.sum = self.number = 0.0
        self.cuts: list[list[Cut]] = []  # of the chains of every tree
        self._texts: dict[int, str] = {}  # of tokens
        self._warned = False

    def choose(self) -> list[list[Place]]:
        """Forks of every tree; every process calls it."""
        trees, cuts = self.chains.trees, self._cuts()
        self.cuts, forked = cuts, self._forked(trees, cuts)
        forks = [
            [(i, start) for i in places for start in self._starts(tree.leaves, i, own[i])]
            for tree, own, places in zip(trees, cuts, forked, strict=True)
        ]
        at_forks = [
            own[i].influence[own[i].starts.index(start)]
            for own, of_tree in zip(cuts, forks, strict=True)
            for i, start in of_tree
        ]
        total = self.policy.ranks.summed(
            {
                "chains": sum(map(len, cuts)),
                "steps": sum(len(cut.starts) for own in cuts for cut in own),
                "forked": sum(map(len, forked)),
                "forks": len(at_forks),
                "influence": sum(at_forks),
            }
        )
        self._warn_without_steps(int(total["chains"]), int(total["steps"]))
        if total["chains"]:
            self.policy.log_metric("steps/per_completion", total["steps"] / total["chains"])
            self.policy.log_metric("steps/forked_fraction", total["forked"] / total["chains"])
        if total["forks"]:
            self.policy.log_metric("steps/influence", total["influence"] / total["forks"])
        return forks

    def _cuts(self) -> list[list[Cut]]:
        """Steps of all chains, with their influence."""
        cuts, rows, steps = [], [], []
        for tree in self.chains.trees:
            own, first = [], len(tree.prompt_ids)
            for leaf in tree.leaves:
                starts = self._cut(leaf.token_ids)
                own.append(Cut(starts, self.chains.end(leaf), []))
                rows.append(tree.prompt_ids + leaf.token_ids)
                bounds = [first + start for start in starts] + [len(rows[-1])]
                steps.append([*zip(bounds[:-1], bounds[1:], strict=True)])
            cuts.append(own)
        found = iter(self.reader.influence(rows, steps))
        for cut in [cut for own in cuts for cut in own]:
            cut.influence = next(found)
        return cuts

    def _cut(self, ids: list[int]) -> list[int]:
        args, tokenizer = self.args, self.policy.tokenizer
        if args.step_length is not None:
            starts = segment_fixed(len(ids), length=args.step_length)
        else:
            starts = segment_delimiters(ids, tokenizer, delimiters=args.step_delimiters, cache=self._texts)
        return drop_empty_end(starts, ids, tokenizer, end_ids=self.policy.eos_token_ids)

    def _warn_without_steps(self, num_chains: int, num_steps: int) -> None:
        if self._warned or not num_chains:
            return
        self._warned = True  # looked at once, in the first batch
        if num_steps == num_chains and self.policy.accelerator.is_main_process:
            args = self.args
            where = "shorter than a step" if args.step_length else f"without any of {args.step_delimiters!r}"
            fields = "a smaller `step_length`" if args.step_length else "other `step_delimiters`, or a `step_length`"
            warnings.warn(
                f"All {num_chains} completions of the first batch are {where}, so that they are one step each and "
                f"nothing is forked. Choose {fields}.",
                stacklevel=2,
            )

    def _forked(self, trees: list[CompletionTree], cuts: list[list[Cut]]) -> list[list[int]]:
        """Chains of every tree that are forked: all, or by difficulty."""
        scored = [[not math.isnan(leaf.reward) for leaf in tree.leaves] for tree in trees]
        if not self.args.adaptive_sampling:
            return [[i for i, known in enumerate(own) if known] for own in scored]
        means = [fmean(value for cut in own for value in cut.influence) for own in cuts]
        easy = [_all_solved(tree.leaves, own) for tree, own in zip(trees, scored, strict=True)]
        of_easy = [mean for mean, solved in zip(means, easy, strict=True) if solved]
        total = self.policy.ranks.summed({"sum": sum(of_easy), "number": len(of_easy)})
        self.sum, self.number = self.sum + total["sum"], self.number + total["number"]
        return [
            []
            if solved and mean <= self.sum / self.number
            else forked_chains(tree.leaves, scored=own, generator=self.policy.exploration_generator)
            for tree, own, mean, solved in zip(trees, scored, means, easy, strict=True)
        ]

    def _starts(self, leaves: list[TreeCompletion], place: int, cut: Cut) -> list[int]:
        """Where a chain is forked: at as many steps, whatever they are chosen by."""
        args, starts = self.args, open_steps(cut.starts, end=cut.end)
        if args.fork_selection == "random":
            order = torch.randperm(len(starts), generator=self.policy.exploration_generator).tolist()
            return sorted(starts[i] for i in order[: args.num_forks])
        if args.fork_selection == "uncertain":
            return sorted(sorted(starts, key=lambda start: -uncertainty(leaves, (place, start)))[: args.num_forks])
        options: dict[str, Any] = {"quantile": args.influence_quantile, "distance": args.fork_distance}
        return influential_steps(cut.influence, cut.starts, args.num_forks, end=cut.end, **options)

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of it."""
        return {"sum": self.sum, "number": self.number}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self.sum, self.number = state["sum"], state["number"]


def _all_solved(leaves: list[TreeCompletion], scored: list[bool]) -> bool:
    return any(scored) and all(leaf.solved for leaf, known in zip(leaves, scored, strict=True) if known)


class StepForkExplorer(ForkExplorer):
    """AttnRL's explorer: forks completions at steps that later steps attend to."""

    args: "AttnRLConfig"

    def __init__(self, policy: Policy, forks: Forks, scorer: Scorer, reader: AttentionReader) -> None:
        super().__init__(policy, forks, scorer)
        self.steps = StepForks(policy, self, reader)

    @property
    def is_active(self) -> bool:
        return self.args.num_forks > 0

    def search(self) -> None:
        start = time.perf_counter()
        forks = self.steps.choose()
        self.policy.log_metric("steps/seconds", time.perf_counter() - start)
        self.grow(forks, self.args.branches_per_fork, logprobs=False)

    def state_dict(self) -> dict[str, Any]:
        return {"easy_prompts": self.steps.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps.load_state(state["easy_prompts"])
