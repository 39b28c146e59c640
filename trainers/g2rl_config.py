"""The knobs of G2RL, their defaults and what is wrong with a bad one."""

from dataclasses import dataclass

from trl_explore.credit.checks import refuse
from trl_explore.credit.functions import advantage_parts
from trl_explore.gradients.novelty import MAPPINGS, SCORES, TRANSFORMS
from trl_explore.names import explain_fields

from .config import ExplorationConfig, at_least, one_of, run_checks, within

CHECKS = (
    one_of("novelty_scores", SCORES),
    one_of("novelty_transform", TRANSFORMS),
    one_of("reward_mapping", MAPPINGS),
    within("novelty_weight", low=0, words="be at least 0 (no shaping) and finite"),
    within("reward_clip", low=1, words="be at least 1, the size of an unshaped reward, and finite"),
    within("success_threshold"),
    at_least(0, "min_correct", "min_wrong"),
)


@explain_fields
@dataclass
class G2RLConfig(ExplorationConfig):
    r"""
    Configuration of [`G2RLTrainer`]: every field of [`~trl.GRPOConfig`] and the knobs of G2RL.

    Fields of GRPO keep TRL's defaults.

    Args:
        novelty_weight (`float`, *optional*, defaults to `1.0`):
            How strongly novelty scales a reward (lambda of Eq. 12), at least 0. With 0 no feature is computed.
        novelty_scores (`str`, *optional*, defaults to `"gradient"`):
            Novelty scores: `"gradient"` (Eq. 11) or `"shuffled"`. The second is the control for a comparison: the same
            scores, permuted at random among the scored completions of a group, so that they say nothing.
        novelty_transform (`str`, *optional*, defaults to `"minmax"`):
            How scores become factors of rewards: `"minmax"`, `"centered"` or `"raw"`. `"minmax"` maps the scores of a
            group to [0, 1], so that factors are in [1, 1 + lambda]; `"centered"` maps them to [-1, 1], with factors in
            [1 - lambda, 1 + lambda]; `"raw"` keeps them.
        reward_mapping (`str`, *optional*, defaults to `"scaled"`):
            Which rewards are shaped: `"scaled"`, `"binary"` or `"none"`. `"scaled"` maps the smallest reward of a
            group to -1 and the largest to +1, so that graded rewards train too; rewards of 0 and 1 are mapped as in
            the paper. `"binary"` maps rewards of at least `success_threshold` to +1 and others to -1, as in the paper.
            `"none"` shapes rewards as they are. The first two map the total, or the reward of `success_reward`.
        success_threshold (`float`, *optional*, defaults to `1.0`):
            Smallest reward of a correct completion: the total, or that of `success_reward`. If the rewards of a group
            are all equal, `"scaled"` maps them by it.
        reward_clip (`float`, *optional*, defaults to `3.0`):
            Largest absolute value of a shaped reward, at least 1. No effect while lambda is at most 2.
        min_correct (`int`, *optional*, defaults to `0`):
            Groups with fewer correct completions keep their rewards. With 0 (the paper's), novelty alone ranks the
            completions of groups that are all wrong; 1 leaves these groups alone.
        min_wrong (`int`, *optional*, defaults to `0`):
            Groups with fewer wrong completions keep their rewards. With 0 (the paper's), novelty alone ranks the
            completions of groups that are all correct, with the weight of any other difference; 1 leaves these groups
            alone.
    """

    novelty_weight: float = 1.0
    novelty_scores: str = "gradient"
    novelty_transform: str = "minmax"
    reward_mapping: str = "scaled"
    success_threshold: float = 1.0
    reward_clip: float = 3.0
    min_correct: int = 0
    min_wrong: int = 0

    @property
    def asks_about_success(self) -> bool:
        return super().asks_about_success or self.novelty_weight > 0 or self.reward_mapping != "none"

    def validate(self) -> None:
        super().validate()
        run_checks(self, CHECKS)
        if any(part.name in ("maxrl", "passk", "reinforce") for part in advantage_parts(self)):
            refuse(self, ["advantage"], "needs rewards of at least 0, or of 0 and 1, and G2RL's have signs and sizes")
