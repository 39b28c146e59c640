"""The interface of a branch explorer, and the objects that it receives and returns.

A branch explorer starts from the completions that GRPO sampled and scored. It adds rows to the training rows, and may
change the credit of GRPO's rows. It also works for agents. An [`~trl_explore.explorers.explorer.Explorer`] replaces
GRPO's rows instead.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from trl.trainer.utils import nanstd

from trl_explore.explorers.explorer import PlainSampling
from trl_explore.forks.engine import Forks
from trl_explore.forks.trajectories import Branch, Trajectory
from trl_explore.rows.policy import Policy
from trl_explore.rows.rollouts import Rollout, Rows
from trl_explore.rows.scorer import ScoredRows, Scorer
from trl_explore.rows.streams import RowDict

if TYPE_CHECKING:
    from trl_explore.trainers.config import ExplorationConfig


@dataclass(frozen=True)
class ScoredGroup:
    """
    A prompt of the generation batch, with the G completions that GRPO sampled.

    G is `num_generations`. If the trainer sets `splits_groups`, a group may be cut at the boundary of a process, and
    this is the part of this process.
    """

    trajectories: Sequence[Trajectory]  # `[G]`
    rewards: Sequence[float]  # total raw rewards, `[G]`; NaN if a completion was not scored
    deciding: Sequence[float]  # rewards that decide about success, `[G]`; NaN if a completion was not scored
    failed: Sequence[bool]  # True if the completion was scored and is no success, `[G]`
    is_trained: Sequence[bool]  # False if TRL masks the whole completion, `[G]`
    # True if the main rows of this group are dropped. With `dynamic_sampling="refill"`, a process samples such a group
    # if another process needs more prompts in the round.
    is_filler: bool = False

    @property
    def first_row(self) -> int:
        """Return the index of the group's first main row on this process."""
        return self.trajectories[0].main_row


