"""What a regime's results say: differences with intervals, admissions, and places on the frontier.

Differences are paired by seed and problem. Intervals are 95 %: the wider of Student's over seeds and a bootstrap over
seeds and problems, where problems about the same fact are drawn together.
"""

import json
import re
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
from regimes_frontier import Place, place
from regimes_plan import Arm, Regime, tuning
from regimes_results import MANY, Row, to_runs

from trl_explore.compare.costs import FEWEST_SEEDS, interval, mean_along, value_at
from trl_explore.compare.ends import Ends, summarize_ends
from trl_explore.compare.run import Run
from trl_explore.compare.settings import Comparison, read_comparison
from trl_explore.evaluation.metrics import pass_at_k
from trl_explore.tasks.doors import FactTask, item_of

COST_NAMES = {
    "step": "optimizer steps",
    "tokens": "generated tokens",
    "trained_tokens": "tokens in the loss",
    "cpu_seconds": "CPU seconds",
}
PASS = re.compile(r"pass_at_(\d+)")


def crossed_interval(
    values: np.ndarray,
    *,
    groups: Sequence[Hashable] | None = None,
    num_resamples: int = 10_000,
    seed: int = 0,
) -> tuple[float, float]:
    """95 % bootstrap interval of a mean over seeds and prompts, `(S, P)`, both drawn anew, independently; prompts of
    one of `groups` together. Few seeds make it too narrow: where Student's over the seeds is wider, take that."""
    if values.ndim != 2 or not values.size:
        raise ValueError(f"values must have shape (seeds, prompts) and not be empty, got {values.shape}.")
    random = np.random.default_rng(seed)
    names = list(range(values.shape[1])) if groups is None else list(groups)
    members = np.array([[name == other for name in names] for other in dict.fromkeys(names)], dtype=float)  # (G, P)
    seeds, drawn = (random.multinomial(n, np.full(n, 1 / n), num_resamples) for n in (len(values), len(members)))
    prompts = drawn @ members  # (R, P)
    means = ((seeds / len(values) @ values) * prompts).sum(axis=1) / prompts.sum(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


@dataclass(frozen=True)
class Effect:
    """
    How much more one arm has than another.

    Args:
        mean (`float`):
            Mean difference, in points of a hundred (for rewards: times 100).
        low (`float`, *optional*):
            Lower end of its interval; a single seed has none.
        high (`float`, *optional*):
            Upper end.
        seeds (`int`, *optional*, defaults to `3`):
            Seeds that it is a mean over. From fewer than three, admission still reads the interval, but no report
            shows it.
    """

    mean: float
    low: float | None = None
    high: float | None = None
    seeds: int = FEWEST_SEEDS

    def __str__(self) -> str:
        if not self.has_interval:
            return f"{self.mean:+.1f} ({'one seed' if self.seeds == 1 else 'two seeds'})"
        text = f"{self.mean:+.1f} [{self.low:+.1f}, {self.high:+.1f}]"
        return f"**{text}**" if self.clear else text

    @property
    def has_interval(self) -> bool:
        """Whether reports show an interval."""
        return self.low is not None and self.seeds >= FEWEST_SEEDS

    @property
    def clear(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


@dataclass(frozen=True)
class Results:
    """
    A regime and what was measured of it.

    Args:
        regime ([`~regimes.Regime`]):
            The regime.
        rows (`list[dict]`):
            Its results.
    """

    regime: Regime
    rows: list[Row]

    @property
    def base(self) -> str:
        """Name of the baseline."""
        return self.regime.arms[0]["name"]

    @cached_property
    def comparison(self) -> Comparison:
        """What `trl-explore compare` makes of the regime's file, whatever device it is for."""
        given = {name: value for name, value in self.regime.comparison.items() if name not in ("common", "model_size")}
        return read_comparison({**given, "arms": [{"method": "grpo"}]})

    @cached_property
    def ends(self) -> list[Ends]:
        """What training changed at many samples: the start, then every arm. Empty where it was not measured."""
        runs = [asdict(run) for run in to_runs(self.rows, "verdict")]
        count = self.comparison.samples_at_ends
        if count is None or not runs or not all(run["points"][-1].get(MANY) for run in runs):
            return []
        names = [arm["name"] for arm in self.regime.arms if any(run["arm"] == arm["name"] for run in runs)]
        return summarize_ends(runs, names, count)

    @property
    def metrics(self) -> list[str]:
        """What was measured."""
        return list(self.comparison.metrics)

    @property
    def costs(self) -> dict[str, str]:
        """Costs that may be equal: where a GPU computes, its seconds are those of the wall."""
        if self.regime.comparison.get("common", {}).get("use_cpu", True):
            return COST_NAMES
        return {name: text for name, text in COST_NAMES.items() if name != "cpu_seconds"} | {"seconds": "wall seconds"}

    @property
    def seconds(self) -> str:
        """The cost that is equal where runs are compute-matched."""
        return list(self.costs)[-1]

    def facts(self) -> list[Hashable] | None:
        """The item that each held-out problem is about, where there are such."""
        task = self.comparison.task and self.comparison.task.task
        if not isinstance(task, FactTask):
            return None
        return [item_of(problem) for problem in task.evaluation_set(self.comparison.num_eval)["problem"]]

    def effect(
        self, arm: str, base: str, *, metric: str, cost: str, along: bool = True, stage: str = "verdict"
    ) -> Effect | None:
        """
        What one arm has more than another at equal cost.

        Args:
            arm (`str`):
                One arm.
            base (`str`):
                The other.
            metric (`str`):
                What is compared.
            cost (`str`):
                Which cost is equal: as much as the run among theirs that got least far.
            along (`bool`, *optional*, defaults to `True`):
                Whether the means along both curves are compared, or their ends.
            stage (`str`, *optional*, defaults to `"verdict"`):
                Which runs.

        Returns:
            [`Effect`] or `None`: Over the seeds that both have, if there are any, and none of their runs stopped at a
            cost of 0 (a run in which no token got into the loss).
        """
        runs = to_runs(self.rows, stage)
        by_arm = {name: {run.seed: run for run in runs if run.arm == name} for name in (arm, base)}
        seeds = sorted(by_arm[arm].keys() & by_arm[base].keys())
        if not seeds:
            return None
        pairs = [(by_arm[arm][seed], by_arm[base][seed]) for seed in seeds]
        reading = min(run.points[-1][cost] for pair in pairs for run in pair)
        if reading <= 0:
            return None
        read = mean_along if along else value_at
        values = [[read(self.curve(run, metric), cost, reading, metric) for run in pair] for pair in pairs]
        return self._effect([ours - theirs for ours, theirs in values])

    def _effect(self, gaps: list[np.ndarray]) -> Effect:
        """A mean over seeds of differences by problem, in points, with the wider of two intervals."""
        values = 100 * np.array(gaps)  # (S, P)
        mean, half = interval(values.mean(axis=1).tolist(), fewest=2)
        if half is None:
            return Effect(mean, seeds=len(values))
        groups = self.facts()
        low, high = crossed_interval(values, groups=groups if groups and len(groups) == values.shape[1] else None)
        return Effect(mean, min(low, mean - half), max(high, mean + half), len(values))

    def curve(self, run: Run, metric: str) -> list[dict[str, Any]]:
        """A run's curve with the metric by problem, where its successes are known, else as an array of one value."""
        num_samples = self.comparison.num_samples

        def values(point: dict[str, Any]) -> np.ndarray:
            found = PASS.fullmatch(metric)
            if metric == "greedy_accuracy" and point["greedy_correct"]:
                return np.array(point["greedy_correct"], dtype=float)
            if found and point["correct"]:
                return np.array([pass_at_k(num_samples, count, int(found[1])) for count in point["correct"]])
            return np.array([point[f"eval/{metric}"]])

        return [{**point, metric: values(point)} for point in run.points]

    def admission(self) -> Effect | None:
        """What four times the samples per prompt add to plain GRPO at equal steps."""
        more, metric = self.regime.arms[1]["name"], self.regime.metric
        return self.effect(more, self.base, metric=metric, cost="step", stage="admission")

    def collapse(self) -> tuple[str, Effect, Effect] | None:
        """GRPO, tuned for variety: its arm, and how much variety it ends with more than it began with, and than it had
        where it had most on the development seeds."""
        runs, metric = to_runs(self.rows, "collapse"), self.regime.variety
        if not runs or metric is None:
            return None
        first = next(row for row in self.rows if row["stage"] == "collapse")
        tuned = [
            run
            for stage in (*tuning("baseline"), *tuning("rival"))
            for run in to_runs([row for row in self.rows if row["options"] == first["options"]], stage)
        ]
        count, amount = self.comparison.evaluations, self.comparison.amount
        heights = [
            np.mean([value_at(run.points, "tokens", share * amount / count, f"eval/{metric}") for run in tuned])
            for share in range(count + 1)
        ]
        peak = int(np.argmax(heights)) * amount / count

        def since(cost: float) -> Effect:
            curves = [self.curve(run, metric) for run in runs]
            return self._effect([c[-1][metric] - value_at(c, "tokens", cost, metric) for c in curves])

        return runs[0].arm, since(0.0), since(peak)

    @cached_property
    def limits(self) -> list[str]:
        """What GRPO clearly lacks: `"samples"`, `"variety"`, both or nothing."""
        found, lost = self.admission(), self.collapse()
        samples = found is not None and found.clear and found.mean > 0
        variety = lost is not None and any(effect.clear and effect.mean < 0 for effect in lost[1:])
        return ["samples"] * samples + ["variety"] * variety

    @property
    def admitted(self) -> bool:
        """Whether exploration has something to give."""
        return bool(self.limits)

    def named(self, *roles: str) -> list[str]:
        """The measured arms of some roles."""
        measured = {row["arm"] for row in self.rows if row["stage"] == "verdict"}
        return [arm["name"] for arm in self.regime.arms if arm["role"] in roles and arm["name"] in measured]

    @property
    def axes(self) -> tuple[str, str] | None:
        """The two metrics of the frontier: pass@1, greedy accuracy or an agent's reward, and what counts variety."""
        firsts = [name for name in ("pass_at_1", "greedy_accuracy", "reward") if name in self.metrics]
        if not firsts or self.regime.variety in (None, *firsts):
            return None
        return firsts[0], str(self.regime.variety)

    def places(self) -> dict[str, tuple[Place, str]]:
        """Where methods lie, and which rival is closest; nothing where rivals, or seeds, were not measured."""
        regime, axes, others = self.regime, self.axes, [self.base, *self.named("rival")]
        fresh, development = regime.seeds_of("verdict"), regime.seeds_of("rates")
        measured = {(row["arm"], row["seed"]) for row in self.rows if row["stage"] == "verdict"}
        complete = all((arm["name"], seed) in measured for arm in regime.arms for seed in fresh)
        if axes is None or len(others) < 2 or not complete:
            return {}

        def ends(name: str) -> tuple[np.ndarray, np.ndarray]:
            role = next(arm["role"] for arm in regime.arms if arm["name"] == name)
            options = next(row["options"] for row in self.rows if row["stage"] == "verdict" and row["arm"] == name)
            own = [row for row in self.rows if row["arm"].startswith(f"{name}: ")]
            first = {
                run.seed: run.points[-1]
                for stage in tuning(role)
                for run in to_runs([row for row in own if row["options"] == options], stage)
            }
            early = [[first[seed][f"eval/{axis}"] for axis in axes] for seed in development]
            last = {run.seed: run.points[-1] for run in to_runs(self.rows, "verdict") if run.arm == name}
            return np.array([[last[seed][f"eval/{axis}"] for axis in axes] for seed in fresh]), np.array(early)

        rivals, first_rivals = (np.stack(values) for values in zip(*map(ends, others), strict=True))
        found = {}
        for name in self.named("method", "control"):
            late, early = ends(name)
            where = place(late, rivals, first_arm=early, first_others=first_rivals)
            found[name] = where, others[where.rival]
        return found

    def settings(self, arm: Arm) -> str:
        """The tuned fields of an arm."""
        row = next(row for row in self.rows if row["stage"] == "verdict" and row["arm"] == arm["name"])
        found = json.loads(row["options"])
        return ", ".join(f"{name} {found[name]}" for name in ("learning_rate", *arm["knob"]))


def label(metric: str) -> str:
    """A metric as tables show it."""
    return metric.removesuffix("_accuracy").replace("_at_", "@")
