"""Metrics and evaluation results that model cards show, read from a trainer's log."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from trl_explore.methods import METHODS

# Metrics on the card of every method: name in the log, and meaning.
COMMON_METRICS = {
    "reward": "mean reward, as the reward functions gave it",
    "frac_reward_zero_std": "groups whose completions all got the same reward",
    "entropy": "mean token entropy, nats",
    "completions/mean_length": "tokens per completion",
}

# Metrics that `PassAtKCallback` logs under any prefix, without its reward, and the reward of the trainer's own
# evaluation, `eval_reward`. The groups are the prefix, the kind, k, and the greedy accuracy.
_EVALUATED = re.compile(r"(?:(.+)/)?(?:(pass|maj|coverage)_at_(\d+)|(greedy_accuracy))$|eval_reward$")


class Metric(NamedTuple):
    """A row of the table of metrics: a logged `name`, its `meaning`, and its `first` and `last` value as text."""

    name: str
    meaning: str
    first: str
    last: str


def logged_metrics(method: str, history: Iterable[Mapping[str, Any]]) -> list[str]:
    """
    Return the metrics that the training curves show.

    Args:
        method (`str`):
            Name of the method.
        history (`Iterable[Mapping]`):
            The trainer's `state.log_history`.

    Returns:
        `list[str]`: Names of the logged main metrics of the method, then of the logged evaluation metrics.
    """
    names = _numeric_names(history)
    return [*_main_metrics(method, names), *filter(_EVALUATED.match, names)]


def metric_rows(method: str, history: Sequence[Mapping[str, Any]]) -> list[Metric]:
    """
    Return the first and last values of the method's main metrics in the training log.

    Args:
        method (`str`):
            Name of the method.
        history (`Sequence[Mapping]`):
            The trainer's `state.log_history`.

    Returns:
        `list[Metric]`: One row per logged main metric.
    """
    rows = []
    for name, meaning in _main_metrics(method, _numeric_names(history)).items():
        values = [entry[name] for entry in history if _is_number(entry.get(name))]
        rows.append(Metric(name, meaning, format_number(values[0]), format_number(values[-1])))
    return rows


def _numeric_names(history: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of the finite numbers in a log, in the order of their first entries."""
    names: dict[str, None] = {}
    for entry in history:
        names |= {name: None for name, value in entry.items() if _is_number(value)}
    return list(names)


def _main_metrics(method: str, logged: Iterable[str]) -> dict[str, str]:
    """Return name and meaning of the logged metrics that the card of a method shows: GRPO's metrics, and the metrics
    in `card_metrics` of the method (all its metrics if that is None)."""
    row = METHODS[method]
    chosen: Iterable[str] = row.metrics
    if row.card_metrics is not None:
        chosen = row.card_metrics
    known = COMMON_METRICS | {name: row.metrics[name] for name in chosen}
    shown: dict[str, str] = {}
    for name, meaning in known.items():
        prefix = None
        if name.endswith("/..."):  # `explore/share/...` means every metric that begins with `explore/share/`
            prefix = name.removesuffix("...")
        for metric in logged:
            if metric == name or (prefix is not None and metric.startswith(prefix)):
                shown.setdefault(metric, row.metrics.get(metric, meaning))
    return shown


def training_seconds(history: Iterable[Mapping[str, Any]]) -> float:
    """
    Return the seconds that the training steps of a run took, without evaluation and saving.

    Args:
        history (`Iterable[Mapping]`):
            The trainer's `state.log_history`, which also has the steps before a resumption.

    Returns:
        `float`: Seconds.
    """
    seconds, last_step = 0.0, 0
    for entry in history:
        if _is_number(entry.get("step_time")):
            # `step_time` is the mean over the steps since the last log entry.
            seconds += entry["step_time"] * (entry["step"] - last_step)
            last_step = entry["step"]
    return seconds


def evaluation_results(history: Iterable[Mapping[str, Any]]) -> tuple[dict[str, float], int]:
    """
    Return the results of the last evaluation in a log.

    Args:
        history (`Iterable[Mapping]`):
            The trainer's `state.log_history`.

    Returns:
        `tuple[dict[str, float], int]`: Values by name (`"pass@1"`, `"maj@8"`, `"greedy accuracy"`, `"reward"`), and
        the step. Empty and 0 if there was no evaluation.
    """
    results: dict[str, float] = {}
    last_step = 0
    for entry in history:
        found = {}
        for name, value in entry.items():
            match = _EVALUATED.match(name)
            if match and _is_number(value):
                found[_result_name(match)] = value
        if found:
            # A callback and the trainer's own evaluation may both log results of the same step. Keep both.
            if entry["step"] != last_step:
                results = {}
            results |= found
            last_step = int(entry["step"])
    return results, last_step


def _result_name(match: re.Match) -> str:
    """Return the name of a result on the card. Prefixes other than `eval` stay, to tell several callbacks apart."""
    prefix, kind, k, greedy = match.groups()
    name = "reward"
    if kind:
        name = f"{kind}@{k}"
    elif greedy:
        name = "greedy accuracy"
    if prefix in (None, "eval"):
        return name
    return f"{prefix} {name}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def format_duration(seconds: float) -> str:
    """Format seconds as text, such as `1 h 20 min`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    if minutes:
        return f"{minutes} min {rest} s"
    return f"{format(seconds, '.2g')} s"


def format_number(value: float) -> str:
    """Format a number with four significant digits."""
    return format(value, ".4g")
