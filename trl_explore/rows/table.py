"""The completions table of `log_completions=True`: adds columns of the method and the rows of streams."""

import json
import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from trl_explore.rows.policy import Policy
from trl_explore.rows.printed import SHARED
from trl_explore.rows.rollouts import Rows
from trl_explore.rows.streams import RowDict, loss_mask
from trl_explore.saving.plain_values import from_plain, to_plain

Logs = dict[str, Any]  # TRL's format of a table: lists of values by column


class CompletionsTable:
    """Adds columns of the method and the rows of streams to TRL's completions table. Rows of an evaluation are stored
    separately, and the table of the step at which the evaluation ran includes them."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.streams: dict[str, Logs] = {}  # rows of the current generation batch, by stream
        self.evaluated: Logs = {}  # rows of the latest evaluation
        self._before = 0  # number of rows of earlier sampling rounds of the batch, over all processes
        self._known_columns: set[str] = set()  # columns that reward functions logged in earlier rounds
        self._in_rounds = False  # True after `begin`
        self._evaluated_at: int | None = None  # step of the latest evaluation

    def begin(self, logs: Logs) -> Logs:
        """Return an empty table in place of TRL's, for a generation batch that is sampled in several rounds. The table
        has no limit, because it must hold the rows of all rounds."""
        self._before, self._in_rounds, self.streams = 0, True, {}
        self._known_columns = set()
        return empty_logs(logs)

    def add(
        self,
        logs: Logs,
        output: RowDict,
        columns: dict[str, list[Any]],
        streams: dict[str, Any],
        of_streams: Sequence[str] = (),
    ) -> None:
        """
        Add the rows of a generation batch. Every process calls this method.

        Args:
            logs (`dict`):
                TRL's table, which contains the main rows already.
            output (`dict`):
                The main rows of this process with their final advantages.
            columns (`dict[str, list]`):
                Columns of the method for the main rows, `[B]`.
            streams (`dict[str, ScoredRows]`):
                Scored rows by stream.
            of_streams (`Sequence[str]`, *optional*):
                Columns that only the rows of streams have. They are NaN in the main rows.
        """
        ranks = self.policy.ranks
        columns = {**columns, **dict.fromkeys(of_streams, [math.nan] * len(output["advantages"]))}
        per_process = ranks.objects([columns])
        for name in columns:
            for columns_of_process in per_process:
                logs["extra"][name].extend(columns_of_process[name])
        found = {}
        for name, scored in streams.items():
            advantages, real = ranks.gather(_row_advantages(scored.rows)), ranks.gather(scored.real)
            found[name] = {**scored.logged, "advantages": advantages[real].tolist()}
        if not self._in_rounds:
            self.streams = found
            return
        self.show_advantages(logs, output)
        num_rows = len(output["advantages"])
        self._fill_up(logs["extra"], num_rows * ranks.number)
        for name, logged in found.items():
            parents = [self._place(parent, num_rows) for parent in logged["extra"]["parent"]]
            logged["extra"] = {**logged["extra"], "parent": parents}
            if name in self.streams:
                logged = _joined_logs(self.streams[name], logged)
            self.streams[name] = logged
        self._before += num_rows * ranks.number

    def show_advantages(self, logs: Logs, output: RowDict) -> None:
        """Replace the advantages of the newest main rows in TRL's table by the advantages of the loss."""
        advantages = self.policy.ranks.gather(_row_advantages(output)).tolist()
        for _ in advantages:
            logs["advantages"].pop()
        logs["advantages"].extend(advantages)

    def _fill_up(self, columns: Logs, num_rows: int) -> None:
        """Append None to columns without values for the `num_rows` newest rows. Prepend None to new columns, for the
        rows of earlier rounds."""
        for name, values in columns.items():
            if name not in self._known_columns:
                values.extendleft([None] * self._before)
            elif len(values) == self._before:
                values.extend([None] * num_rows)
        self._known_columns = set(columns)

    def _place(self, parent: float, num_rows: int) -> float:
        """Return the row number of a main row in the table. `parent` counts rows as if every process had the rows of a
        full batch, but a round may have fewer: `num_rows` per process. NaN stays NaN."""
        if math.isnan(parent):
            return parent
        rank, row = divmod(int(parent), self.policy.args.generation_batch_size // self.policy.ranks.number)
        return self._before + rank * num_rows + row

    def of_evaluation(self, logs: Logs, step: int) -> Logs:
        """Return the table for the rows of an evaluation at `step`, with the columns of TRL's table `logs`."""
        if self._evaluated_at != step:
            self._evaluated_at = step
            self.evaluated = empty_logs(logs, maxlen=self.policy.args.generation_batch_size)
            # TRL may write several values per row here. `one_reward_per_name` keeps one, and drops old rows.
            self.evaluated["rewards"] = empty_logs(logs)["rewards"]
        return self.evaluated

    def one_reward_per_name(self, logs: Logs, num_rows: int) -> None:
        """Keep one value per row for reward functions that share a name, because TRL writes the values of all of them
        into one column. Keep the values of the last function, for the `num_rows` newest rows of every process."""
        keep_one_reward_per_name(logs, self.policy.reward_func_names, num_rows * self.policy.ranks.number)

    def state(self, logs: Logs, step: int) -> dict[str, Any]:
        """Return the table for a checkpoint."""
        parts = {"main": {**logs, "images": []}, "streams": self.streams}
        if self._evaluated_at == step:
            parts["eval"] = self.evaluated
        # The written table contains only texts and numbers. Images are only shown during a run, so do not save them.
        return to_plain(_as_lists(parts), other=str)

    def load_state(self, state: dict[str, Any], logs: Logs, step: int) -> None:
        """Restore what `state` returned."""
        parts = from_plain(state)
        _fill(logs, parts["main"])
        self.streams = parts["streams"]
        if "eval" in parts:
            _fill(self.of_evaluation(logs, step), parts["eval"])

    def whole(self, main: Logs, step: int) -> Logs:
        """Return one table with the main rows, the rows of streams and the rows of an evaluation at `step`. The main
        rows come first, so that the column `parent` contains row numbers of this table."""
        parts = {"main": main, **self.streams}
        if self._evaluated_at == step:
            parts["eval"] = self.evaluated
        lengths, plain, stream = [], [], []
        for part, logs in parts.items():
            lengths.append(len(logs["prompt"]))
            plain.append({name: logs[name] for name in ("prompt", "completion", "advantages")})
            stream.extend([part] * len(logs["prompt"]))
        columns = _concatenated(plain, lengths)
        for name in ("prompt", "completion"):
            columns[name] = [with_written_arguments(entry) for entry in columns[name]]
        extra = _concatenated([logs["extra"] for logs in parts.values()], lengths)
        return {
            **columns,
            "images": main["images"],
            "rewards": _concatenated([logs["rewards"] for logs in parts.values()], lengths),
            "extra": {"stream": stream, **extra},
        }


def with_written_arguments(entry: Any) -> Any:
    """
    Return a conversation with the arguments of its tool calls as JSON text. A text is returned unchanged.

    A model may write any arguments: a number in one call and a word in the next, or none. A column of a Parquet file
    has one type, so Parquet cannot store such arguments unless they are text.
    """
    if not isinstance(entry, list):
        return entry
    written = []
    for message in entry:
        calls = message.get("tool_calls")
        if calls:
            message = {**message, "tool_calls": [_written_call(call) for call in calls]}
        written.append(message)
    return written


def _written_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}}


