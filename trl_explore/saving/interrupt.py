"""Handling of Ctrl-C in training: the first saves a checkpoint at the end of the step, the second aborts."""

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
    After the first Ctrl-C, saves a checkpoint from which the run can resume, and stops the training.

    The signal handler is installed from the beginning to the end of training. If `Trainer.train` raises an exception,
    it does not call `on_train_end`. So call [`~InterruptCallback.restore`] in a `finally` block.

    Attributes:
        interrupted (`bool`):
            True if Ctrl-C was pressed on this process, or before the end of the last step on any other process.
    """

    def __init__(self) -> None:
        self.interrupted = False
        self._previous: signal._HANDLER = None
        self._installed = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        # Python allows handlers only in the main thread. If SIGINT is ignored (in a background job of a script), it
        # must stay ignored.
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and not self._installed and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            self._previous = signal.signal(signal.SIGINT, self._handle)
            self._installed = True

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if args.world_size > 1:
            # The signal reaches the processes at different steps. If one of them stopped alone, the others would wait
            # for it, so all stop together.
            flag = torch.tensor([self.interrupted], dtype=torch.int32, device=args.device)
            self.interrupted = bool(gather(flag).sum())
        if self.interrupted:
            args.save_only_model = False  # without the optimizer the checkpoint could not be resumed
            control.should_save = True
            # An evaluation would delay the stop. With `save_strategy="best"` it could also cancel the save.
            control.should_evaluate = False
            control.should_training_stop = True

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self.restore()

    def restore(self) -> None:
        """Restore the handler from before the training, if this callback has replaced it."""
        if self._installed:
            signal.signal(signal.SIGINT, self._previous or signal.SIG_DFL)
            self._installed = False

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.interrupted:
            raise KeyboardInterrupt
        self.interrupted = True
        os.write(2, FIRST_NOTICE)  # not `print`, because the signal may have interrupted a `print`
