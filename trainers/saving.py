"""Bit-exact resume of GRPO training, also in the middle of a generation batch and in any epoch.

A checkpoint of plain GRPO lacks the rollouts of the current generation batch, the number of its micro-batches that are
trained, and the order of the epoch. If a run resumes in the middle of a generation batch or after the first epoch, it
silently trains on other data. This part saves the missing state and the state of a method, one file per process.
"""

import logging
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from datasets import IterableDataset
from torch.utils.data import Sampler
from transformers import TrainerCallback, TrainingArguments

from trl_explore.methods import METHODS
from trl_explore.saving.changes import check_changes, compared_values
from trl_explore.saving.checkpoints import (
    STATE_FILE,
    TRAINER_STATE,
    is_complete,
    last_complete_checkpoint,
    load_state,
    next_batch,
    save_state,
    set_aside,
)
from trl_explore.saving.plain_values import without_numpy

from .config import ExplorationConfig

logger = logging.getLogger(__name__)
FORMAT = 2  # version of the state; version 1 had no position in the data


class Saving:
    """
    Writes the state that an exact continuation needs into checkpoints, and restores it.

    A checkpoint without this state (written by a plain `GRPOTrainer`) loads with a warning. A checkpoint that another
    number of processes wrote is refused. `resume_from_checkpoint=True` uses the newest complete checkpoint. Only this
    file and `base.py` name private attributes of transformers' trainer.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.accelerator = trainer, trainer.accelerator
        self.args: ExplorationConfig = trainer.args
        self.resumed: dict[str, Any] | None = None  # state from which `train` resumes
        # False if the state in the checkpoint is not of this method: plain GRPO wrote it, or a run without `explore`.
        self._knows_method = True
        self.sampler: Sampler | None = None
        # Position in the data: number of the epoch, and the trainer's `_step` at its start.
        self._epoch = self._epoch_start = 0
        self.epoch_ended = False  # True after `on_epoch_end` has run in this epoch
        self._owes_epoch_end = False  # True if a resumed run must still call `on_epoch_end`
        # Number of batches of an unfinished optimizer step. Only set while a checkpoint of the step before is written.
        self._num_lost: int | None = None
        # Files of earlier runs in `output_dir`. None as soon as a run of this trainer has begun.
        self._earlier_files: list[Path] | None = []

    def attach(self) -> None:
        """Connect to the trainer. Called when the trainer is made."""
        self.trainer.add_callback(_Moments(self))
        self._earlier_files = self.trainer.run_files()

    def begin(self, resume_from_checkpoint: Any) -> Any:
        """Read and check the checkpoint from which the run resumes. Return its path, or None. Called at the start of
        `train`."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint, skipped = last_complete_checkpoint(self.args.output_dir)
            if resume_from_checkpoint is None:
                found = "nothing"
                if skipped:
                    found = f"only {', '.join(skipped)}, not written to the end"
                raise ValueError(
                    f"`resume_from_checkpoint=True` needs a whole checkpoint in {self.args.output_dir}, which holds "
                    f"{found}: train without it."
                )
            if skipped:
                logger.warning("skipping %s: not written to the end", ", ".join(skipped))
        elif resume_from_checkpoint and not is_complete(resume_from_checkpoint):
            raise ValueError(
                f"`resume_from_checkpoint={str(resume_from_checkpoint)!r}` is not a complete checkpoint: its trainer "
                "state, or the state of a process, is missing or cut off. Pass an older checkpoint, or `True` for the "
                "newest complete one."
            )
        self.resumed = None
        if resume_from_checkpoint:
            self.resumed = self._read_state(str(resume_from_checkpoint))
        self.trainer.sample.tokens.begin()
        self._epoch = self._epoch_start = 0
        self._begin_files(resume_from_checkpoint)
        return resume_from_checkpoint

    def _begin_files(self, checkpoint: str | Path | None) -> None:
        """Keep the files in `output_dir` if the run continues them. Otherwise, move the files of earlier runs into
        another folder, so that this run starts new ones."""
        folder = Path(self.args.output_dir)
        if self._earlier_files is None:
            earlier = self.trainer.run_files()
        else:
            earlier = self._earlier_files
        self._earlier_files = None  # from now on, existing files belong to runs of this trainer
        # Only a checkpoint of this method in this folder has the lengths of these files. The method cuts its files to
        # these lengths when it resumes.
        if (
            checkpoint
            and self.resumed is not None
            and self._knows_method
            and Path(checkpoint).resolve().parent == folder.resolve()
        ):
            return
        if self.args.should_save:
            aside = set_aside(folder, earlier)
            if aside is not None:
                names = sorted({path.relative_to(folder).parts[0] for path in earlier})
                logger.warning("%s contained files of an earlier run; they are in %s now: %s.", folder, aside, names)
            old = None if checkpoint else last_complete_checkpoint(folder)[0]
            if old is not None:
                logger.warning(
                    "%s is of an earlier run, and `resume_from_checkpoint=True` uses it until this run has "
                    "saved a later step: delete it, or choose another `output_dir`.",
                    old,
                )
        self.accelerator.wait_for_everyone()

    # ------------------------------------------------------------------------------------------ the order of the data

    def first_batch(self, found: tuple[int, int], max_steps: int, num_update_steps_per_epoch: int) -> tuple[int, int]:
        """Return the epoch in which training starts, and the number of its batches to skip. `found` holds the two
        numbers that transformers computed from the number of steps, without the position in the checkpoint."""
        epochs, batches = found
        self._owes_epoch_end = False
        trainer = self.trainer
        if self._goes_on:
            assert self.resumed is not None
            epoch_steps: float = num_update_steps_per_epoch
            if isinstance(trainer.train_dataset, IterableDataset):
                epoch_steps = math.inf  # the length of a stream is unknown
            epochs, batches, self._owes_epoch_end = next_batch(
                self.resumed["position"],
                epoch_steps,
                batches_per_step=self.args.gradient_accumulation_steps,
                finished=trainer.state.global_step >= max_steps,
            )
        if self.sampler is not None:
            # The order of an epoch is sampled when the epoch starts. Start the finished epochs too, so that the next
            # epoch gets the order that it would have without the interruption.
            for _ in range(epochs):
                next(iter(self.sampler), None)
        return epochs, batches

    @property
    def _goes_on(self) -> bool:
        """Return whether this run continues with the next batch after the checkpoint."""
        return self.resumed is not None and not self.args.ignore_data_skip

    def begin_epoch(self, arguments: dict[str, Any]) -> bool:
        """
        Return whether to run an epoch. Called before every epoch.

        In the first epoch of a resumed run, this method restores the logged loss. It also runs `on_epoch_end` of the
        checkpoint's epoch if the checkpoint was written before that.

        Args:
            arguments (`dict`):
                Arguments of transformers' `_run_epoch`. This method may change them.
        """
        checkpoint = arguments["resume_from_checkpoint"]
        resumes = checkpoint is not None and arguments["epoch"] == arguments["epochs_trained"]
        if resumes and self.resumed is not None:
            self._restore_loss(self.resumed)
        if resumes and self._owes_epoch_end:
            # The checkpoint was written at the last step of an epoch, before the end of the epoch was handled.
            self.trainer._load_rng_state(checkpoint)
            handler, control = self.trainer.callback_handler, self.trainer.control
            self.trainer.control = handler.on_epoch_end(self.args, self.trainer.state, control)
            self.trainer._maybe_log_save_evaluate(
                self.trainer._tr_loss,
                grad_norm=None,  # the checkpoint does not have it
                model=arguments["model"],
                trial=arguments["trial"],
                epoch=arguments["epoch"],
                ignore_keys_for_eval=arguments["ignore_keys_for_eval"],
                start_time=arguments["start_time"],
            )
            # Do not load the random states again: an evaluation may have used random numbers.
            arguments["resume_from_checkpoint"] = None
        if resumes and self.trainer.state.global_step >= self.trainer.state.max_steps:
            self.trainer.control.should_training_stop = True  # the checkpoint was saved at the end of the run
        if self.trainer.control.should_training_stop:
            return False
        skipped = arguments["steps_trained_in_current_epoch"] if resumes else 0
        self._epoch, self._epoch_start = arguments["epoch"], self.trainer._step - skipped
        self.epoch_ended = False
        return True

    def _restore_loss(self, state: dict[str, Any]) -> None:
        """Restore the sum of the loss since the last line of the log."""
        self.trainer._tr_loss += state["loss"]
        self.trainer._total_loss_scalar -= state["loss"]  # exclude it from the mean loss of this run
        self.trainer._globalstep_last_logged = state["last_logged"]

    # ------------------------------------------------------------------------------------------------ saving, loading

    @contextmanager
    def checkpoint(self, trial: Any) -> Iterator[None]:
        """Context in which transformers writes a checkpoint. If that fails, remove the incomplete folder, unless it
        existed before."""
        trainer = self.trainer
        folder = Path(trainer._get_output_dir(trial=trial)) / f"checkpoint-{trainer.state.global_step}"
        existed = folder.exists()
        if existed and self.args.should_save:
            for old in (folder / TRAINER_STATE, *folder.glob(STATE_FILE.format(rank="*"))):
                old.unlink(missing_ok=True)  # otherwise, files of two runs would look like a complete checkpoint
        trainer.accelerator.wait_for_everyone()
        try:
            yield
        except BaseException:
            # A complete checkpoint stays: then only what follows failed, such as its upload.
            if not existed and self.args.should_save and not is_complete(folder):
                shutil.rmtree(folder, ignore_errors=True)
            raise

    def checkpoint_before_stopping(self) -> str:
        """Write a checkpoint of the current step before the run stops with an error. Return a sentence for the user
        about how to resume. Write nothing if no step is done, if `save_strategy="no"`, or if the checkpoint exists."""
        trainer = self.trainer
        step = trainer.state.global_step
        if step == 0 or self.args.save_strategy == "no":
            reason = "no step is done." if step == 0 else "`save_strategy='no'`."
            return f"Nothing was saved, since {reason}"
        folder = Path(trainer._get_output_dir(trial=None)) / f"checkpoint-{step}"
        # All processes save, or none does, even if only some of them see the folder.
        if not trainer.ranks.summed({"there": folder.is_dir()})["there"]:
            # The gradients of an unfinished optimizer step are lost, so the resumed run trains its batches again.
            self._num_lost = (trainer._step - self._epoch_start) % self.args.gradient_accumulation_steps
            try:
                trainer._save_checkpoint(trainer.model, trial=None)
            finally:
                self._num_lost = None
        return f"Bring the service back and go on with `resume_from_checkpoint={str(folder)!r}`."

    def write(self, folder: str | Path) -> None:
        """Write the state of this process into a folder."""
        step = self.trainer._step - (self._num_lost or 0)
        mid_generation = step % (self.args.steps_per_generation * self.trainer.num_iterations) != 0
        buffered_inputs = rollout = None
        if mid_generation:  # otherwise, the next step samples a new generation batch
            buffered_inputs, rollout = self.trainer._buffered_inputs, self.trainer.stream_training.state()
        state = {
            "format": FORMAT,
            "num_processes": self.accelerator.num_processes,
            "step": step,
            "trainer": self.trainer._name,
            "settings": self._settings(),
            "buffered_inputs": buffered_inputs,
            "rollout": rollout,
            "position": {
                "epoch": self._epoch,
                "batches": step - self._epoch_start,
                "ended": self.epoch_ended,
                "stopped": self.trainer.control.should_training_stop,
            },
            "loss": float(self.trainer._tr_loss),
            "last_logged": self.trainer._globalstep_last_logged,
            "metrics": dict(self.trainer._metrics["train"]),
            "stream_tokens": self.trainer._stream_tokens,
            "sampled_tokens": {"own": self.trainer.sample.tokens.own, "total": self.trainer.sample.tokens.total},
            "table": self._table_state(),
            "generator": self.trainer.exploration_generator.get_state(),
            "method": without_numpy(self.trainer.exploration_state(), where="the method's state"),
        }
        if self.trainer.rounds is not None:
            state["rounds"] = self.trainer.rounds.state(before_step=self._num_lost is not None)
        if self.trainer.credit.counts:
            state["credit"] = self.trainer.credit.state()
        save_state(state, folder, rank=self.accelerator.process_index)

    def _settings(self) -> dict[str, Any]:
        """Return the settings that a resumed run is compared with."""
        if isinstance(self.trainer.train_dataset, IterableDataset):
            rows = "a stream"
        else:
            rows = f"{len(self.trainer.train_dataset)} rows"
        values = {field.name: getattr(self.args, field.name) for field in fields(self.args)}
        others = {"train_dataset": rows, "reward_funcs": self.trainer.reward_func_names}
        return compared_values({**values, **others}, [field.name for field in fields(TrainingArguments)])

    def _read_state(self, checkpoint: str) -> dict[str, Any] | None:
        """Read the state of this process, and check that this trainer can use it. Return None if plain TRL wrote the
        checkpoint."""
        state = load_state(checkpoint, rank=self.accelerator.process_index, world_size=self.accelerator.num_processes)
        if state is None:
            return None
        title = self.trainer._name
        new_run = f"start a new run from its weights, with `model={checkpoint!r}`"
        if state.get("format") != FORMAT:
            raise ValueError(
                f"the state in {checkpoint} has format {state.get('format', 1)}, and this version reads format "
                f"{FORMAT}: go on with the version of trl-explore that wrote it, or {new_run}."
            )
        # A run that did not explore may go on with `explore`. Its checkpoint has no state of explorers.
        begins_to_explore = state["trainer"] == title and not state["method"] and self.args.explores_unsolved
        self._knows_method = state["trainer"] == title and not begins_to_explore
        if state["trainer"] not in (title, METHODS["exploration"].title):
            raise ValueError(
                f"{checkpoint} was written by {state['trainer']}, whose state cannot be used by {title}: go on "
                f"with {state['trainer']}, or {new_run}."
            )
        if self._knows_method and state["method"].keys() != self.trainer.exploration_state().keys():
            raise ValueError(
                f"{checkpoint} was written by another {title}, which kept {sorted(state['method'])} and not "
                f"{sorted(self.trainer.exploration_state())}: go on with that, or {new_run}."
            )
        num_passes = self.args.steps_per_generation * self.args.num_iterations  # micro-batches per generation batch
        changed = check_changes(
            state["settings"],
            self._settings(),
            checkpoint=checkpoint,
            skips_data=not self.args.ignore_data_skip,
            rollouts_in_use=state["buffered_inputs"] is not None,
            # Number of optimizer steps after which a step and a generation batch end together.
            boundary=num_passes // math.gcd(num_passes, self.args.gradient_accumulation_steps),
        )
        if self.accelerator.is_main_process:
            if begins_to_explore:
                logger.warning("%s was written without `explore`: the explorers start fresh.", checkpoint)
            elif not self._knows_method:
                logger.warning("%s was written by plain GRPO: the method starts fresh.", checkpoint)
            if changed:
                logger.warning(changed)
            if self.args.sync_ref_model:
                logger.warning(
                    "`sync_ref_model=True`: no checkpoint holds the reference model, so it starts with its initial "
                    "weights."
                )
        return state

    def restore(self, checkpoint: str) -> None:
        """Restore everything except weights and optimizer, which are already loaded."""
        state = self.resumed
        if state is None:
            if any(Path(checkpoint).glob("rng_state*")):
                content = "no exploration state (it was written by a plain GRPOTrainer): weights and optimizer resume,"
            else:
                content = (
                    "weights alone (`save_only_model=True`): they and the number of steps resume, the optimizer "
                    "starts fresh, and"
                )
            logger.warning("%s holds %s the method starts fresh.", checkpoint, content)
            return
        self.trainer.exploration_generator.set_state(state["generator"])
        self.trainer._stream_tokens = state["stream_tokens"]
        # Checkpoints of earlier versions lack the count. It then starts at the resumed step.
        self.trainer.sample.tokens.begin(**state.get("sampled_tokens", {}))
        self.trainer._metrics["train"].update(state["metrics"])
        if self._knows_method:
            self.trainer.load_exploration_state(state["method"])
        if self.trainer.rounds is not None and "rounds" in state:
            self.trainer.rounds.load_state(state["rounds"])
        if "credit" in state:
            self.trainer.credit.load_state(state["credit"])
        if state["table"] is not None:
            self._load_table(state["table"])
        if not self._goes_on:
            return
        self.trainer._step = state["step"]
        self._epoch, self.epoch_ended = state["position"]["epoch"], state["position"]["ended"]
        self._epoch_start = self.trainer._step - state["position"]["batches"]
        if state["buffered_inputs"] is not None:
            device = self.accelerator.device
            self.trainer._buffered_inputs = _to_device(state["buffered_inputs"], device)
            self.trainer.stream_training.load_state(_to_device(state["rollout"], device))

    def _table_state(self) -> dict[str, Any] | None:
        """Return the completions table for the checkpoint. None if this process has no table."""
        trainer = self.trainer
        if not trainer.log_completions or not trainer.accelerator.is_main_process:
            return None
        return trainer.table.state(trainer._logs, trainer.state.global_step)

    def _load_table(self, state: dict[str, Any]) -> None:
        """Restore the completions table. A run without `log_completions` ignores it."""
        if self.trainer.log_completions:
            if self.trainer.rounds is not None:  # a batch of several rounds can have more rows than TRL's table holds
                self.trainer._logs = self.trainer.table.begin(self.trainer._logs)
            self.trainer.table.load_state(state, self.trainer._logs, self.trainer.state.global_step)


class _Moments(TrainerCallback):
    """Keeps the state of the choice of prompts before each optimizer step. Records that `on_epoch_end` has run, so
    that a resumed run does not call it again."""

    def __init__(self, saving: Saving) -> None:
        self.saving = saving

    def on_step_begin(self, args, state, control, **kwargs):
        if self.saving.trainer.rounds is not None:
            self.saving.trainer.rounds.begin_step()

    def on_epoch_end(self, args, state, control, **kwargs):
        self.saving.epoch_ended = True


def _to_device(value: Any, device: torch.device) -> Any:
    """Return a copy of nested dictionaries and lists with tensors on the device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {k: _to_device(v, device) for k, v in value.items()}
    if isinstance(value, list):
        return [_to_device(v, device) for v in value]
    return value
