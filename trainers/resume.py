"""Bit-exact resume of GRPO training, also in the middle of a generation batch and in any epoch.

Plain GRPO forgets the rollouts of the current generation batch, how many of its micro-batches are used up, and the
order of the epoch that a checkpoint was saved in; a run resumed off a generation boundary or after the first epoch
then trains on other data without a word. This base class saves what is needed, one file per process, together with
whatever a method needs.
"""

import logging
import math
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from datasets import IterableDataset
from torch.utils.data import Sampler
from transformers import TrainerCallback, TrainingArguments

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

from .publishing import PublishingTrainer

logger = logging.getLogger(__name__)
FORMAT = 2  # of the state; 1 did not say where a run stood in its data


class ResumableTrainer(PublishingTrainer):
    """
    [`~trl.GRPOTrainer`] whose checkpoints hold what an exact continuation needs.

    A checkpoint without that state (written by a plain `GRPOTrainer`) loads with a warning; one written by another
    number of processes is refused. `resume_from_checkpoint=True` takes the newest checkpoint that is whole.
    """

    # One generator per process for everything a method draws; never the global one, which samples the main stream.
    args: Any
    exploration_generator: torch.Generator
    _step: int
    _stream_tokens: dict[str, int] = {}
    _resumed: dict[str, Any] | None = None  # the state that `train` goes on from
    _knows_method = True  # whether it holds what this method keeps
    _sampler: Sampler | None = None
    # Where the run stands in its data: the pass over them, `_step` at its start, and whether its end was told.
    _epoch = _epoch_start = 0
    _epoch_ended = _owes_epoch_end = False
    _tr_loss = torch.tensor(0.0)
    _globalstep_last_logged = 0

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.add_callback(_EpochEnd(self))
        self._earlier_files: list[Path] | None = self.run_files()
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

    def table_state(self) -> dict[str, Any] | None:
        """Rows of the completions table; they are shown until the next generation batch."""
        return None

    def load_table_state(self, state: dict[str, Any]) -> None:
        """Restore what `table_state` returned."""

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
                f"`resume_from_checkpoint={str(resume_from_checkpoint)!r}` is no whole checkpoint: its trainer state, "
                "or that of a process, is missing or cut off. Pass an older one, or `True` for the newest whole one."
            )
        self._resumed = self._read_state(str(resume_from_checkpoint)) if resume_from_checkpoint else None
        self._epoch = self._epoch_start = 0
        self._begin_files(resume_from_checkpoint)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    # ------------------------------------------------------------------------------------ files beside the checkpoints

    def run_files(self) -> list[Path]:
        """What is there of the files that a run adds to: those of the method and the completions tables."""
        folder = Path(self.args.output_dir)
        places = [folder / name for name in self.method_files()]
        if self.args.log_completions:
            places.append(folder / "completions")
        inside = [path for place in places for path in [place, *sorted(place.rglob("*"))]]
        return [path for path in inside if path.is_file()]

    def _begin_files(self, checkpoint: str | Path | None) -> None:
        """Files go on with a checkpoint that knows how long they were; else they begin anew, and old ones are kept."""
        folder = Path(self.args.output_dir)
        earlier = self.run_files() if self._earlier_files is None else self._earlier_files
        self._earlier_files = None  # what is there when training is begun again is of this run
        if (
            checkpoint
            and self._resumed is not None
            and self._knows_method
            and Path(checkpoint).resolve().parent == folder.resolve()
        ):
            return
        if self.args.should_save:
            aside = set_aside(folder, earlier)
            if aside is not None:
                names = sorted({path.relative_to(folder).parts[0] for path in earlier})
                logger.warning(
                    "%s holds files that this run does not go on from; they are in %s now: %s.", folder, aside, names
                )
            old = None if checkpoint else last_complete_checkpoint(folder)[0]
            if old is not None:
                logger.warning(
                    "%s is of an earlier run, and `resume_from_checkpoint=True` takes it until this run has gone "
                    "further: delete it, or choose another `output_dir`.",
                    old,
                )
        self.accelerator.wait_for_everyone()

    # ------------------------------------------------------------------------------------------ the order of the data

    def _get_train_sampler(self, dataset=None):
        self._sampler = super()._get_train_sampler(dataset)
        return self._sampler

    def _init_training_state(
        self, max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
    ):
        epochs, batches = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        self._owes_epoch_end = False
        if self._goes_on:
            assert self._resumed is not None
            streams = isinstance(self.train_dataset, IterableDataset)
            epochs, batches, self._owes_epoch_end = next_batch(
                self._resumed["position"],
                # How long a stream is shows when it ends.
                math.inf if streams else num_update_steps_per_epoch,
                batches_per_step=self.args.gradient_accumulation_steps,
                finished=self.state.global_step >= max_steps,
            )
        if self._sampler is not None:
            for _ in range(epochs):  # an epoch that begins draws its order
                next(iter(self._sampler), None)
        return epochs, batches

    @property
    def _goes_on(self) -> bool:
        """Whether this run goes on with the very next batch of the one that wrote the checkpoint."""
        return self._resumed is not None and not self.args.ignore_data_skip

    def _run_epoch(self, **told):  # type: ignore[override]  # all by name, as it is called
        resumes = told["resume_from_checkpoint"] is not None and told["epoch"] == told["epochs_trained"]
        if resumes and self._resumed is not None:
            self._restore_loss(self._resumed)
        if resumes and self._owes_epoch_end:
            # The checkpoint is of an epoch's last step: what follows at its end was not done yet.
            self._load_rng_state(told["resume_from_checkpoint"])
            self.control = self.callback_handler.on_epoch_end(self.args, self.state, self.control)
            self._maybe_log_save_evaluate(
                self._tr_loss,
                grad_norm=None,  # the step's own is not known any more
                **{name: told[name] for name in ("model", "trial", "epoch", "ignore_keys_for_eval", "start_time")},
            )
            told["resume_from_checkpoint"] = None  # its random states would undo what an evaluation drew
        if resumes and self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True  # it was saved at the very end
        if self.control.should_training_stop:
            return
        skipped = told["steps_trained_in_current_epoch"] if resumes else 0
        self._epoch, self._epoch_start, self._epoch_ended = told["epoch"], self._step - skipped, False
        super()._run_epoch(**told)

    def _restore_loss(self, state: dict[str, Any]) -> None:
        """The loss since the last line of the log."""
        self._tr_loss += state["loss"]
        self._total_loss_scalar -= state["loss"]  # not of this session, whose mean is told at its end
        self._globalstep_last_logged = state["last_logged"]

    # ------------------------------------------------------------------------------------------------ saving, loading

    def _save_checkpoint(self, model, trial):
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        existed = folder.exists()
        if existed and self.args.should_save:
            for old in (folder / TRAINER_STATE, *folder.glob(STATE_FILE.format(rank="*"))):
                old.unlink(missing_ok=True)  # half of it would soon be of this run and half of another
        self.accelerator.wait_for_everyone()
        try:
            super()._save_checkpoint(model, trial)
        except BaseException:
            if not existed and self.args.should_save:
                shutil.rmtree(folder, ignore_errors=True)
            raise

    def _save_rng_state(self, output_dir):
        super()._save_rng_state(output_dir)
        # What tells that a checkpoint is whole is written next, by one process.
        self.accelerator.wait_for_everyone()

    def _save_optimizer_and_scheduler(self, output_dir):
        super()._save_optimizer_and_scheduler(output_dir)
        self.save_exploration_state(output_dir)

    def save_exploration_state(self, folder):
        mid_generation = self._step % (self.args.steps_per_generation * self.num_iterations) != 0
        state = {
            "format": FORMAT,
            "num_processes": self.accelerator.num_processes,
            "step": self._step,
            "trainer": self._name,
            "settings": self._settings(),
            "buffered_inputs": self._buffered_inputs if mid_generation else None,
            "rollout": self.rollout_state() if mid_generation else None,
            "position": {
                "epoch": self._epoch,
                "batches": self._step - self._epoch_start,
                "ended": self._epoch_ended,
                "stopped": self.control.should_training_stop,
            },
            "loss": float(self._tr_loss),
            "last_logged": self._globalstep_last_logged,
            "metrics": dict(self._metrics["train"]),
            "stream_tokens": self._stream_tokens,
            "table": self.table_state(),
            "generator": self.exploration_generator.get_state(),
            "method": self.exploration_state(),
        }
        save_state(state, folder, rank=self.accelerator.process_index)

    def _settings(self) -> dict[str, Any]:
        streams = isinstance(self.train_dataset, IterableDataset)
        rows = "a stream" if streams else f"{len(self.train_dataset)} rows"  # type: ignore[arg-type]
        values = {field.name: vars(self.args)[field.name] for field in fields(self.args)}
        others = {"train_dataset": rows, "reward_funcs": self.reward_func_names}
        return compared_values({**values, **others}, [field.name for field in fields(TrainingArguments)])

    def _read_state(self, checkpoint: str) -> dict[str, Any] | None:
        state = load_state(checkpoint, rank=self.accelerator.process_index, world_size=self.accelerator.num_processes)
        if state is None:
            return None
        anew = f"start a new run from its weights, with `model={checkpoint!r}`"
        if state.get("format") != FORMAT:
            raise ValueError(
                f"the state in {checkpoint} has format {state.get('format', 1)}, and this version reads format "
                f"{FORMAT}: go on with the version of trl-explore that wrote it, or {anew}."
            )
        self._knows_method = state["trainer"] == self._name
        if not self._knows_method and state["trainer"] != ResumableTrainer._name:
            raise ValueError(
                f"{checkpoint} was written by {state['trainer']}, whose state means nothing to {self._name}: go on "
                f"with {state['trainer']}, or {anew}."
            )
        if self._knows_method and state["method"].keys() != self.exploration_state().keys():
            raise ValueError(
                f"{checkpoint} was written by another {self._name}, which kept {sorted(state['method'])} and not "
                f"{sorted(self.exploration_state())}: go on with that, or {anew}."
            )
        every, batches = self.args.steps_per_generation * self.num_iterations, self.args.gradient_accumulation_steps
        changed = check_changes(
            state["settings"],
            self._settings(),
            checkpoint=checkpoint,
            skips_data=not self.args.ignore_data_skip,
            rollouts_in_use=state["buffered_inputs"] is not None,
            boundary=every // math.gcd(every, batches),
        )
        if self.accelerator.is_main_process:
            if not self._knows_method:
                logger.warning("%s was written by plain GRPO: the method starts fresh.", checkpoint)
            if changed:
                logger.warning(changed)
            if self.args.sync_ref_model:
                logger.warning("`sync_ref_model=True`: no checkpoint holds the reference model, which begins anew.")
        return state

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        state = self._resumed
        if state is None:
            if any(Path(checkpoint).glob("rng_state*")):
                what = "no exploration state (it was written by a plain GRPOTrainer): weights and optimiser resume, "
            else:
                what = (
                    "weights alone (`save_only_model=True`): they and the number of steps resume, the optimiser and "
                )
            logger.warning("%s holds %sthe method starts fresh.", checkpoint, what)
            return
        self.exploration_generator.set_state(state["generator"])
        self._stream_tokens = state["stream_tokens"]
        self._metrics["train"].update(state["metrics"])
        if self._knows_method:
            self.load_exploration_state(state["method"])
        if state["table"] is not None:
            self.load_table_state(state["table"])
        if not self._goes_on:
            return
        self._step = state["step"]
        self._epoch, self._epoch_ended = state["position"]["epoch"], state["position"]["ended"]
        self._epoch_start = self._step - state["position"]["batches"]
        if state["buffered_inputs"] is not None:
            device = self.accelerator.device
            self._buffered_inputs = _to_device(state["buffered_inputs"], device)
            self.load_rollout_state(_to_device(state["rollout"], device))


class _EpochEnd(TrainerCallback):
    """Remembers that an epoch's end was told: a checkpoint that is saved then owes nothing of it."""

    def __init__(self, trainer: ResumableTrainer) -> None:
        self.trainer = trainer

    def on_epoch_end(self, args, state, control, **kwargs):
        self.trainer._epoch_ended = True


def _to_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {k: _to_device(v, device) for k, v in value.items()}
    if isinstance(value, list):
        return [_to_device(v, device) for v in value]
    return value
