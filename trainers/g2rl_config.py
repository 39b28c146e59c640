"""Configuration of G2RL."""

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
            Weight of novelty in the factor of a reward (lambda in Eq. 12), at least 0. With 0, no feature is computed.
        novelty_scores (`str`, *optional*, defaults to `"gradient"`):
            Novelty scores: `"gradient"` (Eq. 11) or `"shuffled"`. `"shuffled"` is the control for a comparison: the
            same scores, permuted at random among the scored completions of a group, so that they carry no information.
        novelty_transform (`str`, *optional*, defaults to `"minmax"`):
            Map from novelty scores to factors of rewards: `"minmax"`, `"centered"` or `"raw"`. `"minmax"` maps the
            scores of a group to [0, 1], so that factors are in [1, 1 + lambda]. `"centered"` maps them to [-1, 1], so
            that factors are in [1 - lambda, 1 + lambda]. `"raw"` does not change them.
        reward_mapping (`str`, *optional*, defaults to `"scaled"`):
            Rewards that are shaped: `"scaled"`, `"binary"` or `"none"`. `"scaled"` maps the smallest reward of a group
            to -1 and the largest to +1, so that graded rewards train, too. Rewards of 0 and 1 are mapped as in the
            paper. `"binary"` maps rewards of at least `success_threshold` to +1 and all others to -1, as in the paper.
            `"none"` does not map rewards. `"scaled"` and `"binary"` map the total reward, or the reward of
            `success_reward`.
        success_threshold (`float`, *optional*, defaults to `1.0`):
            Smallest reward of a correct completion. The reward is the total reward, or the reward of `success_reward`
            if that is set. If all rewards of a group are equal, `"scaled"` maps them to +1 or -1 by this threshold.
        reward_clip (`float`, *optional*, defaults to `3.0`):
            Largest absolute value of a shaped reward, at least 1. The default has no effect if lambda is at most 2.
        min_correct (`int`, *optional*, defaults to `0`):
            Number of correct completions that a group needs for its rewards to be shaped. With 0 (as in the paper),
            only novelty ranks the completions of groups that are all wrong. With 1, the rewards of these groups are
            not changed.
        min_wrong (`int`, *optional*, defaults to `0`):
            Number of wrong completions that a group needs for its rewards to be shaped. With 0 (as in the paper), only
            novelty ranks the completions of groups that are all correct, with the same weight as any other difference.
            With 1, the rewards of these groups are not changed.
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
            refuse(self, ["advantage"], "needs rewards of at least 0, or of 0 and 1, but G2RL's can be negative")
