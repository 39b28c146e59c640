"""The table of `log_completions=True`: columns of the method, and the rows of every stream."""

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

Logs = dict[str, Any]  # a table as TRL keeps it: lists of values by column


class CompletionsTable:
    """Puts columns of the method, and a row for every row that is trained, into TRL's completions table. Rows of
    evaluation are kept by themselves; they stand in the table of the step that was evaluated."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.streams: dict[str, Logs] = {}
        self.evaluated: Logs = {}
        self._before = 0  # rows of earlier rounds of the batch
        self._known_columns: set[str] = set()  # that reward functions logged in these rounds
        self._in_rounds = False
        self._evaluated_at: int | None = None

    def begin(self, logs: Logs) -> Logs:
        """TRL's table without rows, for a generation batch that is sampled in rounds: it takes those of all."""
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
        """Put the rows of a generation batch into TRL's table, which has the main rows: the method's columns `[B]`,
        and the streams' rows by name, which alone have the columns `of_streams`. Every process calls it."""
        ranks = self.policy.ranks
        columns = {**columns, **dict.fromkeys(of_streams, [math.nan] * len(output["advantages"]))}
        per_process = ranks.objects([columns])
        for name in columns:
            logs["extra"][name].extend(value for found in per_process for value in found[name])
        found = {
            name: {
                **scored.logged,
                "advantages": ranks.gather(_row_advantages(scored.rows))[ranks.gather(scored.real)].tolist(),
            }
            for name, scored in streams.items()
        }
        if not self._in_rounds:
            self.streams = found
            return
        self.show_advantages(logs, output)
        num_rows = len(output["advantages"])
        self._fill_up(logs["extra"], num_rows * ranks.number)
        for name, logged in found.items():
            parents = [self._place(parent, num_rows) for parent in logged["extra"]["parent"]]
            logged["extra"] = {**logged["extra"], "parent": parents}
            self.streams[name] = _joined_logs(self.streams[name], logged) if name in self.streams else logged
        self._before += num_rows * ranks.number

    def show_advantages(self, logs: Logs, output: RowDict) -> None:
        """Put the advantages that the newest main rows are trained with in the place of TRL's."""
        advantages = self.policy.ranks.gather(_row_advantages(output)).tolist()
        for _ in advantages:
            logs["advantages"].pop()
        logs["advantages"].extend(advantages)

    def _fill_up(self, columns: Logs, num_rows: int) -> None:
        """Put None where a column lacks values of the `num_rows` newest rows, or of the rows of earlier rounds."""
        for name, values in columns.items():
            if name not in self._known_columns:
                values.extendleft([None] * self._before)
            elif len(values) == self._before:
                values.extend([None] * num_rows)
        self._known_columns = set(columns)

    def _place(self, parent: float, num_rows: int) -> float:
        """Where a main row stands if rounds of fewer rows were sampled before."""
        if math.isnan(parent):
            return parent
        rank, row = divmod(int(parent), self.policy.args.generation_batch_size // self.policy.ranks.number)
        return self._before + rank * num_rows + row

    def of_evaluation(self, logs: Logs, step: int) -> Logs:
        """Where rows of an evaluation at `step` are logged; `logs` is TRL's own table."""
        if self._evaluated_at != step:
            self._evaluated_at = step
            self.evaluated = empty_logs(logs, maxlen=self.policy.args.generation_batch_size)
            # TRL may write several values per row here: `one_reward_per_name` drops all but one, and old rows.
            self.evaluated["rewards"] = empty_logs(logs)["rewards"]
        return self.evaluated

    def one_reward_per_name(self, logs: Logs, num_rows: int) -> None:
        """Keep one value per row for reward functions that share a name, in the newest rows `num_rows` of every
        process. TRL writes one value per function into the same column, and the last function's values stay."""
        keep_one_reward_per_name(logs, self.policy.reward_func_names, num_rows * self.policy.ranks.number)

    def state(self, logs: Logs, step: int) -> dict[str, Any]:
        """What a checkpoint holds of the table."""
        parts = {"main": {**logs, "images": []}, "streams": self.streams}
        if self._evaluated_at == step:
            parts["eval"] = self.evaluated
        # Only texts and numbers stand in a table in the end; images are for those who follow a run live.
        return to_plain(_as_lists(parts), other=str)

    def load_state(self, state: dict[str, Any], logs: Logs, step: int) -> None:
        """Restore what `state` returned."""
        parts = from_plain(state)
        _fill(logs, parts["main"])
        self.streams = parts["streams"]
        if "eval" in parts:
            _fill(self.of_evaluation(logs, step), parts["eval"])

    def whole(self, main: Logs, step: int) -> Logs:
        """The main rows come first: the number of a row's parent is that of a row of the table."""
        parts = {"main": main, **self.streams}
        if self._evaluated_at == step:
            parts["eval"] = self.evaluated

        def joined(columns: list[Logs]) -> Logs:
            names = dict.fromkeys(name for part in columns for name in part)
            missing = [[None] * len(logs["prompt"]) for logs in parts.values()]
            return {
                name: [v for part, none in zip(columns, missing, strict=True) for v in part.get(name, none)]
                for name in names
            }

        plain = [{name: logs[name] for name in ("prompt", "completion", "advantages")} for logs in parts.values()]
        columns = joined(plain)
        for name in ("prompt", "completion"):
            columns[name] = [with_written_arguments(entry) for entry in columns[name]]
        return {
            **columns,
            "images": main["images"],
            "rewards": joined([logs["rewards"] for logs in parts.values()]),
            "extra": {
                "stream": [part for part, logs in parts.items() for _ in logs["prompt"]],
                **joined([logs["extra"] for logs in parts.values()]),
            },
        }


def with_written_arguments(entry: Any) -> Any:
    """
    Return a conversation with the arguments of its tool calls as JSON text; a text is returned as it is.

    A model may write any arguments: a number in one call and a word in the next, or none at all. A column of a Parquet
    file has one type, so that such calls cannot be written otherwise.
    """
    if not isinstance(entry, list):
        return entry
    written = []
    for message in entry:
        calls = message.get("tool_calls")
        written.append({**message, "tool_calls": [_written_call(call) for call in calls]} if calls else message)
    return written


def _written_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}}


