"""Configuration of GiGPO."""

from dataclasses import dataclass

from trl_explore.credit.checks import refuse
from trl_explore.names import explain_fields
from trl_explore.step_groups.advantages import SCALES

from .config import ExplorationConfig, one_of, run_checks, within

STATES = ("shown", "shuffled")
CHECKS = (
    one_of("step_scale", SCALES),
    one_of("step_states", STATES),
    within("step_weight", low=0, words="be at least 0 (only advantages of trajectories, as in GRPO) and finite"),
    within("step_discount", above=0, high=1, words="be in (0, 1]; with 1, shorter trajectories are not preferred"),
    within("state_similarity", above=0, high=1, optional=True, words="be in (0, 1], or None for equal texts only"),
)


@explain_fields
@dataclass
class GiGPOConfig(ExplorationConfig):
    r"""
    Configuration of [`GiGPOTrainer`]: every field of [`~trl.GRPOConfig`] and the knobs of GiGPO.

    Fields of GRPO keep TRL's defaults. A *step* is one response of the model in a trajectory. The *state* of a step is
    the last text that the model saw before it: the prompt, or the last answer of the tools.

    Args:
        step_weight (`float`, *optional*, defaults to `1.0`):
            Weight of a step's advantage (omega in Eq. 8), at least 0. The advantage of its trajectory has weight 1. 0
            is GRPO.
        step_discount (`float`, *optional*, defaults to `0.95`):
            Factor by which the reward decreases with each step before the end (gamma in Eq. 5), in (0, 1]. With a
            higher value, early steps get more of the reward, and shorter trajectories are preferred less. With 1, they
            are not preferred.
        step_scale (`str`, *optional*, defaults to `"group"`):
            Scale of the returns of a state: `"group"` divides them by their deviation, `"none"` does not. The
            advantage of the trajectory follows TRL's `scale_rewards`.
        state_similarity (`float`, *optional*):
            Two states count as one if at least this share of their characters matches, in (0, 1]. With a higher share,
            fewer states are merged. None: only equal states are merged. Set it if observations are rarely the same,
            such as search results. The authors use 0.9.
        step_states (`str`, *optional*, defaults to `"shown"`):
            States of steps: `"shown"` or `"shuffled"`. `"shuffled"` is the control for a comparison: the states of a
            prompt are assigned to its steps at random, so that they carry no information.
    """

    step_weight: float = 1.0
    step_discount: float = 0.95
    step_scale: str = "group"
    state_similarity: float | None = None
    step_states: str = "shown"

    def validate(self) -> None:
        super().validate()
        run_checks(self, CHECKS)
        if self.trained_generations is not None:
            refuse(
                self,
                ["trained_generations"],
                "leaves out trajectories, and GiGPO compares the steps of all trajectories",
            )
