"""Choice of forks in AttnRL: chains by the success rate of their prompt, and steps of these chains by influence."""

import itertools
import math
import time
import warnings
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from trl_explore.chains.explorer import CompletionTree, ForkExplorer
from trl_explore.chains.influence import forked_chains, influential_steps, open_steps
from trl_explore.chains.leaves import TreeCompletion
from trl_explore.chains.reading import AttentionReader
from trl_explore.chains.uncertain import ForkPoint, uncertainty
from trl_explore.forks.engine import Forks
from trl_explore.pivots.choice import drop_empty_end, segment_delimiters, segment_fixed
from trl_explore.rows.policy import Policy
from trl_explore.rows.scorer import Scorer

if TYPE_CHECKING:
    from trl_explore.trainers.attn_rl_config import AttnRLConfig


@dataclass
class ChainSteps:
    """The S steps into which a chain is divided."""

    starts: list[int]  # first token of each step, `[S]`
    end: int  # the chain may be forked only before this token
    influence: list[float]  # `[S]`


class StepForks:
    """
    Chooses the forks of a generation batch.

    With `adaptive_sampling`, a prompt whose chains all succeeded is forked only if the mean influence of its steps is
    high: above the average over all solved prompts in the run so far. `sum` is the sum of the mean influences of these
    solved prompts, and `number` is their number.

    Args:
        policy ([`~trl_explore.rows.policy.Policy`]):
            The trainer.
        chains ([`~trl_explore.chains.explorer.ForkExplorer`]):
            The explorer that forks the chains.
        reader ([`~trl_explore.chains.reading.AttentionReader`]):
            Computes the influence of steps.
        args ([`AttnRLConfig`]):
            The configuration.
    """

    def __init__(self, policy: Policy, chains: ForkExplorer, reader: AttentionReader, args: "AttnRLConfig") -> None:
        self.policy, self.chains, self.reader, self.args = policy, chains, reader, args
        self.sum = self.number = 0.0
        self.cuts: list[list[ChainSteps]] = []  # of the chains of each tree
        self._texts: dict[int, str] = {}  # text of each token
        self._warned = False

    def choose(self) -> list[list[ForkPoint]]:
        """Return the forks of each tree. Every process must call it."""
        trees = self.chains.trees
        self.cuts = self._divide_chains()
        forked = self._chains_to_fork(trees, self.cuts)
        forks = []
        influence_at_forks = []
        for tree, cuts, places in zip(trees, self.cuts, forked, strict=True):
            forks_of_tree = []
            for place in places:
                cut = cuts[place]
                for start in self._starts(tree.leaves, place, cut):
                    forks_of_tree.append((place, start))
                    influence_at_forks.append(cut.influence[cut.starts.index(start)])
            forks.append(forks_of_tree)
        num_steps = 0
        for cuts in self.cuts:
            num_steps += sum(len(cut.starts) for cut in cuts)
        total = self.policy.ranks.summed(
            {
                "chains": sum(map(len, self.cuts)),
                "steps": num_steps,
                "forked": sum(map(len, forked)),
                "forks": len(influence_at_forks),
                "influence": sum(influence_at_forks),
            }
        )
        self._warn_without_steps(int(total["chains"]), int(total["steps"]))
        if total["chains"]:
            self.policy.log_metric("steps/per_completion", total["steps"] / total["chains"])
            self.policy.log_metric("steps/forked_fraction", total["forked"] / total["chains"])
        if total["forks"]:
            self.policy.log_metric("steps/influence", total["influence"] / total["forks"])
        return forks

    def _divide_chains(self) -> list[list[ChainSteps]]:
        """Return the steps of the chains of each tree, with their influence."""
        all_cuts, rows, steps = [], [], []
        for tree in self.chains.trees:
            cuts = []
            prompt_length = len(tree.prompt_ids)
            for leaf in tree.leaves:
                starts = self._cut(leaf.token_ids)
                cuts.append(ChainSteps(starts, self.chains.end(leaf), []))
                rows.append(tree.prompt_ids + leaf.token_ids)
                bounds = [prompt_length + start for start in starts] + [len(rows[-1])]
                steps.append(list(itertools.pairwise(bounds)))
            all_cuts.append(cuts)
        influence = iter(self.reader.influence(rows, steps))
        for cuts in all_cuts:
            for cut in cuts:
                cut.influence = next(influence)
        return all_cuts

    def _cut(self, ids: list[int]) -> list[int]:
        """Return the first token of each step of a completion."""
        args, tokenizer = self.args, self.policy.tokenizer
        if args.step_length is not None:
            starts = segment_fixed(len(ids), length=args.step_length)
        else:
            starts = segment_delimiters(ids, tokenizer, delimiters=args.step_delimiters, cache=self._texts)
        return drop_empty_end(starts, ids, tokenizer, end_ids=self.policy.eos_token_ids)

    def _warn_without_steps(self, num_chains: int, num_steps: int) -> None:
        """Warn once if no completion of the first batch has more than one step."""
        if self._warned or not num_chains:
            return
        self._warned = True  # check the first batch only
        if num_steps == num_chains and self.policy.accelerator.is_main_process:
            args = self.args
            if args.step_length:
                where, fields = "shorter than a step", "a smaller `step_length`"
            else:
                where = f"without any of {args.step_delimiters!r}"
                fields = "other `step_delimiters`, or a `step_length`"
            warnings.warn(
                f"All {num_chains} completions of the first batch are {where}, so that they are one step each and "
                f"nothing is forked. Choose {fields}.",
                stacklevel=2,
            )

    def _chains_to_fork(self, trees: list[CompletionTree], all_cuts: list[list[ChainSteps]]) -> list[list[int]]:
        """Return the indices of the chains of each tree that are forked: all chains with a reward, or with
        `adaptive_sampling` fewer, depending on the success rate of the prompt."""
        scored: list[list[bool]] = []  # True for each chain of each tree that has a reward
        for tree in trees:
            scored.append([not math.isnan(leaf.reward) for leaf in tree.leaves])
        if not self.args.adaptive_sampling:
            return [_true_places(is_scored) for is_scored in scored]
        means, solved = [], []
        for tree, cuts, is_scored in zip(trees, all_cuts, scored, strict=True):
            values: list[float] = []
            for cut in cuts:
                values += cut.influence
            means.append(fmean(values))
            solved.append(_all_solved(tree.leaves, is_scored))
        solved_means = [mean for mean, is_solved in zip(means, solved, strict=True) if is_solved]
        total = self.policy.ranks.summed({"sum": sum(solved_means), "number": len(solved_means)})
        self.sum, self.number = self.sum + total["sum"], self.number + total["number"]
        generator = self.policy.exploration_generator
        forked: list[list[int]] = []
        for tree, is_scored, mean, is_solved in zip(trees, scored, means, solved, strict=True):
            if is_solved and mean <= self.sum / self.number:
                forked.append([])
            else:
                forked.append(forked_chains(tree.leaves, scored=is_scored, generator=generator))
        return forked

    def _starts(self, leaves: list[TreeCompletion], place: int, cut: ChainSteps) -> list[int]:
        """Return the first tokens of the steps at which a chain is forked. Their number does not depend on
        `fork_selection`."""
        args = self.args
        starts = open_steps(cut.starts, end=cut.end)
        if args.fork_selection == "random":
            order = torch.randperm(len(starts), generator=self.policy.exploration_generator).tolist()
            return sorted(starts[i] for i in order[: args.num_forks])
        if args.fork_selection == "uncertain":
            points = [(place, start) for start in starts]
            points.sort(key=partial(uncertainty, leaves), reverse=True)
            return sorted(start for _, start in points[: args.num_forks])
        return influential_steps(
            cut.influence,
            cut.starts,
            args.num_forks,
            end=cut.end,
            quantile=args.influence_quantile,
            distance=args.fork_distance,
        )

    def state(self) -> dict[str, Any]:
        """Return the state for the checkpoint."""
        return {"sum": self.sum, "number": self.number}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self.sum, self.number = state["sum"], state["number"]


def _true_places(mask: list[bool]) -> list[int]:
    """Return the indices that are True."""
    return [i for i, is_true in enumerate(mask) if is_true]


def _all_solved(leaves: list[TreeCompletion], scored: list[bool]) -> bool:
    """Return whether all scored completions succeeded, and at least one is scored."""
    places = _true_places(scored)
    return bool(places) and all(leaves[i].solved for i in places)


class StepForkExplorer(ForkExplorer):
    """AttnRL's explorer: forks completions at steps that later steps attend to."""

    args: "AttnRLConfig"

    def __init__(self, policy: Policy, forks: Forks, scorer: Scorer, reader: AttentionReader) -> None:
        super().__init__(policy, forks, scorer)
        self.steps = StepForks(policy, self, reader, self.args)

    @property
    def is_active(self) -> bool:
        return self.args.explores

    def search(self) -> None:
        start = time.perf_counter()
        forks = self.steps.choose()
        self.policy.log_metric("steps/seconds", time.perf_counter() - start)
        self.grow(forks, self.args.branches_per_fork, logprobs=False)

    def state_dict(self) -> dict[str, Any]:
        return {"easy_prompts": self.steps.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps.load_state(state["easy_prompts"])
