"""GiGPO: compare the steps that agents took in the same state, in addition to whole trajectories."""

import warnings
from collections import Counter
from typing import Any

import torch

from trl_explore.rows.streams import RowDict, loss_mask, row_tokens
from trl_explore.step_groups.advantages import shuffled_states, step_advantages
from trl_explore.step_groups.states import equal_states, similar_states, turns_with_observations

from .base import ExplorationTrainer, Requires
from .gigpo_config import GiGPOConfig


class GiGPOTrainer(ExplorationTrainer):
    """
    GRPO for multi-turn agents. Each step also gets an advantage among the steps from the same state.

    Method of [Group-in-Group Policy Optimization for LLM Agent
    Training](https://huggingface.co/papers/2505.10978). What changes with respect to GRPO, per generation batch:

    1. Every response of the model is a step. Its state is the prompt, tool answer or observation before it. Steps of a
       prompt's trajectories with the same state form a group. No further sampling is necessary.
    2. The return of a step is the reward of its trajectory, discounted by the number of steps that follow. The
       advantage of a step compares its return with the returns of its group (Eq. 5-7).
    3. The tokens of a step get the advantage of the trajectory plus `step_weight` times the step's (Eq. 8).

    With `step_weight=0`, the parameters equal GRPO's bit for bit. Deviations from the paper (all of them are in
    `docs/methods/gigpo.md`):

    1. A trajectory is one row, and each token counts once. The authors train every step as a separate row.
    2. A step whose state occurs only once gets the step advantage 0. In the authors' code it gets its return.

    The constructor has the arguments of [`~trl.GRPOTrainer`]. `args` is a [`GiGPOConfig`] or a plain
    [`~trl.GRPOConfig`]. `tools`, `environment_factory` and `rollout_func` work as in TRL. The `env_mask` of a
    `rollout_func` distinguishes steps from observations. The trainer refuses vision-language models.
    """

    method = "gigpo"
    num_generations: int
    config_class = GiGPOConfig
    args: GiGPOConfig
    requires = Requires(whole_groups=True, vision=False, turns=True)
    _steps: list[list[float]] = []  # advantages of the steps of main rows, `[B][K]`

    def assign_advantages(self, output: RowDict) -> torch.Tensor:
        advantages = super().assign_advantages(output)
        args, size = self.args, self.num_generations
        if args.step_weight == 0:
            return advantages
        prompt_ids, completion_ids = row_tokens(output)
        masks = loss_mask(output).tolist()
        steps = []  # first token, end and observation (tokens before the step) of each step of each row
        for row_ids_and_mask in zip(prompt_ids, completion_ids, masks, strict=True):
            steps.append(turns_with_observations(*row_ids_and_mask))
        rewards = self.ranks.local(self.scorer.totals()).tolist()
        observations = []
        for row_steps in steps:
            observations.append([observation for _, _, observation in row_steps])
        states: list[list[int]] = []
        self._steps = []
        for first in range(0, len(steps), size):
            group_states = self._states(observations[first : first + size])
            states += group_states
            self._steps += step_advantages(
                rewards[first : first + size], group_states, discount=args.step_discount, scale=args.step_scale
            )
        self._log_steps(states)
        if advantages.dim() == 1:
            advantages = advantages.unsqueeze(1).repeat(1, output["completion_ids"].shape[1])
        for row, (row_steps, row_advantages) in enumerate(zip(steps, self._steps, strict=True)):
            for (start, end, _), advantage in zip(row_steps, row_advantages, strict=True):
                advantages[row, start:end] += args.step_weight * advantage
        return advantages

    def _states(self, shown: list[list[list[int]]]) -> list[list[int]]:
        """Return the id of the state in which each step of a prompt's trajectories starts. Equal ids are the same
        state. `shown` has the tokens before each step."""
        args = self.args
        if args.state_similarity is None:
            keys = []
            for row in shown:
                keys.append([tuple(ids) for ids in row])
            states = equal_states(keys)
        else:
            texts = []
            for row in shown:
                texts.append([self.tokenizer.decode(ids, skip_special_tokens=True) for ids in row])
            states = similar_states(texts, threshold=args.state_similarity)
        if args.step_states == "shown":
            return states
        # The control experiment: groups of the same sizes as above, but of random steps.
        return shuffled_states(states, generator=self.exploration_generator)

    def _log_steps(self, states: list[list[int]]) -> None:
        """Log metrics of the steps of all processes. `states` has the id of the state of each step of each row."""
        num_states = num_shared = 0
        # The same id means different states in different groups, so count each group separately.
        for first in range(0, len(states), self.num_generations):
            sizes: Counter[int] = Counter()  # number of steps by state
            for row in states[first : first + self.num_generations]:
                sizes.update(row)
            num_states += len(sizes)
            num_shared += sum(size for size in sizes.values() if size > 1)
        absolute_advantages: list[float] = []
        for advantages in self._steps:
            absolute_advantages.extend(map(abs, advantages))
        total = self.ranks.summed(
            {
                "rows": len(states),
                "steps": sum(map(len, states)),
                "states": num_states,
                "shared": num_shared,
                "credit": sum(absolute_advantages),
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
        rounded = []
        for advantages in self._steps:
            rounded.append([round(advantage, 3) for advantage in advantages])
        return {**columns, "step_advantages": rounded}

    def setup(self) -> None:
        super().setup()
        if not self.tools and self.rollout_func is None:
            warnings.warn(
                "GiGPO compares the steps of trajectories of several turns, but there are neither `tools` nor an "
                "`environment_factory` with tools: every completion is one step from its prompt, whose advantage "
                "counts twice. Pass one of them, or use GRPOTrainer.",
                stacklevel=2,
            )