def logged_rows(policy: Policy, logs: Logs, rows: Rows, num_rows: int) -> Logs:
    """What TRL has just logged of a stream's rows (`num_rows` of every process), without those that only pad, and
    `parent`, `prefix_tokens` and, of completions of one turn, `prefix_characters`. Every process calls it."""
    ranks = policy.ranks
    keep_one_reward_per_name(logs, policy.reward_func_names, num_rows * ranks.number)
    first = ranks.index * (policy.args.generation_batch_size // ranks.number)
    decode = partial(policy.tokenizer.decode, skip_special_tokens=True)  # as TRL decodes completions
    origins = [
        (
            math.nan if parent is None else first + parent,
            shared,
            len(decode(ids[:shared])) if messages is None else math.nan,
        )
        for parent, shared, ids, messages in zip(
            rows.parents, rows.shared, rows.completion_ids, rows.completions, strict=True
        )
    ]
    per_process = ranks.objects([origins])
    real = [i * num_rows + place for i, origins in enumerate(per_process) for place in range(len(origins))]

    def picked(columns: Logs) -> Logs:
        return {name: [values[i] for i in real] for name, values in columns.items()}

    parents, prefixes, characters = zip(*(origin for origins in per_process for origin in origins), strict=True)
    return {
        **picked({name: logs[name] for name in ("prompt", "completion")}),
        "rewards": picked(logs["rewards"]),
        "extra": {**picked(logs["extra"]), "parent": parents, "prefix_tokens": prefixes, SHARED: characters},
    }


def by_name(names: Sequence[str], rewards: torch.Tensor) -> dict[str, list[float]]:
    """Columns of rewards `(N, F)` by name. Of functions that share a name, the last one's, as in TRL's table."""
    return {name: rewards[:, i].tolist() for i, name in enumerate(names)}


def keep_one_reward_per_name(logs: Logs, names: Sequence[str], num_rows: int) -> None:
    """Let each column of rewards have one value for each of the `num_rows` newest rows of all processes, and none for
    rows that a limited table has dropped."""
    for name in dict.fromkeys(names):
        column = logs["rewards"][name]
        written = names.count(name) * num_rows
        newest = list(column)[-num_rows:]
        for _ in range(min(written, len(column))):
            column.pop()
        column.extend(newest)
        while len(column) > len(logs["prompt"]):
            column.popleft()


def empty_logs(logs: Logs, *, maxlen: int | None = None) -> Logs:
    """A table with the same columns as TRL keeps it, without rows, for the `maxlen` newest (all by default)."""
    column: Callable[[], deque] = partial(deque, maxlen=maxlen)
    return {name: defaultdict(column) if isinstance(logs[name], defaultdict) else column() for name in logs}


def _as_lists(logs: Any) -> Any:
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
        empty = [[None] * len(logs["prompt"]) for logs in (first, second)]
        columns = dict.fromkeys([*values, *second[name]])
        joined[name] = {
            column: [*values.get(column, empty[0]), *second[name].get(column, empty[1])] for column in columns
        }
    return joined


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
