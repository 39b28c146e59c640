"""The branch explorer of `explore="auto"`: it chooses an explorer, or none, for each unsolved prompt."""

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from random import Random
from typing import TYPE_CHECKING, Any

import torch

from trl_explore.auto.estimates import PLAIN, Estimates
from trl_explore.auto.explorer_table import EXPLORER_TABLE
from trl_explore.credit.normalised import equal_groups
from trl_explore.explorers.branch_explorer import BranchExplorer, ScoredGroup, SearchResult
from trl_explore.forks.engine import Forks
from trl_explore.rewards.success import succeeded
from trl_explore.rows.advantages import has_signal, is_credit
from trl_explore.rows.policy import Policy
from trl_explore.rows.scorer import Scorer
from trl_explore.rows.streams import RowDict

if TYPE_CHECKING:
    from trl_explore.trainers.explorer_options import OwnOptions

# The loss of an explorer that gets at least this share of the batch's prompts has the same weight as the main loss.
FULL_WEIGHT_SHARE = 0.25
# Thompson sampling compares the explorers with fresh prompts for each unsolved prompt. If it chose an explorer for a
# smaller share of these prompts, exploring did not pay, so warn at the end of the run. Prompts that got a random
# explorer (`explore_min_share`) do not count.
MIN_PREFERRED_SHARE = 0.05


