"""G2RL: rewards grow with how far a completion's gradient points away from those of its group."""

import math
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import gather
from peft import PeftModel

from trl_explore.gradients.features import lm_head_of
from trl_explore.gradients.novelty import (
    MAPPINGS,
    SCORES,
    TRANSFORMS,
    geometry,
    map_rewards,
    mixed_enough,
    novelty_scores,
    shape_rewards,
    shuffle_in_groups,
    transform_novelty,
)
from trl_explore.names import explain_unknown_fields, unknown_name
from trl_explore.rows.advantages import combine_rewards

from .config import ExplorationConfig
from .features import FeatureTrainer


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


class GradientGuided(FeatureTrainer):
    """
    Reward shaping of G2RL, for any trainer of this package: `class Mine(GradientGuided, DeepGRPOTrainer)` with a
    `config_class` that inherits from [`G2RLConfig`] and from that trainer's configuration.
    """

    num_generations: int
    config_class: type[ExplorationConfig] = G2RLConfig
    accepts_vision = False
    _warned = False
    _novelty: torch.Tensor | None = None  # of the main rows of all processes, `(N,)`

    def setup(self) -> None:
        super().setup()
        self.wants_features = self.args.novelty_weight > 0
        model = self.accelerator.unwrap_model(self.model)
        if isinstance(model, PeftModel) and model.active_peft_config.is_prompt_learning:
            kind = model.active_peft_config.peft_type.value
            raise ValueError(
                f"G2RL does not support prompt-learning adapters (`peft_config` of type {kind}): their virtual tokens "
                "have no rows of their own in the feature. Use LoRA, or train all parameters."
            )
        if self.wants_features:
            lm_head_of(
                self.feature_pass.language_model(), temperature=self.temperature
            )  # raises where there is no such head

    def shape_rewards(self, rewards_per_func: torch.Tensor) -> torch.Tensor:
        args, size = self.args, self.num_generations
        rewards_per_func = super().shape_rewards(rewards_per_func)
        deciding = self.success_rewards(rewards_per_func)
        worth = deciding if args.reward_mapping == "binary" else combine_rewards(rewards_per_func, self.reward_weights)
        mapped = map_rewards(worth, args.reward_mapping, threshold=args.success_threshold)
        if not self.wants_features:
            return rewards_per_func if args.reward_mapping == "none" else self._as_columns(mapped, rewards_per_func)
        known = mapped[~mapped.isnan()]
        if not self._warned and not torch.all((known == 1) | (known == -1)):
            self._warned = True
            warnings.warn(
                "`reward_mapping='none'` with rewards other than +1 and -1: novelty scales a reward, so it does "
                "nothing where a reward is 0, and `reward_clip` cuts large ones. `reward_mapping='binary'` maps "
                "rewards as in the paper.",
                stacklevel=2,
            )
        features = self.gradient_features()
        novelty = novelty_scores(features, mapped, size)
        if args.novelty_scores == "shuffled":
            novelty = novelty._replace(nu=self._shuffled(novelty.nu, novelty.valid))
        enough = mixed_enough(
            deciding, size, min_correct=args.min_correct, min_wrong=args.min_wrong, threshold=args.success_threshold
        )
        nu_bar = transform_novelty(novelty.nu, size, args.novelty_transform, valid=novelty.valid)
        shaped = shape_rewards(
            mapped, nu_bar, weight=args.novelty_weight, clip=args.reward_clip, rows=novelty.valid & enough
        )
        for name, value in geometry(features, size, novelty).items():
            self.log_metric(f"geometry/{name}", value)
        self._novelty = novelty.nu
        self.log_metric("geometry/unshaped_rows", (~(novelty.valid & enough)).sum().item())
        self.log_metric("geometry/feature_seconds", self.feature_pass.seconds)
        return self._as_columns(shaped, rewards_per_func)

    def _shuffled(self, nu: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        # Every process draws for its own rows and is told of the others': a group may lie on several.
        keys = torch.rand(len(self.local(nu)), generator=self.exploration_generator).to(self.accelerator.device)
        return shuffle_in_groups(nu, gather(keys), self.num_generations, valid=valid)

    def completion_columns(self) -> dict[str, list[Any]]:
        columns = super().completion_columns()
        if self._novelty is None:
            return columns
        assert self._shaped_rewards is not None
        shaped = combine_rewards(self._shaped_rewards, self.reward_weights)
        return {
            **columns,
            "novelty": self.local(self._novelty).tolist(),
            "shaped_reward": self.local(shaped).tolist(),
        }

    def _as_columns(self, totals: torch.Tensor, rewards_per_func: torch.Tensor) -> torch.Tensor:
        """Rewards per function whose weighted sum is `totals`."""
        weights = self.reward_weights.to(totals.device)
        column = int(weights.abs().argmax())
        columns = torch.zeros_like(rewards_per_func).masked_fill(totals.isnan().unsqueeze(1), torch.nan)
        columns[:, column] = totals / weights[column]
        return columns


class G2RLTrainer(GradientGuided):
    """
    GRPO with rewards shaped by the geometry of the policy's own gradients.

    Method of [Can LLMs Guide Their Own Exploration? Gradient-Guided Reinforcement Learning for LLM
    Reasoning](https://huggingface.co/papers/2512.15687). What changes with respect to GRPO, per generation batch:

    1. The feature of a completion is the mean gradient of its tokens' log-probabilities at the input of the LM head,
       read off a forward pass without gradients.
    2. A completion is novel if its feature is not explained by those of its group, the better ones counting more.
    3. Rewards, mapped to +1 and -1, are scaled by `1 + novelty_weight * novelty` and clipped. The rest is GRPO.

    The logged `reward` and all evaluation stay the raw rewards. `novelty_weight=0` with `reward_mapping="none"` gives
    GRPO's parameters bit for bit. Deviations from the paper and open points are in `trainers/README.md`.

    The constructor takes what [`~trl.GRPOTrainer`] takes; `args` is a [`G2RLConfig`] or a plain [`~trl.GRPOConfig`].
    Vision-language models and prompt-learning adapters are refused.
    """

    method = "g2rl"
