"""The knobs of G2RL, their defaults and what is wrong with a bad one."""

import math
from dataclasses import dataclass, field

from trl_explore.gradients.novelty import MAPPINGS, SCORES, TRANSFORMS
from trl_explore.names import explain_unknown_fields, unknown_name

from .config import ExplorationConfig


@explain_unknown_fields
@dataclass
class G2RLConfig(ExplorationConfig):
    r"""
    Configuration of [`G2RLTrainer`]: every field of [`~trl.GRPOConfig`] and the knobs of G2RL.

    Fields of GRPO keep TRL's defaults.

    Args:
        novelty_weight (`float`, *optional*, defaults to `1.0`):
            Lambda of Eq. 12, at least 0: how strongly novelty scales a reward. With 0 no feature is computed.
        novelty_scores (`str`, *optional*, defaults to `"gradient"`):
            `"gradient"` is Eq. 11. The control that a comparison needs is `"shuffled"`: the same scores, permuted at
            random among the scored completions of a group, so that they say nothing.
        novelty_transform (`str`, *optional*, defaults to `"minmax"`):
            How scores become factors: `"minmax"` maps those of a group to [0, 1], `"centered"` to [-1, 1], `"raw"`
            keeps them.
        reward_mapping (`str`, *optional*, defaults to `"binary"`):
            `"binary"` maps rewards to +1 (at least `success_threshold`) and -1, as in the paper; `"none"` shapes
            them as they are.
        success_threshold (`float`, *optional*, defaults to `1.0`):
            Smallest reward (the total, or that of `success_reward`) of a correct completion.
        reward_clip (`float`, *optional*, defaults to `3.0`):
            Largest absolute shaped reward, at least 1.
        min_correct (`int`, *optional*, defaults to `0`):
            Groups with fewer correct completions keep their rewards. With 0 (the paper), novelty alone ranks the
            completions of groups that are all wrong.
        min_wrong (`int`, *optional*, defaults to `0`):
            Groups with fewer wrong completions keep their rewards. With 0 (the paper), novelty alone ranks the
            completions of groups that are all correct, with the weight of any other difference.
    """

    novelty_weight: float = field(default=1.0, metadata={"help": "How strongly novelty scales a reward; 0: not."})
    novelty_scores: str = field(
        default="gradient", metadata={"help": "'gradient' (Eq. 11), or the control 'shuffled' (within a group)."}
    )
    novelty_transform: str = field(default="minmax", metadata={"help": "'minmax', 'centered' or 'raw'."})
    reward_mapping: str = field(default="binary", metadata={"help": "'binary' (+1, -1) or 'none'."})
    success_threshold: float = field(default=1.0, metadata={"help": "Smallest reward of a correct completion."})
    reward_clip: float = field(default=3.0, metadata={"help": "Largest absolute shaped reward."})
    min_correct: int = field(default=0, metadata={"help": "Correct completions that a shaped group needs."})
    min_wrong: int = field(default=0, metadata={"help": "Wrong completions that a shaped group needs."})

    def validate(self) -> None:
        super().validate()
        known = {"novelty_scores": SCORES, "novelty_transform": TRANSFORMS, "reward_mapping": MAPPINGS}
        for name, choices in known.items():
            if vars(self)[name] not in choices:
                raise ValueError(f"`{name}`: {unknown_name('value', str(vars(self)[name]), choices)}")
        if not 0 <= self.novelty_weight < math.inf:
            raise ValueError(f"`novelty_weight={self.novelty_weight}` must be at least 0 (no shaping) and finite.")
        if not 1 <= self.reward_clip < math.inf:
            raise ValueError(
                f"`reward_clip={self.reward_clip}` must be at least 1, the size of an unshaped reward, and finite."
            )
        if not math.isfinite(self.success_threshold):
            raise ValueError(f"`success_threshold={self.success_threshold}` must be finite.")
        for name in ("min_correct", "min_wrong"):
            if vars(self)[name] < 0:
                raise ValueError(f"`{name}={vars(self)[name]}` must be at least 0.")
