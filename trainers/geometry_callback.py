"""Callback that logs the gradient geometry of the completions of any GRPO trainer."""

from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import gather
from transformers import TrainerCallback

from trl_explore.gradients.feature_pass import FeaturePass, FeatureRows
from trl_explore.gradients.novelty import geometry, novelty_scores
from trl_explore.trainers.base import ExplorationTrainer, log_metric, watch


class GeometryCallback(TrainerCallback):
    """
    Logs the angles between the gradients of a group's completions, as in Fig. 3 of G2RL, for any trainer.

    The metrics are `geometry/mean_cosine`, `geometry/negative_pairs` and `geometry/mean_novelty`. They are computed
    with the policy that sampled, before its update. This costs one forward pass of the backbone. The callback does not
    change the training.

    Args:
        trainer ([`~trl.GRPOTrainer`]):
            The trainer to which the callback is added, of this class or a subclass.
        every (`int`, *optional*, defaults to `1`):
            Number of generation batches per measurement.

    Raises:
        `ValueError`: If `every` is less than 1, if the trainer logs these metrics itself, if a `budget` gives groups
            different sizes, or if the model has no LM head.

    Example:

    ```python
    >>> trainer.add_callback(GeometryCallback(trainer, every=10))
    ```
    """

    def __init__(self, trainer: Any, *, every: int = 1) -> None:
        if every < 1:
            raise ValueError(f"`every={every}` must be at least 1 generation batch.")
        if isinstance(trainer, ExplorationTrainer) and trainer.features is not None:
            raise ValueError(
                f"{type(trainer).__name__} logs `geometry/*` itself while `novelty_weight` is not 0: leave the "
                "callback away."
            )
        if isinstance(trainer, ExplorationTrainer) and trainer.args.budget != "uniform":
            raise ValueError(
                f"`budget={trainer.args.budget!r}` gives prompts unequally many rows, and `GeometryCallback` compares "
                "groups of one size: leave one of the two out."
            )
        self.trainer, self.every, self.num_batches = trainer, every, 0
        self.features = FeaturePass(trainer)
        self.features.check_head()
        self._end: Callable[[], None] = lambda: None  # ends the watch

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # TRL shuffles the rows after it has scored them. So watch the scoring, where groups are still together.
        self._end()  # an earlier call of `train` may have been interrupted
        self._end = watch(self.trainer, "scored", self._seen)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._end()

    def _seen(self, inputs: Any, output: dict[str, Any]) -> None:
        if self.trainer.model.training:
            if self.num_batches % self.every == 0:
                self.measure(output)
            self.num_batches += 1

    def measure(self, output: dict[str, Any]) -> dict[str, float]:
        """Log the geometry metrics of the rows that TRL has scored on this process, and return them by name."""
        size = self.trainer.num_generations
        if isinstance(self.trainer, ExplorationTrainer):
            size = self.trainer.args.trained_generations or size  # `output` has no other rows
        prompt_mask, completion_mask = output["prompt_mask"] != 0, output["completion_mask"] != 0
        loss_mask = output["completion_mask"] * output.get("tool_mask", 1)
        prompts, completions, masks = [], [], []
        for row in range(len(prompt_mask)):
            # With `mask_truncated_completions`, TRL masks all tokens of a truncated completion, so its length is 0. A
            # row cannot be empty, so keep one token. This token does not count, because its loss mask is 0.
            length = max(1, int(completion_mask[row].sum()))
            prompts.append(output["prompt_ids"][row][prompt_mask[row]].tolist())
            completions.append(output["completion_ids"][row][:length].tolist())
            masks.append(loss_mask[row][:length].tolist())
        features = self.features.gathered(FeatureRows(prompts, completions, masks))
        # `novelty_scores` needs rewards, but TRL's output has only advantages. Use their signs as rewards of -1 and
        # +1, because the better completions of a group have positive advantages.
        advantages = output["advantages"]
        if advantages.dim() == 2:
            advantages = advantages.sum(1)
        signs = torch.sign(advantages)
        found = geometry(features, size, novelty_scores(features, gather(signs), size))
        for name, value in found.items():
            log_metric(self.trainer, f"geometry/{name}", value)
        return found
