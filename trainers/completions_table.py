"""The table of `log_completions=True`: columns of the method, and the rows of every stream."""

import json
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather, gather_object
from trl.trainer import grpo_trainer

from trl_explore.rows.rollouts import Rows
from trl_explore.rows.streams import RowDict, loss_mask
from trl_explore.saving.plain_values import from_plain, to_plain
from trl_explore.visible_text import visible_text

from .serving import ServingTrainer

if TYPE_CHECKING:
    from .scoring import ScoredRows

Logs = dict[str, Any]  # a table as TRL keeps it: lists of values by column


class CompletionsTrainer(ServingTrainer):
    """
    [`~trl.GRPOTrainer`] whose completions table has columns of the method, and a row for every row that is trained.

    Rows of evaluation are kept by themselves; they stand in the table of the step that was evaluated.
    """

    # Class-level defaults: objects made without `__init__` behave as plain GRPO.
    log_completions = False
    trains_extra_rows = False  # whether there may be rows beside the main ones
    _logs: Logs
    _stream_logs: dict[str, Logs] = {}
    _eval_logs: Logs = {}
    _eval_step: int | None = None

    def completion_columns(self) -> dict[str, list[Any]]:
        """
        What the completions table says of a main row beside its prompt, completion, rewards and advantage.

        Asked for with `log_completions=True` only, once a generation batch is complete.

        Returns:
            `dict[str, list]`: Values by column for the rows of this process, `[B]`; the same columns on every process.
            A number that is not there is NaN and a text empty, so that a column has one type in all files.
        """
        return {}

    def keep_for_table(self, output: RowDict, streams: "dict[str, ScoredRows]") -> None:
        """
        Put the rows of a generation batch into the completions table. Every process calls it.

        Args:
            output (`dict`):
                The main rows of this process as they are trained.
            streams (`dict[str, ScoredRows]`):
                The rows beside them, by name of their stream.
        """
        none = [math.nan] * len(output["advantages"])
        origins = {"parent": none, "prefix_tokens": none} if self.trains_extra_rows else {}
        columns = {**self.completion_columns(), **origins}
        per_process = gather_object([columns])
        for name in columns:
            self._logs["extra"][name].extend(value for found in per_process for value in found[name])
        self._logs["advantages"].extend(gather(_row_advantages(output)).tolist())
        self._stream_logs = {
            name: {**scored.logged, "advantages": gather(_row_advantages(scored.rows))[gather(scored.real)].tolist()}
            for name, scored in streams.items()
        }

    def logged_rows(self, rows: Rows, num_rows: int) -> Logs:
        """
        What TRL has just logged of a stream's rows, without those that only pad. Every process calls it.

        Args:
            rows ([`Rows`]):
                Real rows of this process.
            num_rows (`int`):
                Rows that TRL saw of every process.

        Returns:
            `dict`: Columns as TRL keeps them, and `parent` and `prefix_tokens`.
        """
        main_rows = self.args.generation_batch_size // self.accelerator.num_processes
        first = self.accelerator.process_index * main_rows
        origins = [
            (math.nan if parent is None else first + parent, [*mask, 1].index(1))
            for parent, mask in zip(rows.parents, rows.loss_mask, strict=True)
        ]
        per_process = gather_object([origins])
        real = [i * num_rows + place for i, origins in enumerate(per_process) for place in range(len(origins))]

        def picked(columns: Logs) -> Logs:
            return {name: [values[i] for i in real] for name, values in columns.items()}

        parents, prefixes = zip(*(origin for origins in per_process for origin in origins), strict=True)
        return {
            **picked({name: self._logs[name] for name in ("prompt", "completion")}),
            "rewards": picked(self._logs["rewards"]),
            "extra": {**picked(self._logs["extra"]), "parent": parents, "prefix_tokens": prefixes},
        }

    # ---------------------------------------------------------------------------------------------- seams into TRL

    @property
    def _is_training(self) -> bool:
        assert self.model is not None
        return self.model.training

    def _generate_and_score_completions(self, inputs):
        if self._is_training or not self.log_completions:
            return super()._generate_and_score_completions(inputs)
        if self._eval_step != self.state.global_step:
            self._eval_step = self.state.global_step
            self._eval_logs = empty_logs(self._logs, maxlen=self.args.generation_batch_size)
        own, self._logs = self._logs, self._eval_logs
        try:
            return super()._generate_and_score_completions(inputs)
        finally:
            self._logs = own

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        own, wanted = self._logs, self.log_completions
        if wanted and self.accelerator.is_main_process:
            self._logs = self._whole_table()
            # A run that goes on from a checkpoint without rows may have none yet: the file of that step stays.
            self.log_completions = len(self._logs["prompt"]) > 0
        try:
            with _printed_visibly():
                super().log(logs, start_time)
        finally:
            self._logs, self.log_completions = own, wanted

    def table_state(self) -> dict[str, Any] | None:
        if not self.log_completions or not self.accelerator.is_main_process:
            return None
        parts = {"main": self._logs, "streams": self._stream_logs}
        if self._eval_step == self.state.global_step:
            parts["eval"] = self._eval_logs
        # Only texts and numbers stand in a table in the end; images are for those who follow a run live.
        return to_plain(_as_lists({**parts, "main": {**self._logs, "images": []}}), other=str)

    def load_table_state(self, state: dict[str, Any]) -> None:
        if not self.log_completions:
            return
        parts = from_plain(state)
        _fill(self._logs, parts["main"])
        self._stream_logs = parts["streams"]
        if "eval" in parts:
            self._eval_step = self.state.global_step
            self._eval_logs = empty_logs(self._logs, maxlen=self.args.generation_batch_size)
            _fill(self._eval_logs, parts["eval"])

    def _whole_table(self) -> Logs:
        """The main rows come first: the number of a row's parent is that of a row of the table."""
        parts = {"main": self._logs, **self._stream_logs}
        if self._eval_step == self.state.global_step:
            parts["eval"] = self._eval_logs

        def joined(columns: list[Logs]) -> Logs:
            names = dict.fromkeys(name for part in columns for name in part)
            missing = [[None] * len(logs["prompt"]) for logs in parts.values()]
            return {
                name: [v for part, none in zip(columns, missing, strict=True) for v in part.get(name, none)]
                for name in names
            }

        plain = [{name: logs[name] for name in ("prompt", "completion", "advantages")} for logs in parts.values()]
        return {
            **joined(plain),
            "images": self._logs["images"],
            "rewards": joined([logs["rewards"] for logs in parts.values()]),
            "extra": {
                "stream": [part for part, logs in parts.items() for _ in logs["prompt"]],
                **joined([logs["extra"] for logs in parts.values()]),
            },
        }


