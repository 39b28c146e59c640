"""What model cards tell of a trainer's log: main metrics, and results of evaluations."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from trl_explore.methods import METHODS

# What the card of every method says of the training: name of a logged metric to its meaning.
COMMON_METRICS = {
    "reward": "mean reward, as the reward functions gave it",
    "frac_reward_zero_std": "groups whose completions all got the same reward",
    "entropy": "mean token entropy, nats",
    "completions/mean_length": "tokens per completion",
}

# What `PassAtKCallback` and the trainer's own evaluation log, under any prefix.
_EVALUATED = re.compile(r"(?:(.+)/)?(?:(pass|maj|coverage)_at_(\d+)|(greedy_accuracy))$|eval_reward$")


class Metric(NamedTuple):
    """A row of the table of metrics: a logged `name`, its `meaning`, and its `first` and `last` value as text."""

    name: str
    meaning: str
    first: str
    last: str


def logged_metrics(method: str, history: Iterable[Mapping[str, Any]]) -> list[str]:
    """Names of what the training curves show: the method's main metrics and the evaluations', as far as they were
    logged."""
    names = dict.fromkeys(name for entry in history for name, value in entry.items() if _is_number(value))
    return [*_main_metrics(method, names)] + [name for name in names if _EVALUATED.match(name)]


def metric_rows(method: str, history: Sequence[Mapping[str, Any]]) -> list[Metric]:
    """First and last values of the method's main metrics that were logged while training."""
    rows = []
    logged = dict.fromkeys(name for entry in history for name, value in entry.items() if _is_number(value))
    for name, meaning in _main_metrics(method, logged).items():
        values = [entry[name] for entry in history if _is_number(entry.get(name))]
        rows.append(Metric(name, meaning, format_number(values[0]), format_number(values[-1])))
    return rows


def _main_metrics(method: str, logged: Iterable[str]) -> dict[str, str]:
    """Return name and meaning of the logged metrics that the card of a method shows. These are GRPO's metrics, and the
    metrics in `card_metrics` of the method."""
    row = METHODS[method]
    chosen = row.metrics if row.card_metrics is None else row.card_metrics
    known = COMMON_METRICS | {name: row.metrics[name] for name in chosen}
    shown: dict[str, str] = {}
    for name, meaning in known.items():
        for one in logged:
            # `explore/share/...` means every logged metric whose name begins with `explore/share/`.
            if one == name or name in chosen and name.endswith("/...") and one.startswith(name.removesuffix("...")):
                shown.setdefault(one, row.metrics.get(one, meaning))
    return shown


def training_seconds(history: Iterable[Mapping[str, Any]]) -> float:
    """Seconds that a run's steps took, also one interrupted and resumed, without evaluation and saving; `step_time` in
    the log is a mean over the steps since the entry before."""
    seconds, before = 0.0, 0
    for entry in history:
        if _is_number(entry.get("step_time")):
            seconds += entry["step_time"] * (entry["step"] - before)
            before = entry["step"]
    return seconds


def evaluation_results(history: Iterable[Mapping[str, Any]]) -> tuple[dict[str, float], int]:
    """Values by name (`"pass@1"`, `"maj@8"`, `"greedy accuracy"`, `"reward"`) and step of the newest evaluation in a
    log; nothing and 0 where there was none."""
    results: dict[str, float] = {}
    newest = 0
    for entry in history:
        matches = {name: _EVALUATED.match(name) for name, value in entry.items() if _is_number(value)}
        found = {_result_name(match): entry[name] for name, match in matches.items() if match}
        if found:
            # A callback and the trainer's own evaluation log the same step one after the other.
            results = results | found if entry["step"] == newest else found
            newest = int(entry["step"])
    return results, newest


def _result_name(match: re.Match) -> str:
    prefix, kind, k, greedy = match.groups()
    name = f"{kind}@{k}" if kind else ("greedy accuracy" if greedy else "reward")
    return name if prefix in (None, "eval") else f"{prefix} {name}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def format_duration(seconds: float) -> str:
    """A time as cards show it, such as `1 h 20 min`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{format(seconds, '.2g')} s"


def format_number(value: float) -> str:
    """A value as cards show it, with four significant digits."""
    return format(value, ".4g")
