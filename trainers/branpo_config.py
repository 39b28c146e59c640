"""The knobs of BranPO."""

from dataclasses import dataclass, field
from typing import Any

from trl_explore.agents.snapshots import STATES
from trl_explore.branches.choice import DEFINITIONS, GROUPS, SELECTIONS
from trl_explore.names import explain_unknown_fields, unknown_name

from .config import ExplorationConfig

CHOICES = {
    "branch_selection": SELECTIONS,
    "branch_group": GROUPS,
    "accuracy": DEFINITIONS,
    "environment_state": STATES,
}
COUNTS = ("num_branches", "num_branches_solved", "redundancy_tries")
DEPTHS = ("branch_depth", "branch_depth_hard", "branch_depth_solved")


@explain_unknown_fields
@dataclass
class BranPOConfig(ExplorationConfig):
    r"""
    Configuration of [`BranPOTrainer`]: every field of [`~trl.GRPOConfig`] and the knobs of BranPO.

    Fields of GRPO keep TRL's defaults. A *turn* is one response of the model with what the tools answer to it.

    Args:
        success_threshold (`float`, *optional*, defaults to `0.8`):
            Smallest reward (the total, or that of `success_reward`) of a successful trajectory.
        num_branches (`int`, *optional*, defaults to `2`):
            Continuations sampled at each depth (Eq. 15). 0: such trajectories are not branched.
        num_branches_solved (`int`, *optional*, defaults to `1`):
            The same in groups whose accuracy is 1.
        branch_depth_hard (`int`, *optional*, defaults to `3`):
            Responses to go back at most, for failures in groups with an accuracy below 0.5 (Eq. 16).
        branch_depth (`int`, *optional*, defaults to `2`):
            The same for other failures, and for successes in groups with an accuracy below 1.
        branch_depth_solved (`int`, *optional*, defaults to `1`):
            The same in groups whose accuracy is 1.
        branch_selection (`str`, *optional*, defaults to `"tail"`):
            Responses that a trajectory is left before: `"tail"`, the last ones, from the end. The control that a
            comparison needs is `"random"`: as many different ones, drawn from the whole trajectory; a shorter way is
            looked for from any response but the last. States of environments are then kept for all turns.
        redundancy_tries (`int`, *optional*, defaults to `5`):
            Continuations that look for a shorter way from the penultimate response of long successes (section 4.4). 0
            switches redundant step masking off.
        accuracy (`str`, *optional*, defaults to `"mean"`):
            Accuracy of a group: `"mean"` of its initial rewards, those that decide success (the paper), or `"share"`
            of successes (the authors' code).
        branch_group (`str`, *optional*, defaults to `"prompt"`):
            What a suffix is compared with: all suffixes of its `"prompt"` (Eq. 12), or those of its `"trajectory"`
            (Algorithm 1).
        environment_state (`str`, *optional*, defaults to `"auto"`):
            How environments go back to a turn: `"snapshot"` (they define `snapshot()` and `restore(state)`), `"copy"`
            (`copy.deepcopy` after every turn), or `"replay"` (the calls of the prefix are made again and must be
            answered as before). `"auto"` takes the first that is possible, and replays where copies turn out not to be
            separate. Tools are asked again for some recorded calls at a run's start to find out.
        interaction_limits (`list[int]`, *optional*):
            Rounds of tool calls per trajectory, stage by stage, for example `[4, 8]` as in the paper. Defaults to
            `max_tool_calling_iterations` throughout.
        interaction_limit_steps (`list[int]`, *optional*):
            Optimizer steps at which the next of `interaction_limits` takes over, for example `[40]`.
        eval_interaction_limit (`int`, *optional*):
            Rounds of tool calls in evaluation. Defaults to that of training.
    """

    success_threshold: float = field(default=0.8, metadata={"help": "Smallest reward of a success."})
    num_branches: int = field(default=2, metadata={"help": "Continuations sampled at each depth; 0: none."})
    num_branches_solved: int = field(default=1, metadata={"help": "The same in groups that are all solved."})
    branch_depth_hard: int = field(default=3, metadata={"help": "Responses to go back, failures of hard groups."})
    branch_depth: int = field(default=2, metadata={"help": "Responses to go back, other failures and mixed groups."})
    branch_depth_solved: int = field(default=1, metadata={"help": "Responses to go back, groups that are solved."})
    branch_selection: str = field(
        default="tail", metadata={"help": "Responses left: the last ones ('tail'), or the control 'random'."}
    )
    redundancy_tries: int = field(default=5, metadata={"help": "Tries to find a shorter way; 0: none."})
    accuracy: str = field(default="mean", metadata={"help": "'mean' of the initial rewards or 'share' of successes."})
    branch_group: str = field(default="prompt", metadata={"help": "Suffixes compared: 'prompt' or 'trajectory'."})
    environment_state: str = field(default="auto", metadata={"help": "'auto', 'snapshot', 'copy' or 'replay'."})
    interaction_limits: list[int] | None = field(
        default=None, metadata={"help": "Rounds of tool calls per trajectory, stage by stage."}
    )
    interaction_limit_steps: list[int] | None = field(
        default=None, metadata={"help": "Steps at which the next interaction limit takes over."}
    )
    eval_interaction_limit: int | None = field(default=None, metadata={"help": "Rounds of tool calls in evaluation."})

    def validate(self) -> None:
        super().validate()
        for name, choices in CHOICES.items():
            if vars(self)[name] not in choices:
                raise ValueError(f"`{name}`: {unknown_name('value', str(vars(self)[name]), choices)}")
        if not 0 <= self.success_threshold <= 1:
            raise ValueError(f"`success_threshold={self.success_threshold}` must be in [0, 1], as rewards are.")
        for names, least in ((COUNTS, 0), (DEPTHS, 1)):
            for name in names:
                _check_integer(name, vars(self)[name], least)
        for name in ("num_branches", "num_branches_solved"):
            self.check_stage(name, self.rows_per_generation)
        limits, steps = self.interaction_limits, self.interaction_limit_steps or []
        for i, limit in enumerate(limits or []):
            _check_integer(f"interaction_limits[{i}]", limit, 1)
        for i, step in enumerate(steps):
            _check_integer(f"interaction_limit_steps[{i}]", step, 1)
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
        if self.multi_objective_aggregation != "sum_then_normalize":
            raise ValueError(
                f"`multi_objective_aggregation={self.multi_objective_aggregation!r}` is not supported by BranPO, "
                "which compares total rewards: use 'sum_then_normalize'."
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
