"""What the logs of a run show: at its beginning and at its end, an eighth of its logged steps each."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from trl_explore.runs.inputs import UsageError

STATE = "trainer_state.json"
SHARE = 8  # beginning and end are one of so many parts
FEWEST_STEPS = 8
CHECKPOINT = re.compile(r"checkpoint-(\d+)")
REWARD = re.compile(r"rewards/(.+)/mean")
PASS = re.compile(r"eval/pass_at_(\d+)")
# First parts of names that only our methods log.
MARKS = ("tree/", "pivots/", "sketch/", "geometry/", "novelty/", "branch/", "steps/", "votes/")


class Pair(NamedTuple):
    """A value at the beginning of a run and at its end."""

    start: float
    end: float


@dataclass(frozen=True)
class Signs:
    """
    What a run shows.

    Args:
        steps (`int`):
            Its last logged step.
        values (`dict[str, Pair]`):
            Logged values by name, at the beginning and at the end.
        pass_at (`dict[int, Pair]`):
            Pass@k by k, at the first evaluation and at the last.
        all_wrong (`Pair`, *optional*):
            Share of groups whose completions are all worth 0 or less, from the completions tables.
        all_right (`Pair`, *optional*):
            Share of groups whose completions are all worth 1 or more.
        plain (`bool`, *optional*, defaults to `True`):
            Whether it is a run of GRPO: no method of this package logged anything.
    """

    steps: int
    values: dict[str, Pair]
    pass_at: dict[int, Pair]
    all_wrong: Pair | None = None
    all_right: Pair | None = None
    plain: bool = True

    @property
    def agent(self) -> bool:
        """Whether tools were called."""
        return "tools/call_frequency" in self.values

    @property
    def entropy_left(self) -> float | None:
        """Entropy at the end over that of the beginning, at most 1."""
        entropy = self.values.get("entropy")
        return None if entropy is None or entropy.start <= 0 else min(1.0, entropy.end / entropy.start)

    @property
    def place(self) -> tuple[float, ...] | None:
        """What resemblance is measured by: reward and share of groups without contrast, at both ends, and the entropy
        left. None where one is not logged, or rewards are not between 0 and 1."""
        reward, equal, left = self.values.get("reward"), self.values.get("frac_reward_zero_std"), self.entropy_left
        if reward is None or equal is None or left is None or not all(0 <= value <= 1 for value in reward):
            return None
        return (*reward, *equal, left)


def read_signs(path: Path) -> Signs:
    """
    Reads a run.

    Args:
        path (`Path`):
            A run's `output_dir`, a checkpoint in it, or a `trainer_state.json`.

    Returns:
        [`Signs`]: What its logs show; of its completions tables too, where `log_completions` wrote some.

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
    rewards = [found[1] for name in signs.values if (found := REWARD.fullmatch(name))]
    shares = shares_of_groups(tables, rewards) if tables.is_dir() else None
    return signs if shares is None else replace(signs, all_wrong=shares[0], all_right=shares[1])


def find_state(path: Path) -> Path:
    """The newest `trainer_state.json` of a run."""
    if path.is_file():
        return path
    if not path.is_dir():
        raise UsageError(f"{str(path)!r} does not exist; pass a run's output_dir, or a checkpoint in it")
    numbered = [(int(found[1]), child) for child in path.iterdir() if (found := CHECKPOINT.fullmatch(child.name))]
    places = [path, *(child for _, child in sorted(numbered, reverse=True))]
    for place in places:
        if (place / STATE).is_file():
            return place / STATE
    raise UsageError(
        f"{str(path)!r} holds no {STATE}, nor do its checkpoints; every checkpoint has one: set `save_steps`"
    )


def signs_of(history: Sequence[Mapping[str, Any]], *, name: str = "the run") -> Signs:
    """What a `log_history` shows; `name` is what messages call it. UsageError if it holds too few training steps."""
    steps = [entry for entry in history if "reward" in entry and "completions/mean_length" in entry]
    if len(steps) < FEWEST_STEPS:
        raise UsageError(
            f"{name!r} holds {len(steps)} logged training steps of GRPO, too few to say anything: {FEWEST_STEPS} are "
            "needed; train longer, or lower `logging_steps`"
        )
    part = max(1, len(steps) // SHARE)
    names = {key for entry in steps for key, value in entry.items() if isinstance(value, int | float)}
    values = {}
    for key in names:
        pair = Pair(_mean(steps[:part], key), _mean(steps[-part:], key))
        if not any(map(math.isnan, pair)):
            values[key] = pair
    evaluated = [entry for entry in history if any(PASS.fullmatch(key) for key in entry)]
    ks = {int(found[1]) for entry in evaluated for key in entry if (found := PASS.fullmatch(key))}
    pass_at = {
        k: Pair(known[0], known[-1])
        for k in sorted(ks)
        if len(known := [entry[f"eval/pass_at_{k}"] for entry in evaluated if f"eval/pass_at_{k}" in entry]) > 1
    }
    plain = not any(name.startswith(MARKS) for name in names)
    return Signs(steps=int(steps[-1].get("step", len(steps))), values=values, pass_at=pass_at, plain=plain)


def _mean(entries: Sequence[Mapping[str, Any]], key: str) -> float:
    known = [float(entry[key]) for entry in entries if isinstance(entry.get(key), int | float)]
    return fmean(known) if known else math.nan


def shares_of_groups(folder: Path, rewards: Sequence[str]) -> tuple[Pair, Pair] | None:
    """Shares of groups that are all wrong, and all right, at both ends of a run, by its completions tables and the sum
    of the named rewards; None where there are no such tables."""
    import pandas

    files = sorted(folder.glob("completions_*.parquet"))
    if len(files) < 2 or not rewards:
        return None
    part = max(1, len(files) // SHARE)
    wrong, right = [], []
    for some in (files[:part], files[-part:]):
        table = pandas.concat([pandas.read_parquet(file) for file in some])
        if not {"step", "prompt", *rewards} <= set(table.columns):
            return None
        total = table.assign(prompt=table["prompt"].astype(str), total=table[list(rewards)].sum(axis=1))
        groups = total.groupby(["step", "prompt"])["total"].agg(["min", "max"])
        wrong.append(float((groups["max"] <= 0).mean()))
        right.append(float((groups["min"] >= 1).mean()))
    return Pair(*wrong), Pair(*right)
