"""The knobs of GiGPO."""

from dataclasses import dataclass

from trl_explore.credit.checks import refuse
from trl_explore.names import explain_fields
from trl_explore.step_groups.advantages import SCALES

from .config import ExplorationConfig, one_of, run_checks, within

STATES = ("shown", "shuffled")
CHECKS = (
    one_of("step_scale", SCALES),
    one_of("step_states", STATES),
    within("step_weight", low=0, words="be at least 0 (episode advantages alone, as GRPO) and finite"),
    within("step_discount", above=0, high=1, words="be in (0, 1]; 1 does not prefer shorter ways"),
    within("state_similarity", above=0, high=1, optional=True, words="be in (0, 1], or None for equal texts only"),
)


@explain_fields
@dataclass
class GiGPOConfig(ExplorationConfig):
    r"""
    Configuration of [`GiGPOTrainer`]: every field of [`~trl.GRPOConfig`] and the knobs of GiGPO.

    Fields of GRPO keep TRL's defaults. A *step* is one response of the model in a trajectory of several; its *state*
    is what was shown to the model before it: the prompt, or what its tools answered last.

    Args:
        step_weight (`float`, *optional*, defaults to `1.0`):
            Weight of a step's advantage (omega of Eq. 8), at least 0. The advantage of its trajectory has weight 1; 0
            is GRPO.
        step_discount (`float`, *optional*, defaults to `0.95`):
            Factor on the reward per step up to the end (gamma of Eq. 5), above 0 to 1. A higher value gives early
            steps more of the reward, and prefers shorter ways less; 1 does not prefer them.
        step_scale (`str`, *optional*, defaults to `"group"`):
            What returns of a state are divided by: their deviation (`"group"`), or `"none"`. The advantage of the
            trajectory follows TRL's `scale_rewards`.
        state_similarity (`float`, *optional*):
            Share of matching characters from which two states count as one, above 0 to 1. A higher share merges fewer
            states; `None` merges only equal ones. For observations that hardly ever repeat, as search results; the
            authors take 0.9.
        step_states (`str`, *optional*, defaults to `"shown"`):
            States of steps: as they were `"shown"`, or `"shuffled"`. The second is the control for a comparison: the
            states of a prompt are dealt out to its steps at random, so that they say nothing.
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
            refuse(self, ["trained_generations"], "leaves out trajectories, and GiGPO compares the steps of all")
