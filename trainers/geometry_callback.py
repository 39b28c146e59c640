"""The gradient geometry of any GRPO trainer's rollouts, logged beside its training."""

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
    Logs how the gradients of a group's completions lie to each other, as in Fig. 3 of G2RL, for any trainer.

    `geometry/mean_cosine`, `geometry/negative_pairs` and `geometry/mean_novelty` are taken under the policy that
    sampled, before its update, at the cost of one forward pass of the backbone. Training is not changed.

    Args:
        trainer ([`~trl.GRPOTrainer`]):
            The trainer, of this class or a subclass, that the callback is added to.
        every (`int`, *optional*, defaults to `1`):
            Generation batches per measurement.

    Raises:
        `ValueError`: If `every` is smaller than 1, the trainer logs these metrics itself, or the model has no LM head
            that features could be taken from.

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
        self.trainer, self.every, self.num_batches = trainer, every, 0
        self.features = FeaturePass(trainer)
        self.features.check_head()
        self._end: Callable[[], None] = lambda: None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # The rows of a batch are together, in groups, only where TRL scores them; afterwards they are shuffled.
        self._end = watch(self.trainer, "scored", self._seen)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._end()

    def _seen(self, inputs: Any, output: dict[str, Any]) -> None:
        if self.trainer.model.training:
            if self.num_batches % self.every == 0:
                self.measure(output)
            self.num_batches += 1

    def measure(self, output: dict[str, Any]) -> dict[str, float]:
        """Geometry metrics of this process's rows as TRL scored them; they are also logged."""
        size = self.trainer.num_generations
        lengths = [(output[f"{name}_mask"] != 0).long() for name in ("prompt", "completion")]
        # Not the masks: TRL takes truncated completions out of theirs, and their rows count nowhere then.
        prompts = [ids[mask.bool()].tolist() for ids, mask in zip(output["prompt_ids"], lengths[0], strict=True)]
        real = [max(1, int(mask.sum())) for mask in lengths[1]]
        completions = [ids[:n].tolist() for ids, n in zip(output["completion_ids"], real, strict=True)]
        loss_mask = output["completion_mask"] * output.get("tool_mask", 1)
        masks = [mask[:n].tolist() for mask, n in zip(loss_mask, real, strict=True)]
        features = self.features.gathered(FeatureRows(prompts, completions, masks))
        # Advantages are positive for the better completions of a group, and equal where rewards are: the weights of
        # binary rewards need no more.
        advantages = output["advantages"]
        signs = torch.sign(advantages if advantages.dim() == 1 else advantages.sum(1))
        found = geometry(features, size, novelty_scores(features, gather(signs), size))
        for name, value in found.items():
            log_metric(self.trainer, f"geometry/{name}", value)
        return found