@dataclass
class Branches:
    """R rows that a branch explorer adds to the training rows of a generation batch."""

    rows: Rows
    # Advantages of the rows, one number or a list `[T_i]` for each, `[R]`. None: GRPO's, over `rows.group_size` rows.
    advantages: Sequence[float | list[float]] | None = None
    # Advantages of the main rows whose credit changes, one number or a list `[T_i]` for each. The keys are the indices
    # of main rows on this process (`Trajectory.main_row`).
    main_advantages: Mapping[int, float | list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class SearchResult:
    """Rows that one explorer added to the generation batch of this process, and their cost."""

    explorer: "BranchExplorer"
    branches: Branches
    scored: ScoredRows | None  # the rows as TRL scored them; None if no process has rows
    num_prompts: int  # number of explored prompts
    num_tokens: int  # number of generated tokens, including discarded completions


class BranchExplorer:
    """
    Base class of explorers that continue GRPO's completions after these are scored.

    Every process calls each method the same number of times, even if it has no prompt to explore.

    Args:
        policy ([`~trl_explore.rows.policy.Policy`]):
            The trainer. `policy.args` is its configuration, and `policy.log_metric(name, value)` logs a metric.
        forks ([`~trl_explore.forks.engine.Forks`]):
            Samples branches, scores them and makes rows of them.
        scorer ([`~trl_explore.rows.scorer.Scorer`]):
            Asks the reward functions, and computes total rewards.
        args ([`~trl_explore.trainers.ExplorationConfig`], *optional*):
            The explorer's configuration. By default, the trainer's. With `explore="auto"`, each explorer has its own.
    """

    name = ""  # for error messages
    stream = "branch"  # name of the added rows in metrics and in the completions table
    # True if `explore` may return `main_advantages`. Then, `trained_generations` is refused.
    credits_main_rows = False
    args: "ExplorationConfig"  # the configuration; a subclass may narrow the type

    def __init__(
        self, policy: Policy, forks: Forks, scorer: Scorer, *, args: "ExplorationConfig | None" = None
    ) -> None:
        self.policy, self.forks, self.scorer = policy, forks, scorer
        self.args = args or policy.args

    @property
    def weight(self) -> float | None:
        """
        Return the factor of the mean loss of the added rows, or None for one mean over added rows and main rows.

        If the factor is 0, the added rows are not trained. Return None if added rows and main rows are credited
        together, for example as leaves of one tree.
        """
        return 1.0

    @property
    def is_active(self) -> bool:
        """Return False if the configuration switches the explorer off, so that the trainer is plain GRPO."""
        return True

    @property
    def needs_logprobs(self) -> bool:
        """Return True if the explorer reads `Trajectory.logprobs` of completions of one turn even without vLLM."""
        return False

    @property
    def samples_with_main(self) -> bool:
        """Return True if the explorer samples in [`rollout`], in one call with the main rows."""
        return False

    def rollout(self, prompt_ids: list[list[int]], plain: PlainSampling) -> Rollout:
        """Sample the main rows, and further completions in the same call. See [`samples_with_main`]."""
        return plain(prompt_ids)

    def begin_batch(self) -> None:
        """Called before the first round of sampling of a generation batch. The other methods are called in each round.
        A batch has one round, or several with `dynamic_sampling="refill"`."""

    def end_batch(self) -> None:
        """Called after the last round of sampling of a generation batch, for example to log metrics of all rounds."""

    def observe(self, groups: Sequence[ScoredGroup]) -> None:
        """Receive all groups of this process, solved or not, before the prompts to explore are chosen. If `explore` is
        `"auto"`, `"hints"` or `"replay"`, every process calls it once per generation batch."""

    def suits(self, group: ScoredGroup) -> bool:
        """Return whether the explorer can explore an unsolved group. Called if `explore` is `"auto"`, `"hints"` or
        `"replay"`."""
        return True

    def assign(
        self, groups: Sequence[ScoredGroup], output: RowDict
    ) -> Sequence[tuple["BranchExplorer", Sequence[ScoredGroup]]]:
        """
        Return the explorers that explore in this generation batch, each with its groups. By default, this explorer
        gets all groups except fillers. All processes must return the same explorers, but the groups of an explorer
        may be empty.

        Args:
            groups (`Sequence[ScoredGroup]`):
                This process's prompts to explore; may be empty. [`AutoExplorer`] gets all prompts of this process.
            output (`dict`):
                The main rows of this process as TRL scored them.
        """
        # A filler repeats a prompt of the batch, and its main rows are dropped. So its branches must not be trained.
        return [(self, [group for group in groups if not group.is_filler])]

    def weight_of(self, explorer: "BranchExplorer") -> float | None:
        """Return the weight of the rows of an explorer of `assign` in this generation batch. See [`weight`]. If the
        batch has several rounds, the value after `end_batch` counts."""
        return explorer.weight

    def explore(self, groups: Sequence[ScoredGroup]) -> Branches:
        """
        Sample branches.

        Args:
            groups (`Sequence[ScoredGroup]`):
                This process's prompts to explore; may be empty.

        Returns:
            [`Branches`]: Rows to add, in any order.
        """
        raise NotImplementedError

    def total_reward(self, branch: Branch) -> float:
        """Return the total reward of a branch. `forks.judge` must have set its rewards before."""
        return self.scorer.totals(torch.tensor([branch.rewards])).item()

    def batch_deviation(self, branches: Iterable[Branch]) -> float:
        """
        Return the divisor of the advantages for `scale_rewards="batch"`: the standard deviation of the total rewards
        of main rows and branches, plus 1e-4. Every process must call this method with its own branches.

        TRL has only the main rows. If these all failed, their deviation is 0, and the advantage of a successful branch
        would be thousands.
        """
        main_rewards = self.scorer.totals()
        branch_rewards = self.policy.ranks.objects([self.total_reward(branch) for branch in branches])
        deviation = nanstd(torch.cat([main_rewards, main_rewards.new_tensor(branch_rewards)])).item()
        if math.isnan(deviation):  # a single reward
            deviation = 0.0
        return deviation + 1e-4

    def after_scoring(self, branches: Branches, scored: ScoredRows | None) -> None:
        """Learn from the rows that `explore` returned, or log metrics of them. `scored` holds these rows as TRL scored
        them; None if no process has rows."""

    def end_search(self, results: Sequence[SearchResult]) -> None:
        """Update this explorer's state from the rows of all explorers that `assign` returned."""

    def end_run(self) -> None:
        """Called when training ends, for example to warn about the whole run."""

    def columns(self, num_rows: int) -> dict[str, list[Any]]:
        """Return columns of the completions table, for all main rows of this process, `[B]`."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the explorer's state for the checkpoint: tensors, numbers, strings, and containers of these."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""

    def forget_data(self) -> None:
        """Drop all state about prompts. Called after a user replaced `train_dataset`."""
