"""Choose for each unsolved prompt between several explorers and no exploration, while training."""

import warnings
from collections.abc import Mapping, Sequence
from random import Random
from typing import TYPE_CHECKING, Any

import torch

from trl_explore.auto.estimates import PLAIN, Estimates
from trl_explore.auto.ways import WAYS
from trl_explore.explorers.branch_explorer import Branches, BranchExplorer, Found, ScoredGroup
from trl_explore.forks.engine import Forks
from trl_explore.rewards.success import succeeded
from trl_explore.rows.advantages import has_signal
from trl_explore.rows.policy import Policy
from trl_explore.rows.scorer import Scorer
from trl_explore.rows.streams import RowDict

if TYPE_CHECKING:
    from trl_explore.trainers.explorer_options import OwnOptions

WORTH_SHARE = 0.05  # if fewer of the unsolved prompts were worth exploring, the run says so at its end


class AutoExplorer(BranchExplorer):
    """
    Gives each unsolved prompt to the explorer that buys the most contrast per generated token, or to none of them.

    A group of rows has contrast if its rewards differ. GRPO learns only from groups with contrast. The estimates are
    updated with every generation batch, so that the choice follows the policy as it learns.

    Args:
        policy ([`~trl_explore.rows.policy.Policy`]):
            The trainer.
        forks ([`~trl_explore.forks.engine.Forks`]):
            Samples branches for all explorers.
        scorer ([`~trl_explore.rows.scorer.Scorer`]):
            Asks the reward functions.
        options (`dict[str, OwnOptions]`):
            Configurations of the explorers, by name.
    """

    name = "auto"
    credits_main_rows = True

    def __init__(self, policy: Policy, forks: Forks, scorer: Scorer, *, options: "Mapping[str, OwnOptions]") -> None:
        super().__init__(policy, forks, scorer)
        self.options = options
        self.explorers: dict[str, BranchExplorer] = {}
        for name, own in options.items():
            explorer = WAYS[name].make(policy, forks, scorer, own.args)
            explorer.stream = f"explored_{name}"
            self.explorers[name] = explorer
        always = self.args.explore != "auto"  # a single explorer, for every unsolved prompt
        self.estimates = Estimates(
            [*options], discount=self.args.explore_discount, min_share=1.0 if always else self.args.explore_min_share
        )
        self.num_batches = 0
        # Of the newest generation batch: share of the prompts that each explorer gets, and this process's groups, with
        # the source that was chosen for each.
        self._shares: dict[str, float] = {}
        self._groups: Sequence[ScoredGroup] = ()
        self._sources: list[str] = []

    @property
    def is_active(self) -> bool:
        return bool(self.explorers)

    def assign(self, groups: Sequence[ScoredGroup], output: RowDict) -> list[tuple[BranchExplorer, list[ScoredGroup]]]:
        """
        Choose what to do with each group.

        Args:
            groups (`Sequence[ScoredGroup]`):
                All groups of this process.
            output (`dict`):
                The main rows of this process as TRL scored them, B rows.

        Returns:
            `list[tuple]`: Each explorer that explores a group on any process, with its groups of this process.
        """
        self.num_batches += 1
        for options in self.options.values():
            options.follow(self.args)
        for explorer in self.explorers.values():
            explorer.observe(groups)
        has_contrast = self._has_contrast(output)
        deciding = self.scorer.success().view(-1, self.args.num_generations)  # (P, G) of all processes
        is_success = succeeded(deciding, threshold=self.args.success_bar)
        self._add_plain(groups, has_contrast, is_success)
        is_open = ~is_success.any(dim=1) & ~deciding.isnan().all(dim=1) & ~self.policy.ranks.gather(has_contrast)
        sources = self._choose(groups, is_open)
        self._shares = {name: sources.count(name) / len(sources) for name in self.explorers}
        first = self.policy.ranks.index * len(groups)
        self._groups, self._sources = groups, sources[first : first + len(groups)]
        assigned = []
        for name, explorer in self.explorers.items():
            if name in sources:
                chosen = [group for group, source in zip(groups, self._sources, strict=True) if source == name]
                assigned.append((explorer, chosen))
        return assigned

    def _has_contrast(self, output: RowDict) -> torch.Tensor:
        """Return which groups of this process have contrast in GRPO's rows, `(P,)`."""
        size = self.args.num_generations
        # Rounding leaves tiny advantages in a group of equal rewards, which has no contrast.
        assert self.scorer.rewards_per_func is not None
        equal = self.scorer.equal_reward_rows(self.scorer.rewards_per_func, group_size=size)
        return (has_signal(output["advantages"]) & ~equal).view(-1, size).any(dim=1)

    def _add_plain(self, groups: Sequence[ScoredGroup], has_contrast: torch.Tensor, is_success: torch.Tensor) -> None:
        """Add GRPO's rows to the estimates. `has_contrast`, `(P,)`, is of this process; `is_success`, `(P, G)`, of all
        processes."""
        # A prompt that is nearly always solved has little left to learn, so its contrast counts less.
        failed_share = 1 - self.policy.ranks.local(is_success).double().mean(dim=1)  # (P,)
        contrast = float((has_contrast * failed_share).sum())
        tokens = 0
        for group in groups:
            tokens += sum(sum(trajectory.loss_mask) for trajectory in group.trajectories)
        total = self.policy.ranks.summed({"contrast": contrast, "tokens": tokens})
        self.estimates.add(PLAIN, contrast=total["contrast"], tokens=total["tokens"])

    def _choose(self, groups: Sequence[ScoredGroup], is_open: torch.Tensor) -> list[str]:
        """Return the source that was chosen for each prompt of all processes, `[P]`. `is_open`, `(P,)`, is True for
        prompts that may be explored."""
        random = Random(f"{self.args.seed} {self.num_batches}")  # the same on all processes
        possible = self._possible(groups, is_open)
        places = is_open.nonzero().squeeze(1).tolist()
        drawn = self.estimates.choose([possible[place] for place in places], random=random)
        sources = [PLAIN] * len(possible)
        for place, source in zip(places, drawn, strict=True):
            sources[place] = source
        return sources

    def _possible(self, groups: Sequence[ScoredGroup], is_open: torch.Tensor) -> list[list[str]]:
        """Return the names of the explorers that can explore each prompt of all processes, `[P]`. `is_open`, `(P,)`,
        is True for prompts that may be explored."""
        first = self.policy.ranks.index * len(groups)
        own = []
        for place, group in enumerate(groups, start=first):
            names = []
            if is_open[place]:
                names = [name for name, explorer in self.explorers.items() if explorer.suits(group)]
            own.append(names)
        return self.policy.ranks.objects(own)

    def end_search(self, found: Sequence[Found]) -> None:
        """Update the estimates with the rows of this generation batch, and log them. Every process calls it."""
        names = {id(explorer): name for name, explorer in self.explorers.items()}
        for one in found:
            contrasts, solved = 0.0, 0
            if one.scored is not None:
                contrasts, solved = self._contrasts(one), self._solved(one)
            # Stored completions are not generated, but training them has a cost, too.
            num_trained = sum(map(sum, one.branches.rows.loss_mask))
            total = self.policy.ranks.summed(
                {
                    "contrast": contrasts,
                    "solved": solved,
                    "tokens": max(one.num_tokens, num_trained),
                    "sampled": one.num_tokens,
                    "prompts": one.num_prompts,
                }
            )
            name = names[id(one.explorer)]
            self.estimates.add(name, contrast=total["contrast"], tokens=total["tokens"])
            self.policy.log_metric(f"explore/solved/{name}", total["solved"] / total["prompts"])
            self.policy.log_metric(f"explore/sampled_tokens/{name}", total["sampled"])
        for source in self.estimates.sums:
            rate = self.estimates.rate(source)
            if rate is not None:
                self.policy.log_metric(f"explore/contrast_per_token/{source}", rate)
        for name, share in self._shares.items():
            self.policy.log_metric(f"explore/share/{name}", share)

    def _contrasts(self, one: Found) -> float:
        """Return the number of groups of this process that have contrast, in units of `num_generations` rows."""
        assert one.scored is not None
        signal = has_signal(one.scored.rows["advantages"]) & one.scored.real
        changed = sum(bool(torch.tensor(value).any()) for value in one.branches.main_advantages.values())
        return (int(signal.sum()) + changed) / self.args.num_generations

    def _solved(self, one: Found) -> int:
        """Return the number of explored prompts of this process with a successful row."""
        assert one.scored is not None
        success = succeeded(one.scored.success_rewards, threshold=self.args.success_bar).tolist()
        solved = set()
        for parent, is_success in zip(one.branches.rows.parents, success, strict=True):
            if is_success and parent is not None:
                solved.add(parent // self.args.num_generations)
        return len(solved)

    def columns(self, num_rows: int) -> dict[str, list[Any]]:
        explored_by = [""] * num_rows
        for group, source in zip(self._groups, self._sources, strict=True):
            if source != PLAIN:
                for trajectory in group.trajectories:
                    explored_by[trajectory.main_row] = source
        return {"explored_by": explored_by} if self.explorers else {}

    def end_run(self) -> None:
        estimates = self.estimates
        if self.args.explore != "auto" or not self.explorers or not self.policy.accelerator.is_main_process:
            return
        if not estimates.num_asked:
            warnings.warn(
                "`explore='auto'` had nothing to explore: every prompt was solved, or its completions got different "
                "rewards.",
                stacklevel=2,
            )
        elif estimates.num_worth < WORTH_SHARE * estimates.num_compared:
            warnings.warn(
                f"`explore='auto'` explored almost nothing: for {estimates.num_worth} of {estimates.num_compared} "
                "unsolved prompts an explorer promised more contrast per token than fresh prompts. GRPO suits this "
                "run.",
                stacklevel=2,
            )

    def state_dict(self) -> dict[str, Any]:
        explorers = {name: explorer.state_dict() for name, explorer in self.explorers.items()}
        return {"estimates": self.estimates.state_dict(), "num_batches": self.num_batches, "explorers": explorers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.estimates.load_state_dict(state["estimates"])
        self.num_batches = state["num_batches"]
        for name, explorer in self.explorers.items():
            if name in state["explorers"]:
                explorer.load_state_dict(state["explorers"][name])

    def forget_data(self) -> None:
        for explorer in self.explorers.values():
            explorer.forget_data()

    def explore(self, groups: Sequence[ScoredGroup]) -> Branches:
        raise NotImplementedError("`Branching` calls the explorers of `assign`.")