def logged_rows(policy: Policy, logs: Logs, rows: Rows, num_rows: int) -> Logs:
    """
    Return the table of a stream's rows, over all processes and without filler rows. Every process calls this function.

    Args:
        policy ([`Policy`]):
            The trainer.
        logs (`dict`):
            Values that TRL has just logged for the rows of the stream.
        rows ([`Rows`]):
            Rows of this process without filler rows.
        num_rows (`int`):
            Number of rows of every process, including filler rows.

    Returns:
        `dict`: The table. It has the additional columns `parent` (row number of the main row that a row branches
        from), `prefix_tokens` and, for completions of one turn, `prefix_characters` (length of the shared prefix).
    """
    ranks = policy.ranks
    keep_one_reward_per_name(logs, policy.reward_func_names, num_rows * ranks.number)
    first = ranks.index * (policy.args.generation_batch_size // ranks.number)
    own = []  # parent, shared tokens and shared characters of each row of this process
    for parent, shared, ids, messages in zip(
        rows.parents, rows.shared, rows.completion_ids, rows.completions, strict=True
    ):
        number, characters = math.nan, math.nan
        if parent is not None:
            number = first + parent
        if messages is None:
            characters = len(policy.tokenizer.decode(ids[:shared], skip_special_tokens=True))  # decode like TRL
        own.append((number, shared, characters))
    origins: list[tuple[float, int, float]] = []  # of the real rows of all processes
    real: list[int] = []  # numbers of these rows in `logs`
    for process, of_process in enumerate(ranks.objects([own])):
        start = process * num_rows
        real.extend(range(start, start + len(of_process)))
        origins.extend(of_process)
    parents, prefix_tokens, prefix_characters = zip(*origins, strict=True)
    extra = {
        **_picked(logs["extra"], real),
        "parent": parents,
        "prefix_tokens": prefix_tokens,
        SHARED: prefix_characters,
    }
    texts = {"prompt": logs["prompt"], "completion": logs["completion"]}
    return {**_picked(texts, real), "rewards": _picked(logs["rewards"], real), "extra": extra}


def _picked(columns: Logs, numbers: list[int]) -> Logs:
    """Return the rows `numbers` of columns."""
    picked = {}
    for name, values in columns.items():
        picked[name] = [values[number] for number in numbers]
    return picked


def by_name(names: Sequence[str], rewards: torch.Tensor) -> dict[str, list[float]]:
    """Return the columns of rewards `(N, F)` by name. If functions share a name, return the column of the last one,
    like TRL's table."""
    return {name: rewards[:, i].tolist() for i, name in enumerate(names)}


def keep_one_reward_per_name(logs: Logs, names: Sequence[str], num_rows: int) -> None:
    """Reduce each column of rewards to one value per row in the `num_rows` newest rows of all processes. Drop the
    values of rows that a table of limited length has dropped."""
    for name in dict.fromkeys(names):
        column = logs["rewards"][name]
        written = names.count(name) * num_rows
        newest = list(column)[-num_rows:]  # values of the last function with this name
        for _ in range(min(written, len(column))):
            column.pop()
        column.extend(newest)
        while len(column) > len(logs["prompt"]):
            column.popleft()


def empty_logs(logs: Logs, *, maxlen: int | None = None) -> Logs:
    """Return a table without rows that has the columns of TRL's table `logs`. It keeps the `maxlen` newest rows, by
    default all rows."""
    column: Callable[[], deque] = partial(deque, maxlen=maxlen)
    empty: Logs = {}
    for name, values in logs.items():
        empty[name] = defaultdict(column) if isinstance(values, defaultdict) else column()
    return empty


def _concatenated(tables: Sequence[Logs], lengths: Sequence[int]) -> Logs:
    """Return the rows of all tables by column. `lengths` are the numbers of their rows. A column that a table lacks is
    None in its rows."""
    joined: Logs = {}
    for table in tables:
        for name in table:
            joined[name] = []
    for table, length in zip(tables, lengths, strict=True):
        for name, values in joined.items():
            values.extend(table.get(name, [None] * length))
    return joined


def _as_lists(logs: Any) -> Any:
    """Return nested columns with lists in place of deques."""
    if isinstance(logs, dict):
        return {name: _as_lists(values) for name, values in logs.items()}
    return list(logs)


def _joined_logs(first: Logs, second: Logs) -> Logs:
    """Return the rows of two tables. A column that only one of them has is None in the rows of the other."""
    joined: Logs = {}
    for name, values in first.items():
        if not isinstance(values, dict):
            joined[name] = [*values, *second[name]]
            continue
        joined[name] = _concatenated([values, second[name]], [len(first["prompt"]), len(second["prompt"])])
    return joined


def _fill(logs: Logs, columns: dict[str, Any]) -> None:
    """Append the rows of `columns` to a table."""
    for name, values in columns.items():
        if isinstance(values, dict):
            _fill(logs[name], values)
        else:
            logs[name].extend(values)


def _row_advantages(rows: RowDict) -> torch.Tensor:
    """Return one advantage per row, `(B,)`. If tokens have their own advantages, return their mean over trained
    tokens."""
    advantages, mask = rows["advantages"], loss_mask(rows)
    if advantages.dim() == 1:
        return advantages
    return (advantages * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
