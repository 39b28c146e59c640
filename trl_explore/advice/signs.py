"""Numbers from the logs of a run: means over the first and the last eighth of its logged steps."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from trl_explore.errors import UsageError
from trl_explore.methods import logged_by_a_method
from trl_explore.rewards.threshold import threshold_note

STATE = "trainer_state.json"
SHARE = 8  # the first and the last 1 / SHARE of the steps are the start and the end of a run
FEWEST_STEPS = 8
CHECKPOINT = re.compile(r"checkpoint-(\d+)")
REWARD = re.compile(r"rewards/(.+)/mean")
PASS = re.compile(r"eval/pass_at_(\d+)")
# Metrics of the field `explore`; the name of a source of rows follows.
CONTRAST_PER_TOKEN, SHARE_EXPLORED, SOLVED = "explore/contrast_per_token/", "explore/share/", "explore/solved/"
METHOD_MARK = "method/changed_hooks"  # logged by every trainer that is not plain GRPO
ROUNDING = 1e-6  # of a logged reward
# Rewards of 0 and 1 with mean m have variance m (1 - m), times N / (N - 1) over N completions. A log that averages
# several batches shows less. Below these shares of m (1 - m), some rewards lie between 0 and 1.
LEAST_VARIANCE, LEAST_VARIANCE_OF_AVERAGES = 0.4, 0.25
MOST_VARIANCE = 1.5  # above this share, some rewards are below 0 or above 1


class Pair(NamedTuple):
    """A value at the start of a run and at its end."""

    start: float
    end: float


@dataclass(frozen=True)
class Signs:
    """
    Numbers from the logs of a run.

    Args:
        steps (`int`):
            The last logged step.
        values (`dict[str, Pair]`):
            Logged values by name, at the start and at the end.
        pass_at (`dict[int, Pair]`):
            Pass@k by k, at the first evaluation and at the last.
        all_wrong (`Pair`, *optional*):
            Share of groups in which every completion has a reward of at most 0, from the completions tables. None
            if [`shares_of_groups`] returns None.
        all_right (`Pair`, *optional*):
            Share of groups in which every completion has a reward of at least 1. None if `all_wrong` is None.
        plain (`bool`, *optional*, defaults to `True`):
            True if it is a run of GRPO: the trainer changes none of GRPO's steps.
        same_reward (`float`, *optional*):
            The reward that all completions of the run got. None if rewards differ.
        zero_or_one (`bool`, *optional*, defaults to `True`):
            False if the logs show rewards other than 0 and 1: graded ones, penalties or another scale.
        unpaid (`tuple[str, ...]`, *optional*, defaults to `()`):
            Names of reward functions that gave 0 to every completion, if there are several functions.
        threshold (`str`, *optional*):
            Note on a success threshold that no completion reached, or that every completion reached.
        sources (`dict[str, Pair]`, *optional*, defaults to `{}`):
            Groups with contrast per generated token by source of rows, in a run with the field `explore`. The start
            of a source is its first use.
        explored (`Pair`, *optional*):
            Share of the prompts that a run with the field `explore` explored.
        explored_in_all (`float`, *optional*):
            The same share over all logged steps.
        solved (`dict[str, Pair]`, *optional*, defaults to `{}`):
            Share of the explored prompts that were solved, by explorer. The start of an explorer is its first use.
    """

    steps: int
    values: dict[str, Pair]
    pass_at: dict[int, Pair]
    all_wrong: Pair | None = None
    all_right: Pair | None = None
    plain: bool = True
    same_reward: float | None = None
    zero_or_one: bool = True
    unpaid: tuple[str, ...] = ()
    threshold: str | None = None
    sources: dict[str, Pair] = field(default_factory=dict)
    explored: Pair | None = None
    explored_in_all: float | None = None
    solved: dict[str, Pair] = field(default_factory=dict)

    @property
    def unscored(self) -> bool:
        """True if no logged step has a reward."""
        return "reward" not in self.values

    @property
    def can_learn(self) -> bool:
        """True if there are rewards, and they differ."""
        return not self.unscored and self.same_reward is None

    @property
    def entropy_left(self) -> float | None:
        """Entropy at the end divided by the entropy at the start, at most 1. None if it is not logged."""
        entropy = self.values.get("entropy")
        if entropy is None or entropy.start <= 0:
            return None
        return min(1.0, entropy.end / entropy.start)

    @property
    def contrast_cost(self) -> Pair | None:
        """Tokens of all of GRPO's completions, divided by the number of completions in groups with contrast.

        None if a metric is not logged, or if no group has contrast at the start or at the end. None too if the run
        used `dynamic_sampling`, or a method that generates tokens which `completions/mean_length` does not count.
        """
        length, equal = self.values.get("completions/mean_length"), self.values.get("frac_reward_zero_std")
        samples_more = "selection/discarded_tokens" in self.values or not (self.plain or self.sources)
        if samples_more or length is None or equal is None or max(equal) >= 1:
            return None
        return Pair(length.start / (1 - equal.start), length.end / (1 - equal.end))

    def wrong_share(self, end: str) -> float | None:
        """
        Return the share of the groups without contrast whose completions are all wrong.

        Args:
            end (`str`):
                `"start"` or `"end"` of the run.

        Returns:
            `float` or `None`: The counted share, if the completions tables tell wrong from right. Else an estimate
            from the mean reward, which assumes that half of the completions in groups with contrast are right. None
            if the mean reward is above 1, so that it does not tell wrong from right, or if all groups have contrast.
        """
        if self.all_wrong is not None and self.all_right is not None:
            wrong, right = getattr(self.all_wrong, end), getattr(self.all_right, end)
            return wrong / (wrong + right) if wrong + right > 0 else None
        equal, reward = getattr(self.values["frac_reward_zero_std"], end), getattr(self.values["reward"], end)
        if reward > 1 or equal <= 0:
            return None
        reward_with_contrast = (1 - equal) / 2
        right = min(max(reward - reward_with_contrast, 0.0), equal)
        return (equal - right) / equal


def read_signs(path: Path) -> Signs:
    """
    Read the logs of a run.

    Args:
        path (`Path`):
            A run's `output_dir`, a checkpoint in it, or a `trainer_state.json`.

    Returns:
        [`Signs`]: Numbers from its logs, and from its completions tables if `log_completions=True` wrote some.

    Raises:
        `UsageError`: If there is no `trainer_state.json`, it cannot be read, or it holds too few steps.
    """
    state = find_state(path)
    try:
        history = json.loads(state.read_text(encoding="utf-8"))["log_history"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{str(state)!r} is no state that a trainer wrote ({error!r}); pass another run") from error
    signs = signs_of(history, name=str(state))
    tables = state.parent / "completions"
    if not tables.is_dir() and CHECKPOINT.fullmatch(state.parent.name):
        tables = state.parent.parent / "completions"
    names = _reward_names([signs.values])
    if not tables.is_dir() or not _all_weights_are_one(history, names):
        return signs
    shares = shares_of_groups(tables, names)
    if shares is None:
        return signs
    wrong, right = shares
    values = dict(signs.values)
    logged = _numbers(history, "frac_reward_zero_std")
    if logged and set(logged) <= {0.0, 1.0}:
        # With `scale_rewards="batch"`, TRL logs 0 if any group of the batch has contrast, and else 1. So count groups.
        values["frac_reward_zero_std"] = Pair(wrong.start + right.start, wrong.end + right.end)
    return replace(signs, values=values, all_wrong=wrong, all_right=right)


def find_state(path: Path) -> Path:
    """Return the newest `trainer_state.json` of a run."""
    if path.is_file():
        return path
    if not path.is_dir():
        raise UsageError(f"{str(path)!r} does not exist; pass a run's output_dir, or a checkpoint in it")
    numbered = []
    for child in path.iterdir():
        found = CHECKPOINT.fullmatch(child.name)
        if found:
            numbered.append((int(found[1]), child))
    newest_first = [child for _, child in sorted(numbered, reverse=True)]
    for place in [path, *newest_first]:
        if (place / STATE).is_file():
            return place / STATE
    for child in sorted(path.iterdir()):
        if child.name.startswith("_"):  # `_earlier-1` holds files of a run that another one has replaced
            continue
        if (child / STATE).is_file() or list(child.glob(f"checkpoint-*/{STATE}")):
            raise UsageError(f"{str(path)!r} is no run; pass a run in it, for example {str(child)!r}")
    raise UsageError(
        f"{str(path)!r} holds no {STATE}, nor do its checkpoints; every checkpoint has one: set `save_steps`"
    )


def signs_of(history: Sequence[Mapping[str, Any]], *, name: str = "the run") -> Signs:
    """Return the numbers of a `log_history`. `name` is its name in error messages. Raise a UsageError if it has too
    few training steps."""
    steps = [entry for entry in history if "reward" in entry and "completions/mean_length" in entry]
    if len(steps) < FEWEST_STEPS:
        raise UsageError(
            f"{name!r} holds {len(steps)} logged training steps, too few to say anything: {FEWEST_STEPS} are needed; "
            "train longer, or lower `logging_steps`"
        )
    part = max(1, len(steps) // SHARE)
    names = set()
    for entry in steps:
        names |= {key for key, value in entry.items() if isinstance(value, int | float)}
    values = {}
    for key in names:
        pair = Pair(_mean(steps[:part], key), _mean(steps[-part:], key))
        if not any(map(math.isnan, pair)):
            values[key] = pair
    shares = _explored_shares(steps)
    return Signs(
        steps=int(steps[-1].get("step", len(steps))),
        values=values,
        pass_at=_pass_at(history),
        plain=METHOD_MARK not in names and not any(logged_by_a_method(name) for name in names),
        same_reward=_same_reward(steps),
        zero_or_one=_may_be_zero_or_one(steps),
        unpaid=_unpaid(steps),
        threshold=threshold_note(steps),
        sources=_by_source(steps, CONTRAST_PER_TOKEN, part),
        explored=Pair(fmean(shares[:part]), fmean(shares[-part:])) if shares else None,
        explored_in_all=fmean(shares) if shares else None,
        solved=_by_source(steps, SOLVED, part),
    )


def _pass_at(history: Sequence[Mapping[str, Any]]) -> dict[int, Pair]:
    """Return pass@k of the first and the last evaluation, by k. Leave out values of k that were evaluated only
    once."""
    known: dict[int, list[float]] = {}
    for entry in history:
        for key, value in entry.items():
            found = PASS.fullmatch(key)
            if found:
                known.setdefault(int(found[1]), []).append(value)
    pairs = {}
    for k in sorted(known):
        if len(known[k]) > 1:
            pairs[k] = Pair(known[k][0], known[k][-1])
    return pairs


def _reward_names(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the reward functions whose means are logged."""
    names = set()
    for entry in entries:
        for key in entry:
            found = REWARD.fullmatch(key)
            if found:
                names.add(found[1])
    return sorted(names)


