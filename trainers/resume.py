"""Bit-exact resume of GRPO training, also in the middle of a generation batch.

Plain GRPO forgets the rollouts of the current generation batch, and how many of its micro-batches are used up, when a
checkpoint is saved; a run resumed off a generation boundary then trains on other data without a word. This base class
saves both, one file per process, together with whatever a method needs.
"""

import logging
import shutil
from pathlib import Path
from typing import Any

import torch

from trl_explore.checkpoints import is_complete, last_complete_checkpoint, load_state, save_state

from .publishing import PublishingTrainer

logger = logging.getLogger(__name__)


class ResumableTrainer(PublishingTrainer):
    """
    [`~trl.GRPOTrainer`] whose checkpoints hold what an exact continuation needs.

    A checkpoint without that state (written by a plain `GRPOTrainer`) loads with a warning; one written by another
    number of processes is refused. `resume_from_checkpoint=True` takes the newest checkpoint that is whole.
    """

    # One generator per process for everything a method draws; never the global one, which samples the main stream.
    args: Any
    exploration_generator: torch.Generator
    _stream_tokens: dict[str, int] = {}

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        seed = self.args.seed + 7919 * (self.args.process_index + 1)
        self.exploration_generator = torch.Generator().manual_seed(seed)

    def exploration_state(self) -> dict[str, Any]:
        """The method's own state for the checkpoint: tensors, numbers, strings and containers of them."""
        return {}

    def load_exploration_state(self, state: dict[str, Any]) -> None:
        """Restore what `exploration_state` returned."""

    def rollout_state(self) -> dict[str, Any]:
        """Rows of the current generation batch beside TRL's own; saved only while it is in use."""
        return {}

    def load_rollout_state(self, state: dict[str, Any]) -> None:
        """Restore what `rollout_state` returned."""

    def train(self, resume_from_checkpoint=None, *args, **kwargs):
        if resume_from_checkpoint is True:
            resume_from_checkpoint, skipped = last_complete_checkpoint(self.args.output_dir)
            if resume_from_checkpoint is None:
                found = f"only {', '.join(skipped)}, not written to the end" if skipped else "nothing"
                raise ValueError(
                    f"`resume_from_checkpoint=True` needs a whole checkpoint in {self.args.output_dir}, which holds "
                    f"{found}: train without it."
                )
            if skipped:
                logger.warning("passing over %s: not written to the end", ", ".join(skipped))
        elif resume_from_checkpoint and not is_complete(resume_from_checkpoint):
            raise ValueError(
                f"`resume_from_checkpoint={str(resume_from_checkpoint)!r}` is no whole checkpoint: its trainer state "
                "is missing or cut off. Pass an older one, or `True` for the newest that is whole."
            )
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _save_checkpoint(self, model, trial):
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        existed = folder.exists()
        try:
            super()._save_checkpoint(model, trial)
        except BaseException:
            if not existed and self.args.should_save:
                shutil.rmtree(folder, ignore_errors=True)
            raise

    def _save_optimizer_and_scheduler(self, output_dir):
        super()._save_optimizer_and_scheduler(output_dir)
        self.save_exploration_state(output_dir)

    def save_exploration_state(self, folder):
        mid_generation = self._step % (self.args.steps_per_generation * self.num_iterations) != 0
        state = {
            "step": self._step,
            "schedule": [self.args.steps_per_generation, self.num_iterations, self.args.per_device_train_batch_size],
            "buffered_inputs": self._buffered_inputs if mid_generation else None,
            "rollout": self.rollout_state() if mid_generation else None,
            "metrics": dict(self._metrics["train"]),
            "stream_tokens": self._stream_tokens,
            "generator": self.exploration_generator.get_state(),
            "method": self.exploration_state(),
        }
        save_state(state, folder, rank=self.accelerator.process_index)

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        state = load_state(checkpoint, rank=self.accelerator.process_index, world_size=self.accelerator.num_processes)
        if state is None:
            logger.warning(
                "%s holds no exploration state (it was written by a plain GRPOTrainer): weights and optimiser resume, "
                "the method starts fresh.",
                checkpoint,
            )
            return
        self.exploration_generator.set_state(state["generator"])
        self._stream_tokens = state["stream_tokens"]
        self._metrics["train"].update(state["metrics"])
        self.load_exploration_state(state["method"])
        schedule = [self.args.steps_per_generation, self.num_iterations, self.args.per_device_train_batch_size]
        if state["schedule"] != schedule:
            logger.warning(
                "steps_per_generation, num_iterations, per_device_train_batch_size are %s here and were %s when "
                "%s was written: rollouts are sampled anew.",
                schedule,
                state["schedule"],
                checkpoint,
            )
            return
        self._step = state["step"]
        if state["buffered_inputs"] is not None:
            device = self.accelerator.device
            self._buffered_inputs = _to_device(state["buffered_inputs"], device)
            self.load_rollout_state(_to_device(state["rollout"], device))


def _to_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {k: _to_device(v, device) for k, v in value.items()}
    if isinstance(value, list):
        return [_to_device(v, device) for v in value]
    return value
