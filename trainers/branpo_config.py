"""The knobs of BranPO."""

from dataclasses import dataclass
from typing import Any

from trl_explore.agents.snapshots import STATES
from trl_explore.branches.choice import DEFINITIONS, GROUPS, SELECTIONS
from trl_explore.names import explain_fields

from .config import ExplorationConfig, one_of, run_checks, within

CHECKS = (
    one_of("branch_selection", SELECTIONS),
    one_of("branch_group", GROUPS),
    one_of("accuracy", DEFINITIONS),
    one_of("environment_state", STATES),
    within("success_threshold", low=0, high=1, words="be in [0, 1], as rewards are"),
)
COUNTS = ("num_branches", "num_branches_solved", "redundancy_tries")
DEPTHS = ("branch_depth", "branch_depth_hard", "branch_depth_solved")


@explain_fields
@dataclass
class BranPOConfig(ExplorationConfig):
    r"""
    Configuration of [`BranPOTrainer`]: every field of [`~trl.GRPOConfig`] and the knobs of BranPO.

    Fields of GRPO keep TRL's defaults. A *turn* is one response of the model with what the tools answer to it.

    Args:
        success_threshold (`float`, *optional*, defaults to `0.8`):
            Smallest reward of a success, in [0, 1]: the total, or that of `success_reward`.
        num_branches (`int`, *optional*, defaults to `2`):
            Continuations sampled at each depth (Eq. 15), at least 0. More of them find a different outcome more often;
            the cost grows in proportion.
        num_branches_solved (`int`, *optional*, defaults to `1`):
            Continuations sampled at each depth in groups whose accuracy is 1; 0: none.
        branch_depth_hard (`int`, *optional*, defaults to `3`):
            Responses to go back at most, for failures of hard groups, at least 1. Hard groups have an accuracy below
            0.5 (Eq. 16). Larger values reach earlier mistakes, by longer branches.
        branch_depth (`int`, *optional*, defaults to `2`):
            Responses to go back at most, for failures of other groups, at least 1. It is also the depth for successes
            of groups with an accuracy below 1.
        branch_depth_solved (`int`, *optional*, defaults to `1`):
            Responses to go back at most, in groups whose accuracy is 1, at least 1.
        branch_selection (`str`, *optional*, defaults to `"tail"`):
            Branches start before the last responses (`"tail"`), or anywhere (`"random"`). The second is the control
            for a comparison: as many different responses, drawn from the whole trajectory, so that branches are
            longer; a shorter success is then looked for from any response but the last, and environments' states are
            kept for all turns.
        redundancy_tries (`int`, *optional*, defaults to `5`):
            Branches that look for a shorter way than a long success took; 0: none. They start before the penultimate
            response (section 4.4). More of them find a shorter way more often; with 0, redundant steps are not masked.
        accuracy (`str`, *optional*, defaults to `"mean"`):
            Accuracy of a group: the `"mean"` reward, or the `"share"` of successes. The mean (the paper's) is of the
            initial rewards that decide success; the share is what the authors' code takes.
        branch_group (`str`, *optional*, defaults to `"prompt"`):
            What a suffix is compared with: those of its `"prompt"` or its `"trajectory"`. The first is Eq. 12, the
            second Algorithm 1.
        environment_state (`str`, *optional*, defaults to `"auto"`):
            How environments return to a turn: `"auto"`, `"snapshot"`, `"copy"` or `"replay"`. `"snapshot"` uses the
            environment's own `snapshot()` and `restore(state)`, `"copy"` calls `copy.deepcopy` after every turn,
            `"replay"` makes the calls of the prefix again, which must be answered as before. `"auto"` takes the first
            that is possible, and changes to replays where copies turn out not to be separate.
            To find out, tools are asked again for some recorded calls at a run's start.
        interaction_limits (`list[int]`, *optional*):
            Rounds of tool calls per trajectory, one number per stage, each at least 1. For example `[4, 8]`, as in the
            paper. `None` is `max_tool_calling_iterations` throughout.
        interaction_limit_steps (`list[int]`, *optional*):
            Optimizer steps at which the next limit begins, ascending, for example `[40]`. One for each of
            `interaction_limits` but the first.
        eval_interaction_limit (`int`, *optional*):
            Rounds of tool calls in evaluation, at least 1. `None` is the limit of training at that step.
    """

    success_threshold: float = 0.8
    num_branches: int = 2
    num_branches_solved: int = 1
    branch_depth_hard: int = 3
    branch_depth: int = 2
    branch_depth_solved: int = 1
    branch_selection: str = "tail"
    redundancy_tries: int = 5
    accuracy: str = "mean"
    branch_group: str = "prompt"
    environment_state: str = "auto"
    interaction_limits: list[int] | None = None
    interaction_limit_steps: list[int] | None = None
    eval_interaction_limit: int | None = None

    @property
    def asks_about_success(self) -> bool:
        return True

    def validate(self) -> None:
        super().validate()
        run_checks(self, CHECKS)
        for names, least in ((COUNTS, 0), (DEPTHS, 1)):
            for name in names:
                _check_integer(name, vars(self)[name], least)
        for name in ("num_branches", "num_branches_solved"):
            self.check_stage(name, self.rows_per_generation)
        self._check_limits()
        if self.multi_objective_aggregation != "sum_then_normalize":
            raise ValueError(
                f"`multi_objective_aggregation={self.multi_objective_aggregation!r}` is not supported by BranPO, "
                "which compares total rewards: use 'sum_then_normalize'."
            )

    def _check_limits(self) -> None:
        limits, steps = self.interaction_limits, self.interaction_limit_steps or []
        for name in ("interaction_limits", "interaction_limit_steps"):
            for i, value in enumerate(vars(self)[name] or []):
                _check_integer(f"{name}[{i}]", value, 1)
        if self.eval_interaction_limit is not None:
            _check_integer("eval_interaction_limit", self.eval_interaction_limit, 1)
        if len(steps) != max(len(limits or []) - 1, 0) or sorted(set(steps)) != steps:
            raise ValueError(
                f"`interaction_limit_steps={self.interaction_limit_steps}` with `interaction_limits={limits}`: give "
                "one step, in ascending order, for every limit but the first."
            )
        if limits and self.max_tool_calling_iterations is not None:
            raise ValueError(
                f"`interaction_limits={limits}` and `max_tool_calling_iterations={self.max_tool_calling_iterations}` "
                "say the same: set only one of them."
            )

    def interaction_limit(self, step: int) -> int | None:
        """
        Rounds of tool calls that a training trajectory may have.

        Args:
            step (`int`):
                Optimizer steps done.

        Returns:
            `int` or `None`: The limit; `None` where there is none.
        """
        if not self.interaction_limits:
            return self.max_tool_calling_iterations
        return self.interaction_limits[sum(step >= start for start in self.interaction_limit_steps or [])]


def _check_integer(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"`{name}={value!r}` must be an integer of at least {least}.")
