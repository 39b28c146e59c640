"""Configuration of BranPO."""

from dataclasses import dataclass
from typing import Any

from trl_explore.branches.choice import DEFINITIONS, GROUPS, SELECTIONS
from trl_explore.names import explain_fields

from .config import ExplorationConfig, one_of, run_checks, within

CHECKS = (
    one_of("branch_selection", SELECTIONS),
    one_of("branch_group", GROUPS),
    one_of("accuracy", DEFINITIONS),
    within("success_threshold", low=0, high=1, words="be in [0, 1], like the rewards"),
)
COUNTS = ("num_branches", "num_branches_solved", "redundancy_tries")
DEPTHS = ("branch_depth", "branch_depth_hard", "branch_depth_solved")


@explain_fields
@dataclass
class BranPOConfig(ExplorationConfig):
    r"""
    Configuration of [`BranPOTrainer`]: every field of [`~trl.GRPOConfig`] and the knobs of BranPO.

    Fields of GRPO keep TRL's defaults. A *turn* is one response of the model together with the answers of the
    tools.

    Args:
        success_threshold (`float`, *optional*, defaults to `0.8`):
            Smallest reward that counts as a success, in [0, 1]. The reward is the total reward, or the reward of
            `success_reward` if that is set.
        num_branches (`int`, *optional*, defaults to `2`):
            Number of continuations at each depth (Eq. 15), at least 0. A larger number finds a different outcome more
            often. The cost is proportional to it.
        num_branches_solved (`int`, *optional*, defaults to `1`):
            Number of continuations at each depth in groups whose accuracy is 1. 0: none.
        branch_depth_hard (`int`, *optional*, defaults to `3`):
            Largest depth of branches from failures of hard groups, at least 1. The depth is the number of responses
            that are sampled again. Hard groups have an accuracy below 0.5 (Eq. 16). With a larger depth, branches
            reach earlier mistakes, but they are longer.
        branch_depth (`int`, *optional*, defaults to `2`):
            Largest depth of branches from failures of other groups, at least 1. It is also the largest depth of
            branches from successes of groups whose accuracy is below 1.
        branch_depth_solved (`int`, *optional*, defaults to `1`):
            Largest depth of branches in groups whose accuracy is 1, at least 1.
        branch_selection (`str`, *optional*, defaults to `"tail"`):
            Starts of branches: `"tail"` or `"random"`. With `"tail"`, branches start before the last responses.
            `"random"` is the control for a comparison: branches start before the same number of responses, chosen at
            random from the whole trajectory, so they are longer. The branches of `redundancy_tries` then start before
            any response except the last. The environments' states are then kept for all turns.
        redundancy_tries (`int`, *optional*, defaults to `5`):
            Number of branches that try to succeed with fewer responses than a long success. They start before the
            penultimate response (section 4.4). A larger number finds a shorter success more often. With 0, redundant
            steps are not masked.
        accuracy (`str`, *optional*, defaults to `"mean"`):
            Accuracy of a group: `"mean"` or `"share"`. `"mean"` is the mean of the initial rewards that decide about
            success, as in the paper. `"share"` is the share of successes, as in the authors' code.
        branch_group (`str`, *optional*, defaults to `"prompt"`):
            Endings that are compared with each other: `"prompt"` or `"trajectory"`. `"prompt"` compares all endings of
            a prompt (Eq. 12), `"trajectory"` the endings of one trajectory (Algorithm 1).
        environment_state (`str`, *optional*, defaults to `"auto"`):
            Way to restore environments: `"auto"`, `"snapshot"`, `"copy"` or `"replay"`. A branch needs the state of an
            earlier turn. `"snapshot"` calls the environment's own `snapshot()` and `restore(state)`. `"copy"` calls
            `copy.deepcopy` after every turn. `"replay"` repeats the tool calls of the earlier turns, and the tools
            must answer them as before. `"auto"` uses the first of these three that is possible. It changes to
            `"replay"` if copies turn out not to be separate. To find out, the trainer repeats some recorded tool calls
            at the start of a run.
        interaction_limits (`list[int]`, *optional*):
            Largest numbers of rounds of tool calls per trajectory, one for each stage of training. Each is at least 1.
            For example `[4, 8]`, as in the paper. None: `max_tool_calling_iterations` at all times.
        interaction_limit_steps (`list[int]`, *optional*):
            Optimizer steps at which the next limit begins, in ascending order, for example `[40]`. One for each of
            `interaction_limits` except the first.
        eval_interaction_limit (`int`, *optional*):
            Largest number of rounds of tool calls in evaluation, at least 1. None: the limit of training at that step.
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
    def explores(self) -> bool:
        return max(self.num_branches, self.num_branches_solved, self.redundancy_tries) > 0

    @property
    def asks_about_success(self) -> bool:
        return True

    def validate(self) -> None:
        super().validate()
        run_checks(self, CHECKS)
        for name in COUNTS:
            _check_integer(name, getattr(self, name), 0)
        for name in DEPTHS:
            _check_integer(name, getattr(self, name), 1)
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
            for i, value in enumerate(getattr(self, name) or []):
                _check_integer(f"{name}[{i}]", value, 1)
        if self.eval_interaction_limit is not None:
            _check_integer("eval_interaction_limit", self.eval_interaction_limit, 1)
        num_steps = max(len(limits or []) - 1, 0)
        if len(steps) != num_steps or steps != sorted(set(steps)):
            raise ValueError(
                f"`interaction_limit_steps={self.interaction_limit_steps}` with `interaction_limits={limits}`: give "
                "one step, in ascending order, for every limit except the first."
            )
        if limits and self.max_tool_calling_iterations is not None:
            raise ValueError(
                f"`interaction_limits={limits}` and `max_tool_calling_iterations={self.max_tool_calling_iterations}` "
                "both limit the rounds of tool calls: set only one of them."
            )

    def interaction_limit(self, step: int) -> int | None:
        """
        Return the largest number of rounds of tool calls of a training trajectory.

        Args:
            step (`int`):
                Number of optimizer steps that were made.

        Returns:
            `int` or `None`: The limit. None if there is no limit.
        """
        if not self.interaction_limits:
            return self.max_tool_calling_iterations
        stage = 0
        for start in self.interaction_limit_steps or []:
            if step >= start:
                stage += 1
        return self.interaction_limits[stage]


def _check_integer(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"`{name}={value!r}` must be an integer of at least {least}.")
