"""G2RL: a completion gets a larger reward if its gradient differs from the gradients of its group."""

import warnings
from dataclasses import replace
from typing import Any

import torch
from peft import PeftModel

from trl_explore.gradients.novelty import (
    geometry,
    map_rewards,
    mixed_enough,
    novelty_scores,
    shape_rewards,
    shuffle_in_groups,
    transform_novelty,
)
from trl_explore.rows.advantages import as_columns

from .base import ExplorationTrainer, Requires
from .config import ExplorationConfig
from .g2rl_config import G2RLConfig


class GradientGuided(ExplorationTrainer):
    """
    G2RL's reward shaping, to combine with another trainer of this package.

    Write `class Mine(GradientGuided, DeepGRPOTrainer)`, with a `config_class` that inherits from [`G2RLConfig`] and
    from the configuration of the other trainer.
    """

    num_generations: int
    config_class = G2RLConfig
    args: G2RLConfig
    requires = Requires(features=True, vision=False)
    _warned = False
    _novelty: torch.Tensor | None = None  # novelty of the newest main rows of all processes, `(N,)`

    def requirements(self, args: ExplorationConfig) -> Requires:
        assert isinstance(args, G2RLConfig)
        return replace(super().requirements(args), features=args.novelty_weight > 0)

    def setup(self) -> None:
        super().setup()
        model = self.accelerator.unwrap_model(self.model)
        if isinstance(model, PeftModel) and model.active_peft_config.is_prompt_learning:
            kind = model.active_peft_config.peft_type.value
            raise ValueError(
                f"G2RL does not support prompt-learning adapters (`peft_config` of type {kind}): their virtual tokens "
                "have no rows of their own in the feature. Use LoRA, or train all parameters."
            )
        if self.features is not None:
            self.features.check_head()

    def shape_rewards(self, rewards_per_func: torch.Tensor) -> torch.Tensor:
        args, size = self.args, self.num_generations
        rewards_per_func = super().shape_rewards(rewards_per_func)
        deciding = self.scorer.success(rewards_per_func)  # rewards that decide about success, `(N,)`
        raw = deciding
        if args.reward_mapping == "none":
            raw = self.scorer.totals(rewards_per_func)
        mapped = map_rewards(raw, args.reward_mapping, threshold=args.success_threshold, group_size=size)
        if self.features is None:
            if args.reward_mapping == "none":
                return rewards_per_func
            return as_columns(mapped, rewards_per_func, self.reward_weights)
        known = mapped[~mapped.isnan()]
        if args.reward_mapping == "none" and not self._warned and not torch.all((known == 1) | (known == -1)):
            self._warned = True
            warnings.warn(
                "`reward_mapping='none'` with rewards other than +1 and -1: novelty scales a reward, so it does "
                "nothing where a reward is 0, and `reward_clip` cuts large ones. `reward_mapping='scaled'` maps "
                "the rewards of each group to [-1, +1].",
                stacklevel=2,
            )
        features = self.features.of_batch()
        novelty = novelty_scores(features, mapped, size)
        if args.novelty_scores == "shuffled":
            novelty = novelty._replace(nu=self._shuffled(novelty.nu, novelty.valid))
        is_mixed = mixed_enough(
            deciding, size, min_correct=args.min_correct, min_wrong=args.min_wrong, threshold=args.success_threshold
        )
        is_shaped = novelty.valid & is_mixed
        scores = transform_novelty(novelty.nu, size, args.novelty_transform, valid=novelty.valid)
        shaped = shape_rewards(mapped, scores, weight=args.novelty_weight, clip=args.reward_clip, rows=is_shaped)
        for name, value in geometry(features, size, novelty).items():
            self.log_metric(f"geometry/{name}", value)
        self._novelty = novelty.nu
        self.log_metric("geometry/unshaped_rows", (~is_shaped).sum().item())
        self.log_metric("geometry/feature_seconds", self.features.seconds)
        return as_columns(shaped, rewards_per_func, self.reward_weights)

    def _shuffled(self, nu: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        """Return novelties `(N,)`, shuffled among the `valid` rows of each group."""
        # Several processes may have rows of one group, and all must use the same order. So every process samples
        # random keys for its own rows only, and gathers the keys of all processes.
        keys = torch.rand(len(self.ranks.local(nu)), generator=self.exploration_generator).to(self.accelerator.device)
        return shuffle_in_groups(nu, self.ranks.gather(keys), self.num_generations, valid=valid)

    def completion_columns(self) -> dict[str, list[Any]]:
        columns = super().completion_columns()
        if self._novelty is None:
            return columns
        shaped = self.scorer.totals(self.shaped_rewards)
        return {
            **columns,
            "novelty": self.ranks.local(self._novelty).tolist(),
            "shaped_reward": self.ranks.local(shaped).tolist(),
        }


class G2RLTrainer(GradientGuided):
    """
    GRPO with rewards that depend on the gradients of the policy itself.

    Method of [Can LLMs Guide Their Own Exploration? Gradient-Guided Reinforcement Learning for LLM
    Reasoning](https://huggingface.co/papers/2512.15687). What changes with respect to GRPO, per generation batch:

    1. The feature of a completion is the mean gradient of its tokens' log-probabilities with respect to the input of
       the LM head. It is computed from hidden states, during sampling or in a forward pass.
    2. The novelty of a completion is the part of its feature that the features of its group do not explain. Better
       completions of the group have more weight.
    3. Rewards are multiplied by `1 + novelty_weight * novelty` and clipped. Before that, the rewards of a group are
       mapped to [-1, +1] (`reward_mapping`): rewards of 0 and 1 become -1 and +1, as in the paper. The rest is GRPO.

    The logged `reward` and all evaluation use the raw rewards. With `novelty_weight=0` and `reward_mapping="none"`,
    the parameters equal GRPO's bit for bit. Deviations from the paper and open points are in
    `docs/methods/g2rl.md`.

    The constructor has the arguments of [`~trl.GRPOTrainer`]. `args` is a [`G2RLConfig`] or a plain
    [`~trl.GRPOConfig`]. The trainer refuses vision-language models and prompt-learning adapters.
    """

    method = "g2rl"