@contextmanager
def _printed_visibly() -> Iterator[None]:
    """
    TRL prints its table as the model wrote it; a terminal would obey what looks like a command to it.

    The files and the trackers keep the text as it is.
    """
    before = grpo_trainer.print_prompt_completions_sample

    def visibly(prompts, completions, rewards, advantages, step, num_samples=None, extra=None):
        shown = [{_visible(name): values for name, values in columns.items()} for columns in (rewards, extra or {})]
        texts = _visible(prompts), _visible(completions)
        before(*texts, shown[0], advantages, step, num_samples, extra=_visible(shown[1]))

    vars(grpo_trainer)["print_prompt_completions_sample"] = visibly
    try:
        yield
    finally:
        vars(grpo_trainer)["print_prompt_completions_sample"] = before


def _visible(value: Any) -> Any:
    if isinstance(value, str):
        return visible_text(value)
    if isinstance(value, dict):  # the arguments of a tool call may be JSON, which TRL reads before it prints them
        told = {key: json.loads(v) if key == "arguments" and isinstance(v, str) else v for key, v in value.items()}
        return {_visible(key): _visible(v) for key, v in told.items()}
    return [_visible(v) for v in value] if isinstance(value, list) else value


def empty_logs(logs: Logs, *, maxlen: int | None = None) -> Logs:
    """
    A table as TRL keeps it, without rows.

    Args:
        logs (`dict`):
            A table with the same columns.
        maxlen (`int`, *optional*):
            Rows to keep, the newest ones; all by default.

    Returns:
        `dict`: The empty table.
    """
    column: Callable[[], deque] = partial(deque, maxlen=maxlen)
    return {name: defaultdict(column) if isinstance(logs[name], defaultdict) else column() for name in logs}


def _as_lists(logs: Any) -> Any:
    if isinstance(logs, dict):
        return {name: _as_lists(values) for name, values in logs.items()}
    return list(logs)


def _fill(logs: Logs, columns: dict[str, Any]) -> None:
    for name, values in columns.items():
        if isinstance(values, dict):
            _fill(logs[name], values)
        else:
            logs[name].extend(values)


def _row_advantages(rows: RowDict) -> torch.Tensor:
    """One advantage per row, `(B,)`: the mean over its trained tokens where they have their own."""
    advantages, mask = rows["advantages"], loss_mask(rows)
    if advantages.dim() == 1:
        return advantages
    return (advantages * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
