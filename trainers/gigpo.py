"""GiGPO: steps that agents took in one state of a prompt are compared with each other, beside whole trajectories."""

import warnings
from typing import Any

import torch

from trl_explore.rows.streams import RowDict, loss_mask, row_tokens
from trl_explore.step_groups.advantages import shuffled_states, step_advantages
from trl_explore.step_groups.states import equal_states, shown_tokens, similar_states

from .base import ExplorationTrainer, Requires
from .gigpo_config import GiGPOConfig


class GiGPOTrainer(ExplorationTrainer):
    """
    GRPO for multi-turn agents whose steps have an advantage of their own among the steps from the same state.

    Method of [Group-in-Group Policy Optimization for LLM Agent
    Training](https://huggingface.co/papers/2505.10978). What changes with respect to GRPO, per generation batch:

    1. Every response of the model is a step; its state is what was shown before it. Steps of a prompt's trajectories
       with the same state are a group, without any further sampling.
    2. A step's return is the trajectory's reward, discounted by the steps that follow; its advantage is relative to
       its group (Eq. 5-7).
    3. The tokens of a step get the trajectory's advantage plus `step_weight` times the step's (Eq. 8).

    `step_weight=0` gives GRPO's parameters bit for bit. Deviations from the paper (all of them in
    `docs/methods/gigpo.md`):

    1. A trajectory is one row and each token counts once; the authors train every step as a row of its own.
    2. A step whose state no other has gets 0; in the authors' code, its return.

    The constructor takes what [`~trl.GRPOTrainer`] takes; `args` is a [`GiGPOConfig`] or a plain [`~trl.GRPOConfig`].
    `tools`, `environment_factory` and `rollout_func` are TRL's; of the last one, `env_mask` tells steps from
    observations. Vision-language models are refused.
    """

    method = "gigpo"
    num_generations: int
    config_class = GiGPOConfig
    requires = Requires(whole_groups=True, vision=False, turns=True)
    _steps: list[list[float]] = []  # advantages of the steps of main rows, `[B][K]`

    def assign_advantages(self, output: RowDict) -> torch.Tensor:
        advantages = super().assign_advantages(output)
        args, size = self.args, self.num_generations
        if args.step_weight == 0:
            return advantages
        masks = loss_mask(output).tolist()
        steps = [shown_tokens(*row) for row in zip(*row_tokens(output), masks, strict=True)]
        rewards = self.ranks.local(self.scorer.totals()).tolist()
        states: list[list[int]] = []
        self._steps = []
        for g in range(0, len(steps), size):
            group = self._states([[shown for *_, shown in row] for row in steps[g : g + size]])
            states += group
            self._steps += step_advantages(
                rewards[g : g + size], group, discount=args.step_discount, scale=args.step_scale
            )
        self._log_steps(states)
        if advantages.dim() == 1:
            advantages = advantages.unsqueeze(1).repeat(1, output["completion_ids"].shape[1])
        for row, (spans, own) in enumerate(zip(steps, self._steps, strict=True)):
            for (start, stop, _), advantage in zip(spans, own, strict=True):
                advantages[row, start:stop] += args.step_weight * advantage
        return advantages

    def _states(self, shown: list[list[list[int]]]) -> list[list[int]]:
        """Numbers of the states of a prompt's steps, by the tokens that were shown before them."""
        args = self.args
        if args.state_similarity is None:
            states = equal_states([[tuple(ids) for ids in row] for row in shown])
        else:
            texts = [[self.tokenizer.decode(ids, skip_special_tokens=True) for ids in row] for row in shown]
            states = similar_states(texts, threshold=args.state_similarity)
        return states if args.step_states == "shown" else shuffled_states(states, generator=self.exploration_generator)

    def _log_steps(self, states: list[list[int]]) -> None:
        groups = [states[g : g + self.num_generations] for g in range(0, len(states), self.num_generations)]
        sizes = [[number for own in group for number in own] for group in groups]
        total = self.ranks.summed(
            {
                "rows": len(states),
                "steps": sum(map(len, states)),
                "states": sum(len(set(numbers)) for numbers in sizes),
                "shared": sum(numbers.count(number) > 1 for numbers in sizes for number in numbers),
                "credit": sum(abs(advantage) for row in self._steps for advantage in row),
            }
        )
        number = max(total["steps"], 1)
        self.log_metric("steps/shared_fraction", total["shared"] / number)
        self.log_metric("steps/group_size", total["steps"] / max(total["states"], 1))
        self.log_metric("steps/mean_advantage", total["credit"] / number)
        self.log_metric("agent/turns", total["steps"] / total["rows"])

    def completion_columns(self) -> dict[str, list[Any]]:
        columns = super().completion_columns()
        if self.args.step_weight == 0:
            return columns
        return {**columns, "step_advantages": [[round(value, 3) for value in row] for row in self._steps]}

    def setup(self) -> None:
        super().setup()
        if not self.tools and self.rollout_func is None:
            warnings.warn(
                "GiGPO compares the steps of trajectories of several turns, but there are neither `tools` nor an "
                "`environment_factory` with tools: every completion is one step from its prompt, whose advantage "
                "counts twice. Pass one of them, or use GRPOTrainer.",
                stacklevel=2,
            )
