"""Ctrl-C that keeps the work: the first one saves a checkpoint at the next step boundary, the second one aborts."""

import os
import signal
import threading
from types import FrameType

import torch
from accelerate.utils import gather
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

FIRST_NOTICE = b"\nInterrupted: saving a checkpoint at the end of this step, then stopping. Ctrl-C again aborts now.\n"


class InterruptCallback(TrainerCallback):
    """
    Turns the first Ctrl-C during training into a resumable checkpoint and an orderly stop.

    The handler lives from the beginning to the end of training. `Trainer.train` skips `on_train_end` when it raises,
    so callers that go on afterwards call [`~InterruptCallback.restore`] in a `finally`. `interrupted` says whether
    Ctrl-C was pressed, on this rank or (after the next step) on any other.
    """

    def __init__(self) -> None:
        self.interrupted = False
        self._previous: signal._HANDLER = None
        self._installed = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        # Python allows handlers in the main thread only. An ignored SIGINT (background job of a script) stays ignored.
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and not self._installed and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            self._previous = signal.signal(signal.SIGINT, self._handle)
            self._installed = True

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if args.world_size > 1:
            # The signal reaches the ranks at different steps; one that stopped alone would leave the others waiting.
            flag = torch.tensor([self.interrupted], dtype=torch.int32, device=args.device)
            self.interrupted = bool(gather(flag).sum())
        if self.interrupted:
            args.save_only_model = False  # without the optimizer the checkpoint could not be resumed
            control.should_save = True
            control.should_evaluate = False  # would delay the stop, and with save_strategy="best" cancel the save
            control.should_training_stop = True

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self.restore()

    def restore(self) -> None:
        """Puts the handler back that was there before training; harmless when there is nothing to put back."""
        if self._installed:
            signal.signal(signal.SIGINT, self._previous or signal.SIG_DFL)
            self._installed = False

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.interrupted:
            raise KeyboardInterrupt
        self.interrupted = True
        os.write(2, FIRST_NOTICE)  # print may be in the middle of a write of its own