def _all_weights_are_one(history: Sequence[Mapping[str, Any]], names: Sequence[str]) -> bool:
    """Return whether the logged reward is the sum of the rewards of all functions. If it is not, `reward_weights` are
    set, or some completions have no reward."""
    for entry in history:
        total = _numbers([entry], "reward")
        means = []
        for name in names:
            means += _numbers([entry], f"rewards/{name}/mean")
        if not total or len(means) < len(names):  # a reward is None if no completion of the batch has one
            continue
        if abs(total[0] - sum(means)) > 1e-4 * max(1.0, abs(total[0])):
            return False
    return True


def _by_source(steps: Sequence[Mapping[str, Any]], prefix: str, part: int) -> dict[str, Pair]:
    """Return means of the first and the last `part` logged values of each metric that begins with `prefix`, by the
    rest of its name."""
    pairs = {}
    for key in sorted({key for entry in steps for key in entry if key.startswith(prefix)}):
        values = _numbers(steps, key)
        if values:
            pairs[key.removeprefix(prefix)] = Pair(fmean(values[:part]), fmean(values[-part:]))
    return pairs


def _explored_shares(steps: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the share of the prompts that all explorers together explored, for each step that logs it."""
    totals = []
    for entry in steps:
        shares = [value for key, value in entry.items() if key.startswith(SHARE_EXPLORED)]
        if shares:
            totals.append(sum(shares))
    return totals


def _numbers(entries: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    """Return the logged values of `key`, without missing values and NaN."""
    values = [entry[key] for entry in entries if isinstance(entry.get(key), int | float)]
    return [float(value) for value in values if not math.isnan(value)]


def _mean(entries: Sequence[Mapping[str, Any]], key: str) -> float:
    known = _numbers(entries, key)
    return fmean(known) if known else math.nan


def _same_reward(steps: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the reward that every completion got; None if rewards differ, or if the logs do not say so."""
    means, deviations = _numbers(steps, "reward"), _numbers(steps, "reward_std")
    if not means or max(means) - min(means) > ROUNDING:
        return None
    if deviations:
        return means[0] if max(deviations) <= ROUNDING else None
    shares_without_contrast = _numbers(steps, "frac_reward_zero_std")
    all_equal = bool(shares_without_contrast) and min(shares_without_contrast) == 1
    return means[0] if all_equal or means[0] == 0 else None


def _may_be_zero_or_one(steps: Sequence[Mapping[str, Any]]) -> bool:
    """Return False if the means and deviations of the rewards show that some rewards are neither 0 nor 1."""
    if any(not 0 <= mean <= 1 for mean in _numbers(steps, "reward")):
        return False
    known = [entry for entry in steps if _numbers([entry], "reward") and _numbers([entry], "reward_std")]
    variance_if_zero_or_one = sum(entry["reward"] * (1 - entry["reward"]) for entry in known)
    variance = sum(entry["reward_std"] ** 2 for entry in known)
    if variance_if_zero_or_one <= ROUNDING:
        return variance <= ROUNDING
    step_numbers = [entry.get("step") for entry in steps]
    first = step_numbers[0] or 0
    every_step = step_numbers == list(range(first, first + len(step_numbers)))  # so no entry averages several batches
    least = LEAST_VARIANCE if every_step else LEAST_VARIANCE_OF_AVERAGES
    return least <= variance / variance_if_zero_or_one <= MOST_VARIANCE


def _unpaid(steps: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the reward functions that gave 0 to every completion, if there are several functions."""
    names = _reward_names(steps)
    unpaid = []
    for name in names:
        means, deviations = _numbers(steps, f"rewards/{name}/mean"), _numbers(steps, f"rewards/{name}/std")
        if means and not any(means) and not any(deviations):
            unpaid.append(name)
    if len(names) < 2:
        return ()
    return tuple(unpaid)


def shares_of_groups(folder: Path, rewards: Sequence[str]) -> tuple[Pair, Pair] | None:
    """
    Return the shares of groups that are all wrong, and all right, at both ends of a run.

    Args:
        folder (`Path`):
            Completions tables of the run.
        rewards (`Sequence[str]`):
            Names of the reward functions; their sum is a completion's reward.

    Returns:
        `tuple[Pair, Pair]` or `None`: None if there are fewer than two tables, if a column is missing, or if no
        completion at one of the ends has a reward. None too if the rewards do not show which completions are wrong.
        That is the case if a reward lies between 0 and 1, if there are several different rewards of at most 0, or
        several different rewards of at least 1.
    """
    import pandas

    files = sorted(folder.glob("completions_*.parquet"))
    if len(files) < 2 or not rewards:
        return None
    part = max(1, len(files) // SHARE)
    wrong, right = [], []
    values: set[float] = set()
    for files_of_end in (files[:part], files[-part:]):
        table = pandas.concat([pandas.read_parquet(file) for file in files_of_end])
        if not {"step", "prompt", *rewards} <= set(table.columns):
            return None
        totals = table[list(rewards)].astype(float).sum(axis=1, min_count=1)  # NaN for a completion without a reward
        total = table.assign(prompt=table["prompt"].astype(str), total=totals).dropna(subset="total")
        if total.empty:
            return None
        values |= set(total["total"].unique().tolist())
        groups = total.groupby(["step", "prompt"])["total"].agg(["min", "max"])
        wrong.append(float((groups["max"] <= 0).mean()))
        right.append(float((groups["min"] >= 1).mean()))
    num_low, num_high = sum(value <= 0 for value in values), sum(value >= 1 for value in values)
    num_between = len(values) - num_low - num_high
    if num_low > 1 or num_high > 1 or num_between > 0:
        return None
    return Pair(*wrong), Pair(*right)
