"""Results of a regime: differences between arms with intervals, admission, and places on the frontier.

Differences are paired by seed and problem. A 95 % interval is the wider of two intervals: Student's over seeds, and a
bootstrap over seeds and problems. The bootstrap samples all problems about the same fact together.
"""

import json
import re
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
from regimes_frontier import Place, place
from regimes_plan import Arm, Regime, tuning_stages
from regimes_results import END_SUCCESSES, Row, to_runs

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
    """
    Return the 95 % bootstrap interval of a mean over seeds and prompts. Seeds and prompts are resampled independently.

    With few seeds the interval is too narrow. If Student's interval over seeds is wider, use Student's.

    Args:
        values (`np.ndarray` of shape `(S, P)`):
            A value per seed and prompt.
        groups (`Sequence[Hashable]`, *optional*):
            Group of each prompt. Prompts of a group are resampled together. By default, each prompt is a group.
        num_resamples (`int`, *optional*, defaults to `10000`):
            Number of bootstrap resamples.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the bootstrap.

    Returns:
        `tuple[float, float]`: Lower and upper end.

    Raises:
        ValueError: If `values` has another shape or is empty.
    """
    if values.ndim != 2 or not values.size:
        raise ValueError(f"values must have shape (seeds, prompts) and not be empty, got {values.shape}.")
    num_seeds, num_prompts = values.shape
    group_of_prompt = list(range(num_prompts)) if groups is None else list(groups)
    members = []  # by group: 1 for each prompt of the group, 0 for other prompts
    for group in dict.fromkeys(group_of_prompt):
        members.append([float(other == group) for other in group_of_prompt])
    num_groups = len(members)
    random = np.random.default_rng(seed)
    # Number of times that each seed and each group occurs in a resample.
    seed_counts = random.multinomial(num_seeds, np.full(num_seeds, 1 / num_seeds), num_resamples)  # (R, S)
    group_counts = random.multinomial(num_groups, np.full(num_groups, 1 / num_groups), num_resamples)  # (R, G)
    prompt_counts = group_counts @ np.array(members)  # (R, P)
    means_of_prompts = seed_counts / num_seeds @ values  # (R, P)
    means = (means_of_prompts * prompt_counts).sum(axis=1) / prompt_counts.sum(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


@dataclass(frozen=True)
class Effect:
    """
    Difference between two arms in a metric.

    Args:
        mean (`float`):
            Mean difference in percentage points. For a reward, 100 times the mean difference.
        low (`float`, *optional*):
            Lower end of the 95 % interval. None for a single seed.
        high (`float`, *optional*):
            Upper end of the 95 % interval. None for a single seed.
        seeds (`int`, *optional*, defaults to `3`):
            Number of seeds. With two seeds, admission uses the interval, but reports do not show it.
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
        """True if reports show the interval."""
        return self.low is not None and self.seeds >= FEWEST_SEEDS

    @property
    def clear(self) -> bool:
        """True if there is an interval and it excludes 0."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


@dataclass(frozen=True)
class Results:
    """
    A regime with its results.

    Args:
        regime ([`~regimes_plan.Regime`]):
            The regime.
        rows (`list[dict]`):
            Lines of its results file.
    """

    regime: Regime
    rows: list[Row]

    @property
    def base(self) -> str:
        """Name of the baseline."""
        return self.regime.arms[0]["name"]

    @cached_property
    def comparison(self) -> Comparison:
        """Settings that `trl-explore compare` reads from the regime. `common` and `model_size` are left out, so that
        the settings of a regime for a GPU can be read on a machine without one."""
        given = {name: value for name, value in self.regime.comparison.items() if name not in ("common", "model_size")}
        return read_comparison({**given, "arms": [{"method": "grpo"}]})

    @cached_property
    def ends(self) -> list[Ends]:
        """Pass@k at large k, and problems newly solved and lost: of the model before training, then of every arm.
        Empty if a verdict run has no `samples_at_ends` samples at its end."""
        runs = [asdict(run) for run in to_runs(self.rows, "verdict")]
        count = self.comparison.samples_at_ends
        if count is None or not runs or not all(run["points"][-1].get(END_SUCCESSES) for run in runs):
            return []
        measured = {run["arm"] for run in runs}
        names = [arm["name"] for arm in self.regime.arms if arm["name"] in measured]
        return summarize_ends(runs, names, count)

    @property
    def metrics(self) -> list[str]:
        """Names of the measured metrics."""
        return list(self.comparison.metrics)

    @property
    def costs(self) -> dict[str, str]:
        """Costs at which arms are compared, with their titles. The last one is CPU seconds, or wall seconds for a
        regime that runs on a GPU."""
        if self.regime.comparison.get("common", {}).get("use_cpu", True):
            return COST_NAMES
        return {name: text for name, text in COST_NAMES.items() if name != "cpu_seconds"} | {"seconds": "wall seconds"}

    @property
    def seconds(self) -> str:
        """Name of the cost that measures time: `"cpu_seconds"`, or `"seconds"` for a regime that runs on a GPU."""
        return list(self.costs)[-1]

    def problem_items(self) -> list[Hashable] | None:
        """Return the item that each held-out problem is about. All problems about an item depend on the same fact.
        None if the task has no items."""
        task = self.comparison.task and self.comparison.task.task
        if not isinstance(task, FactTask):
            return None
        return [item_of(problem) for problem in task.evaluation_set(self.comparison.num_eval)["problem"]]

    def effect(
        self, arm: str, base: str, *, metric: str, cost: str, along: bool = True, stage: str = "verdict"
    ) -> Effect | None:
        """
        Return the difference between two arms at equal cost.

        Args:
            arm (`str`):
                Name of the arm.
            base (`str`):
                Name of the arm that is subtracted.
            metric (`str`):
                Name of the metric.
            cost (`str`):
                Cost that is equal: as much as the shortest run of the two arms spent.
            along (`bool`, *optional*, defaults to `True`):
                Whether to compare the means along the learning curves. If False, the values at the equal cost.
            stage (`str`, *optional*, defaults to `"verdict"`):
                Stage of the runs.

        Returns:
            [`Effect`] or `None`: The difference over the seeds that both arms have. None if there is no such seed, or
            if one of the runs spent nothing. A run spends no tokens in the loss if no group had contrast.
        """
        runs = to_runs(self.rows, stage)
        ours = {run.seed: run for run in runs if run.arm == arm}
        theirs = {run.seed: run for run in runs if run.arm == base}
        seeds = sorted(ours.keys() & theirs.keys())
        if not seeds:
            return None
        reading = min(min(ours[seed].points[-1][cost], theirs[seed].points[-1][cost]) for seed in seeds)
        if reading <= 0:
            return None
        read = mean_along if along else value_at
        differences = []
        for seed in seeds:
            our_value = read(self.curve(ours[seed], metric), cost, reading, metric)
            their_value = read(self.curve(theirs[seed], metric), cost, reading, metric)
            differences.append(our_value - their_value)
        return self._effect(differences)

    def _effect(self, differences: list[np.ndarray]) -> Effect:
        """Return the mean of differences, given as one array per seed with a difference per problem, and the wider of
        the two 95 % intervals."""
        values = 100 * np.array(differences)  # (S, P)
        num_seeds, num_problems = values.shape
        mean, half = interval(values.mean(axis=1).tolist(), fewest=2)
        if half is None:
            return Effect(mean, seeds=num_seeds)
        groups = self.problem_items()
        if groups is not None and len(groups) != num_problems:
            groups = None  # the metric is not known by problem
        low, high = crossed_interval(values, groups=groups)
        return Effect(mean, min(low, mean - half), max(high, mean + half), num_seeds)

    def curve(self, run: Run, metric: str) -> list[dict[str, Any]]:
        """Return the points of a run with a metric as an array with a value per problem. If the successes per problem
        are not known, the array has one value, the mean."""
        points = []
        for point in run.points:
            points.append({**point, metric: self._values_by_problem(point, metric)})
        return points

    def _values_by_problem(self, point: dict[str, Any], metric: str) -> np.ndarray:
        """Return a metric of one evaluation as an array, as described at `curve`."""
        pass_at = PASS.fullmatch(metric)
        if metric == "greedy_accuracy" and point["greedy_correct"]:
            return np.array(point["greedy_correct"], dtype=float)
        if pass_at and point["correct"]:
            num_samples, k = self.comparison.num_samples, int(pass_at[1])
            return np.array([pass_at_k(num_samples, count, k) for count in point["correct"]])
        return np.array([point[f"eval/{metric}"]])

    def admission(self) -> Effect | None:
        """Return how much GRPO gains from four times the samples per prompt, at equal steps. None if the admission was
        not measured."""
        more, metric = self.regime.arms[1]["name"], self.regime.metric
        return self.effect(more, self.base, metric=metric, cost="step", stage="admission")

    def collapse(self) -> tuple[str, Effect, Effect] | None:
        """
        Return how the variety of GRPO changes during training, at the setting that was tuned for variety.

        Returns:
            `tuple[str, Effect, Effect]` or `None`: Name of the arm, the variety at the end minus the variety at the
            start, and the variety at the end minus the variety at its peak. The cost at which variety peaks comes from
            runs with the same options on the development seeds. None if the stage *collapse* was not run.
        """
        runs, metric = to_runs(self.rows, "collapse"), self.regime.variety
        if not runs or metric is None:
            return None
        options = next(row["options"] for row in self.rows if row["stage"] == "collapse")
        rows_with_options = [row for row in self.rows if row["options"] == options]
        development_runs = []
        for stage in (*tuning_stages("baseline"), *tuning_stages("rival")):
            development_runs += to_runs(rows_with_options, stage)
        peak_cost = self._peak_cost(development_runs, metric)
        curves = [self.curve(run, metric) for run in runs]

        def change_since(cost: float) -> Effect:
            return self._effect([curve[-1][metric] - value_at(curve, "tokens", cost, metric) for curve in curves])

        return runs[0].arm, change_since(0.0), change_since(peak_cost)

    def _peak_cost(self, runs: list[Run], metric: str) -> float:
        """Return the number of generated tokens at which the mean metric of runs is highest. Only the costs at which
        evaluations are due are compared."""
        num_evaluations, budget = self.comparison.evaluations, self.comparison.amount
        costs = [index * budget / num_evaluations for index in range(num_evaluations + 1)]
        means = []
        for cost in costs:
            means.append(np.mean([value_at(run.points, "tokens", cost, f"eval/{metric}") for run in runs]))
        return costs[int(np.argmax(means))]

    @cached_property
    def limits(self) -> list[str]:
        """Reasons to admit the regime: `"samples"` if more samples clearly help GRPO, and `"variety"` if its variety
        clearly falls. Empty if neither holds."""
        limits = []
        more_samples, collapse = self.admission(), self.collapse()
        if more_samples is not None and more_samples.clear and more_samples.mean > 0:
            limits.append("samples")
        if collapse is not None:
            _, since_start, since_peak = collapse
            if any(change.clear and change.mean < 0 for change in (since_start, since_peak)):
                limits.append("variety")
        return limits

    @property
    def admitted(self) -> bool:
        """True if GRPO is limited by samples or by variety, so exploration may help."""
        return bool(self.limits)

    def measured_arms(self, *roles: str) -> list[str]:
        """Return the names of the arms with one of these roles that have verdict runs."""
        measured = {row["arm"] for row in self.rows if row["stage"] == "verdict"}
        return [arm["name"] for arm in self.regime.arms if arm["role"] in roles and arm["name"] in measured]

    @property
    def frontier_metrics(self) -> tuple[str, str] | None:
        """The two metrics of the frontier. One is pass@1; if it is not measured, greedy accuracy or an agent's reward.
        The other is the regime's metric of variety. None if one of the two is missing, or if the metric of variety is
        itself pass@1, greedy accuracy or reward."""
        firsts = [name for name in ("pass_at_1", "greedy_accuracy", "reward") if name in self.metrics]
        if not firsts or self.regime.variety in (None, *firsts):
            return None
        return firsts[0], str(self.regime.variety)

    def places(self) -> dict[str, tuple[Place, str]]:
        """
        Return the places of methods and controls relative to the frontier of GRPO and its rivals.

        Returns:
            `dict[str, tuple[Place, str]]`: By arm, its place and the name of the closest rival. Empty if the regime
            has no frontier metrics, no rival was measured, or verdict runs are missing.
        """
        metrics = self.frontier_metrics
        frontier_arms = [self.base, *self.measured_arms("rival")]
        if metrics is None or len(frontier_arms) < 2 or not self._has_all_verdict_runs():
            return {}
        fresh_ends, development_ends = [], []
        for name in frontier_arms:
            fresh_ends.append(self._verdict_ends(name, metrics))
            development_ends.append(self._development_ends(name, metrics))
        places = {}
        for name in self.measured_arms("method", "control"):
            found = place(
                self._verdict_ends(name, metrics),
                np.stack(fresh_ends),
                development_arm=self._development_ends(name, metrics),
                development_others=np.stack(development_ends),
            )
            places[name] = found, frontier_arms[found.rival]
        return places

    def _has_all_verdict_runs(self) -> bool:
        """Return whether every arm has a verdict run on every seed."""
        measured = {(row["arm"], row["seed"]) for row in self.rows if row["stage"] == "verdict"}
        seeds = self.regime.seeds_of("verdict")
        return all((arm["name"], seed) in measured for arm in self.regime.arms for seed in seeds)

    def _verdict_ends(self, name: str, metrics: tuple[str, str]) -> np.ndarray:
        """Return metrics of an arm at the end of its verdict runs, with shape `(seeds, 2)`."""
        ends = {run.seed: run.points[-1] for run in to_runs(self.rows, "verdict") if run.arm == name}
        return _metric_array([ends[seed] for seed in self.regime.seeds_of("verdict")], metrics)

    def _development_ends(self, name: str, metrics: tuple[str, str]) -> np.ndarray:
        """Return metrics of an arm at the end of the tuning runs with its best setting, with shape `(seeds, 2)`."""
        role = next(arm["role"] for arm in self.regime.arms if arm["name"] == name)
        options = next(row["options"] for row in self.rows if row["stage"] == "verdict" and row["arm"] == name)
        rows = [row for row in self.rows if row["arm"].startswith(f"{name}: ") and row["options"] == options]
        ends = {}
        for stage in tuning_stages(role):
            for run in to_runs(rows, stage):
                ends[run.seed] = run.points[-1]
        return _metric_array([ends[seed] for seed in self.regime.seeds_of("rates")], metrics)

    def settings(self, arm: Arm) -> str:
        """Return the tuned fields of an arm as text, with their best values."""
        row = next(row for row in self.rows if row["stage"] == "verdict" and row["arm"] == arm["name"])
        options = json.loads(row["options"])
        return ", ".join(f"{name} {options[name]}" for name in ("learning_rate", *arm["knob"]))


def _metric_array(points: Sequence[dict[str, Any]], metrics: Sequence[str]) -> np.ndarray:
    """Return metrics of evaluations, with shape `(evaluations, metrics)`."""
    return np.array([[point[f"eval/{metric}"] for metric in metrics] for point in points])


def label(metric: str) -> str:
    """Return the name of a metric as tables show it, such as `pass@16` or `greedy`."""
    return metric.removesuffix("_accuracy").replace("_at_", "@")