class AutoExplorer(BranchExplorer):
    """
    Chooses an explorer, or none, for each unsolved prompt, by contrast per generated token.

    A group of rows has contrast if its rewards differ. GRPO learns only from groups with contrast. The choice compares
    the explorers with fresh prompts (see [`~trl_explore.auto.estimates.Estimates`]). Every generation batch updates
    the estimates, so the choice changes as the policy learns.

    With `explore="hints"` and `explore="replay"`, there is one explorer, and it gets every unsolved prompt that it can
    explore.

    Args:
        policy ([`~trl_explore.rows.policy.Policy`]):
            The trainer.
        forks ([`~trl_explore.forks.engine.Forks`]):
            Samples branches for all explorers.
        scorer ([`~trl_explore.rows.scorer.Scorer`]):
            Calls the reward functions.
        options (`dict[str, OwnOptions]`):
            Configurations of the explorers, by name.
    """

    name = "auto"

    def __init__(self, policy: Policy, forks: Forks, scorer: Scorer, *, options: "Mapping[str, OwnOptions]") -> None:
        super().__init__(policy, forks, scorer)
        self.options = options
        self.explorers: dict[str, BranchExplorer] = {}
        for name, own_options in options.items():
            explorer = EXPLORER_TABLE[name].make(policy, forks, scorer, args=own_options.args)
            explorer.stream = f"explored_{name}"
            self.explorers[name] = explorer
        self.estimates = Estimates([*options], discount=1.0, min_share=0.0)  # the next line sets the real values
        self._follow_arguments()
        self.num_batches = 0
        # State of the newest generation batch: sums over its rounds and over all processes.
        self._num_prompts = 0  # without fillers
        self._num_chosen: Counter[str] = Counter()  # prompts for which each source was chosen
        self._shares: dict[str, float] = {}  # share of the prompts that each explorer got
        self._totals: dict[str, dict[str, float]] = {}  # of each source: contrast, tokens and so on
        # State of the newest round.
        self._groups: Sequence[ScoredGroup] = ()  # all groups of this process
        self._sources: list[str] = []  # the source that was chosen for each of these groups

    @property
    def is_active(self) -> bool:
        return bool(self.explorers)

    @property
    def credits_main_rows(self) -> bool:  # type: ignore[override]
        return any(explorer.credits_main_rows for explorer in self.explorers.values())

    def begin_batch(self) -> None:
        self._num_prompts, self._num_chosen, self._totals = 0, Counter(), {}
        self._follow_arguments()
        self.estimates.begin_batch()
        for explorer in self.explorers.values():
            explorer.begin_batch()

    def _follow_arguments(self) -> None:
        """Give the estimates the fields of the trainer, which callbacks may change during training."""
        args, estimates = self.args, self.estimates
        estimates.discount, estimates.max_cost = args.explore_discount, args.explore_max_cost
        # `explore="hints"` and `"replay"` have a single explorer, which is always used.
        estimates.min_share = args.explore_min_share if args.explore == "auto" else 1.0
        if estimates.min_share == 1:
            estimates.max_cost = None  # every unsolved prompt is explored, whatever it costs

    def assign(self, groups: Sequence[ScoredGroup], output: RowDict) -> list[tuple[BranchExplorer, list[ScoredGroup]]]:
        """
        Choose an explorer, or none, for each group.

        Args:
            groups (`Sequence[ScoredGroup]`):
                All groups of this process.
            output (`dict`):
                The main rows of this process as TRL scored them: P prompts with G = `num_generations` rows each.

        Returns:
            `list[tuple]`: Each explorer that was chosen on any process, with its groups on this process. The list of
            groups is empty if the explorer was chosen on other processes only.
        """
        self.num_batches += 1
        for options in self.options.values():
            options.follow(self.args)  # callbacks may have changed the trainer's configuration
        for explorer in self.explorers.values():
            explorer.observe(groups)
        has_contrast = self._has_contrast(output)
        # N is the number of prompts of all processes, P the number of prompts of this process.
        deciding = self.scorer.success().view(-1, self.args.num_generations)  # (N, G)
        is_success = succeeded(deciding, threshold=self.args.resolved_success_threshold)
        own_fillers = torch.tensor([group.is_filler for group in groups], device=has_contrast.device)  # (P,)
        self._add_plain(groups, has_contrast & ~own_fillers, is_success)
        is_filler = self.policy.ranks.gather(own_fillers)  # (N,)
        is_scored = ~deciding.isnan().all(dim=1)
        is_unsolved = ~is_success.any(dim=1) & is_scored & ~self.policy.ranks.gather(has_contrast) & ~is_filler
        sources = self._choose(groups, is_unsolved)
        self._num_prompts += int((~is_filler).sum())
        self._num_chosen.update(sources)
        self._shares = {name: self._num_chosen[name] / self._num_prompts for name in self.explorers}
        first = self.policy.ranks.index * len(groups)
        self._groups, self._sources = groups, sources[first : first + len(groups)]
        assigned = []
        for name, explorer in self.explorers.items():
            if name in sources:
                chosen = [group for group, source in zip(groups, self._sources, strict=True) if source == name]
                assigned.append((explorer, chosen))
        return assigned

    def _has_contrast(self, output: RowDict) -> torch.Tensor:
        """Return the mask `(P,)` of the groups of this process that have contrast. If `success_reward` names a reward
        function, only its rewards count: a format reward can differ in a group that fails altogether."""
        size = self.args.num_generations
        signal = _trained_signal(output)
        if self.args.success_reward is not None:
            deciding = self.policy.ranks.local(self.scorer.success()).view(-1, size)
            return signal.view(-1, size).any(dim=1) & ~equal_groups(deciding)[:, 0]
        # Rounding can leave tiny advantages in a group of equal rewards. Without this mask, such a group would count
        # as a group with contrast.
        assert self.scorer.rewards_per_func is not None
        equal = self.scorer.equal_reward_rows(self.scorer.rewards_per_func, group_size=size)
        return (signal & ~equal).view(-1, size).any(dim=1)

    def _add_plain(self, groups: Sequence[ScoredGroup], has_contrast: torch.Tensor, is_success: torch.Tensor) -> None:
        """
        Add GRPO's rows to the estimate of fresh prompts. Fillers do not count: they repeat earlier prompts of the
        batch, often prompts with contrast, so they would raise the estimate.

        Args:
            groups (`Sequence[ScoredGroup]`):
                All groups of this process.
            has_contrast (`torch.Tensor`):
                Mask of the groups of this process that have contrast, without fillers, `(P,)`.
            is_success (`torch.Tensor`):
                Mask of the successful rows of all processes, `(N, G)`.
        """
        # A prompt that is nearly always solved has little left to learn, so its contrast counts less.
        own_success = self.policy.ranks.local(is_success).cpu()  # on the CPU, because MPS devices have no float64
        failed_share = 1 - own_success.double().mean(dim=1)  # (P,)
        contrast = float((has_contrast.cpu() * failed_share).sum())
        prompts, tokens = 0, 0
        for group in groups:
            if not group.is_filler:
                prompts += 1
                tokens += sum(sum(trajectory.loss_mask) for trajectory in group.trajectories)
        self._add(PLAIN, {"contrast": contrast, "tokens": tokens, "prompts": prompts})
        of_all = self.policy.ranks.summed({"with_contrast": float(has_contrast.sum())})
        self.estimates.fresh_with_contrast += of_all["with_contrast"]

    def _add(self, source: str, own: dict[str, float]) -> None:
        """Add numbers about a source's rows of a round, on this process, to the totals of the batch. Also add its
        contrast, tokens and prompts to the estimates. Every process must call it."""
        total = self.policy.ranks.summed(own)
        self.estimates.add(source, contrast=total["contrast"], tokens=total["tokens"], prompts=total["prompts"])
        of_batch = self._totals.setdefault(source, dict.fromkeys(total, 0.0))
        for key, value in total.items():
            of_batch[key] += value

    def _choose(self, groups: Sequence[ScoredGroup], is_unsolved: torch.Tensor) -> list[str]:
        """Choose a source for each of the N prompts of all processes. `is_unsolved`, `(N,)`, is True for prompts that
        may be explored."""
        # All processes use the same seed and the same inputs, so they choose the same sources.
        random = Random(f"{self.args.seed} {self.num_batches}")
        possible = self._possible(groups, is_unsolved)
        places = is_unsolved.nonzero().squeeze(1).tolist()
        chosen = self.estimates.choose([possible[place] for place in places], random=random)
        sources = [PLAIN] * len(possible)
        for place, source in zip(places, chosen, strict=True):
            sources[place] = source
        return sources

    def _possible(self, groups: Sequence[ScoredGroup], is_unsolved: torch.Tensor) -> list[list[str]]:
        """Return the names of the explorers that can explore each of the N prompts of all processes. The list is empty
        for prompts that may not be explored."""
        first = self.policy.ranks.index * len(groups)
        of_this_process = []
        for place, group in enumerate(groups, start=first):
            names = []
            if is_unsolved[place]:
                names = [name for name, explorer in self.explorers.items() if explorer.suits(group)]
            of_this_process.append(names)
        return self.policy.ranks.objects(of_this_process)

    def weight_of(self, explorer: BranchExplorer) -> float | None:
        """Return the weight of an explorer's rows. Without the share, the few rows of a single explored prompt would
        weigh as much as the whole batch."""
        if explorer.weight is None:
            return None
        share = self._shares[self._name_of(explorer)]
        return explorer.weight * min(1.0, share / FULL_WEIGHT_SHARE)

    def _name_of(self, explorer: BranchExplorer) -> str:
        """Return the name under which the configuration lists one of the explorers."""
        return next(name for name, candidate in self.explorers.items() if candidate is explorer)

    def end_search(self, results: Sequence[SearchResult]) -> None:
        """Add the explorers' rows of this round to the estimates. Every process calls it."""
        for result in results:
            contrasts, solved = 0.0, 0
            if result.scored is not None:
                contrasts, solved = self._contrasts(result), self._solved(result)
            # `replay` generates nothing, but training its rows has a cost. Without this, its estimate would have no
            # tokens.
            num_trained = sum(map(sum, result.branches.rows.loss_mask))
            self._add(
                self._name_of(result.explorer),
                {
                    "contrast": contrasts,
                    "solved": solved,
                    "tokens": max(result.num_tokens, num_trained),
                    "sampled": result.num_tokens,
                    "prompts": result.num_prompts,
                },
            )

    def end_batch(self) -> None:
        """Log the metrics of all rounds of this generation batch, and the estimates."""
        for explorer in self.explorers.values():
            explorer.end_batch()
        for name, total in self._totals.items():
            if name != PLAIN:
                self.policy.log_metric(f"explore/solved/{name}", total["solved"] / total["prompts"])
                self.policy.log_metric(f"explore/sampled_tokens/{name}", total["sampled"])
        for source in self.estimates.sums:
            rate = self.estimates.rate(source)
            if rate is not None:
                self.policy.log_metric(f"explore/contrast_per_token/{source}", rate)
        if self.estimates.max_cost is not None:
            for name, credit in self.estimates.credit.items():
                self.policy.log_metric(f"explore/credit/{name}", credit)
        for name, share in self._shares.items():
            self.policy.log_metric(f"explore/share/{name}", share)

    def _contrasts(self, result: SearchResult) -> float:
        """Return the number of trained rows of this process to which the explorer gave an advantage other than 0,
        divided by `num_generations`. GRPO's rows count if the explorer replaced their advantage by a value other than
        0."""
        assert result.scored is not None
        signal = _trained_signal(result.scored.rows)[result.scored.real]
        size = result.branches.rows.group_size
        if self.args.success_reward is not None and size > 1:  # rows of a group are compared with each other
            signal = signal & ~equal_groups(result.scored.success_rewards.view(-1, size)).flatten()
        trained_rows = set()
        for group in self._groups:
            for trajectory, is_trained in zip(group.trajectories, group.is_trained, strict=True):
                if is_trained:
                    trained_rows.add(trajectory.main_row)
        num_changed = 0
        for row, value in result.branches.main_advantages.items():
            if row in trained_rows and is_credit(value):
                num_changed += 1
        return (int(signal.sum()) + num_changed) / self.args.num_generations

    def _solved(self, result: SearchResult) -> int:
        """Return the number of explored prompts of this process for which a row of the explorer succeeded."""
        assert result.scored is not None
        success = succeeded(result.scored.success_rewards, threshold=self.args.resolved_success_threshold).tolist()
        solved = set()
        for parent, is_success in zip(result.branches.rows.parents, success, strict=True):
            if is_success and parent is not None:
                solved.add(parent // self.args.num_generations)  # index of the prompt on this process
        return len(solved)

    def columns(self, num_rows: int) -> dict[str, list[Any]]:
        if not self.explorers:
            return {}
        explored_by = [""] * num_rows
        for group, source in zip(self._groups, self._sources, strict=True):
            if source != PLAIN:
                for trajectory in group.trajectories:
                    explored_by[trajectory.main_row] = source
        return {"explored_by": explored_by}

    def end_run(self) -> None:
        estimates = self.estimates
        if self.args.explore != "auto" or not self.explorers or not self.policy.accelerator.is_main_process:
            return
        if not estimates.num_unsolved:
            warnings.warn(
                "`explore='auto'` had nothing to explore: every prompt was solved, or its completions got different "
                "rewards.",
                stacklevel=2,
            )
        elif estimates.num_preferred < MIN_PREFERRED_SHARE * estimates.num_compared:
            warnings.warn(
                f"`explore='auto'` explored almost nothing: it compared explorers with fresh prompts for "
                f"{estimates.num_compared} unsolved prompts, and chose an explorer for {estimates.num_preferred} of "
                f"them. GRPO is enough for this run.",
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


def _trained_signal(rows: RowDict) -> torch.Tensor:
    """Return the mask `(R,)` of the rows that have an advantage other than 0 and that TRL does not mask as a whole."""
    return has_signal(rows["advantages"]) & rows["completion_mask"].any(dim=1)
