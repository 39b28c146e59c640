"""What `regimes.py` found: admission, a table per regime, differences with intervals, and the picture of all.

Differences are paired by seed and problem. Intervals are 95 %: the wider of Student's over seeds and a bootstrap over
seeds and problems, where problems about the same fact are drawn together.
"""

import json
import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from regimes import Arm, Regime, asked_for
from regimes_results import COSTS, Row, read_results, timed_alike, to_runs

from trl_explore.compare.costs import interval, mean_along, value_at
from trl_explore.compare.run import TRAINING, Run
from trl_explore.compare.settings import Comparison, read_comparison
from trl_explore.evaluation.metrics import pass_at_k
from trl_explore.tasks.vaults import FactTask, item_of

COST_NAMES = {
    "step": "optimizer steps",
    "tokens": "generated tokens",
    "trained_tokens": "tokens in the loss",
    "cpu_seconds": "CPU seconds",
}
PASS = re.compile(r"pass_at_(\d+)")
INTRODUCTION = """# When does exploration pay?

Made by `python examples/benchmarks/regimes.py report` from `results/*.csv`. Arms are tuned and judged by the mean
along their curves, which also tells which of two that end alike rose earlier. Differences are in points, paired by
seed and problem; intervals are 95 %, the wider of Student's over seeds and a bootstrap over seeds and problems (those
of one fact together). **Bold** ones exclude 0. Tokens in the loss count rows without advantage for GRPO, whose loss
computes them, and not for branches, where they are left out. Seconds are those of runs in one sitting on the first
fresh seed, for as many tokens, where all arms have one.
"""


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
    """

    mean: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.mean:+.1f} (one seed)"
        text = f"{self.mean:+.1f} [{self.low:+.1f}, {self.high:+.1f}]"
        return f"**{text}**" if self.clear else text

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

    @property
    def metrics(self) -> list[str]:
        """What was measured."""
        return list(self.comparison.metrics)

    @property
    def costs(self) -> dict[str, str]:
        """Costs that may be equal: where a GPU computes, its seconds are those of the wall."""
        if self.regime.comparison.get("common", {}).get("use_cpu", True):
            return COST_NAMES
        return {name: text for name, text in COST_NAMES.items() if name != "cpu_seconds"} | {"seconds": "seconds"}

    @property
    def seconds(self) -> str:
        """The cost that is equal where runs are compute-matched."""
        return list(self.costs)[-1]

    def facts(self) -> list[Hashable] | None:
        """The item that each held-out problem is about, where there are such."""
        task = self.comparison.task
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
            [`Effect`] or `None`: Over the seeds that both have, if there are any.
        """
        runs = to_runs(self.rows, stage)
        by_arm = {name: {run.seed: run for run in runs if run.arm == name} for name in (arm, base)}
        seeds = sorted(by_arm[arm].keys() & by_arm[base].keys())
        if not seeds:
            return None
        pairs = [(by_arm[arm][seed], by_arm[base][seed]) for seed in seeds]
        reading = min(run.points[-1][cost] for pair in pairs for run in pair)
        read = mean_along if along else value_at
        values = [[read(self.curve(run, metric), cost, reading, metric) for run in pair] for pair in pairs]
        gaps = 100 * np.array([ours - theirs for ours, theirs in values])  # (S, P)
        mean, half = interval(gaps.mean(axis=1).tolist())
        if half is None:
            return Effect(mean)
        groups = self.facts()
        low, high = crossed_interval(gaps, groups=groups if groups and len(groups) == gaps.shape[1] else None)
        return Effect(mean, min(low, mean - half), max(high, mean + half))

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

    @property
    def admitted(self) -> bool:
        """Whether they clearly help."""
        found = self.admission()
        return found is not None and found.clear and found.mean > 0

    def settings(self, arm: Arm) -> str:
        """The tuned fields of an arm."""
        row = next(row for row in self.rows if row["stage"] == "verdict" and row["arm"] == arm["name"])
        found = json.loads(row["options"])
        return ", ".join(f"{name} {found[name]}" for name in ("learning_rate", *arm["knob"]))


def label(metric: str) -> str:
    """A metric as tables show it."""
    return metric.removesuffix("_accuracy").replace("_at_", "@")


def table(results: Results) -> list[str]:
    """
    A regime's section.

    Args:
        results ([`Results`]):
            The regime and its results.

    Returns:
        `list[str]`: Lines of Markdown.
    """
    regime, found = results.regime, results.admission()
    lines = [f"## {regime.name}", "", regime.claim.strip(), ""]
    if found is not None:
        more = "admitted" if results.admitted else "optimisation-limited: more samples do not help clearly"
        lines += [
            f"{more[0].upper()}{more[1:]}. {regime.arms[1]['name']} against {results.base} over "
            f"{regime.admission_steps} steps, {label(regime.metric)} along the curve: {found}",
            "",
        ]
    runs = to_runs(results.rows, "verdict")
    shown = [arm for arm in regime.arms if any(run.arm == arm["name"] for run in runs)]
    if not shown:
        return lines
    columns = [*map(label, results.metrics), "entropy", "no contrast", *COSTS, "seeds"]
    lines += [f"| at the end | settings | {' | '.join(columns)} |", f"| --- | --- |{' ---: |' * len(columns)}"]
    for arm in shown:
        ends = [run.points[-1] for run in runs if run.arm == arm["name"]]
        names = [f"eval/{name}" for name in results.metrics] + [f"train/{name}" for name in TRAINING]
        values = {name: np.mean([end[name] for end in ends]) for name in names}
        cells = [f"{v:.2f}" if name == "train/entropy" else f"{100 * v:.1f}" for name, v in values.items()]
        cells += [f"{np.mean([end[name] for end in ends]):,.0f}" for name in COSTS]
        lines.append(f"| {arm['name']} | {results.settings(arm)} | {' | '.join(cells)} | {len(ends)} |")
    costs = list(results.costs.items())
    kinds = [(regime.metric, cost, True) for cost, _ in costs] + [(m, "tokens", False) for m in results.metrics]
    titles = [f"{label(regime.metric)} along, equal {text}" for _, text in costs]
    titles += [f"{label(metric)} at the end, equal generated tokens" for metric in results.metrics]
    lines += ["", f"| difference | {' | '.join(titles)} |", f"| --- |{' --- |' * len(kinds)}"]
    pairs = [(arm["name"], results.base) for arm in shown[1:]]
    pairs += [(arm["of"], arm["name"]) for arm in shown if arm["role"] == "control"]
    for ours, theirs in pairs:
        found = [results.effect(ours, theirs, metric=m, cost=c, along=along) for m, c, along in kinds]
        lines.append(f"| {ours} - {theirs} | {' | '.join(map(str, found))} |")
    return [*lines, ""]


def verdicts(results: list[Results]) -> list[str]:
    """
    What each method does to GRPO and to its controls, in one sentence per cost.

    Args:
        results (`list`):
            Regimes with their results; those that are not admitted say nothing about a method.

    Returns:
        `list[str]`: Lines of Markdown.
    """
    admitted = [found for found in results if found.admitted]
    if not admitted:
        return []
    seconds = admitted[0].seconds
    duration = admitted[0].costs[seconds]
    head = " | ".join(f"{of.regime.name}: {label(of.regime.metric)}" for of in admitted)
    cells, sentences = [], []
    for method in dict.fromkeys(arm["name"] for of in admitted for arm in of.regime.arms if arm["role"] == "method"):
        found = {
            cost: {of.regime.name: of.effect(method, of.base, metric=of.regime.metric, cost=cost) for of in admitted}
            for cost in ("tokens", seconds)
        }
        controls = {
            f"{of.regime.name}, {arm['name']}": of.effect(method, arm["name"], metric=of.regime.metric, cost="tokens")
            for of in admitted
            for arm in of.regime.arms
            if arm.get("of") == method
        }
        pairs = zip(found["tokens"].values(), found[seconds].values(), strict=True)
        texts = [f"{matched} / {timed}" if matched else "-" for matched, timed in pairs]
        cells.append(f"| {method} | {' | '.join(texts)} |")
        own = [
            _verdict("Against GRPO at equal generated tokens", found["tokens"]),
            _verdict(f"At equal {duration}", found[seconds]),
            _verdict("Against its controls at equal generated tokens", controls),
        ]
        if any(own):
            sentences.append(f"- **{method}.** {' '.join(filter(None, own))}")
    return [
        "## Verdicts",
        "",
        "Means along the curves in admitted regimes, against GRPO: at equal generated tokens (sample-matched), and at "
        f"equal {duration} (compute-matched).",
        "",
        f"| | {head} |",
        f"| --- |{' --- |' * len(admitted)}",
        *cells,
        "",
        *sentences,
        "",
    ]


def _verdict(title: str, effects: dict[str, Effect | None]) -> str:
    """A sentence; empty where nothing was measured."""
    parts: dict[str, list[str]] = {"clearly ahead": [], "clearly behind": [], "neither clearly": []}
    for where, found in effects.items():
        if found is not None:
            kind = "neither clearly" if not found.clear else f"clearly {'ahead' if found.mean > 0 else 'behind'}"
            parts[kind].append(f"{where} {str(found).strip('*')}")
    words = "; ".join(f"{kind} in {', '.join(places)}" for kind, places in parts.items() if places)
    return f"{title}: {words}." if words else ""


def picture(results: list[Results], path: Path) -> None:
    """
    Methods by regimes, coloured by effect.

    Args:
        results (`list`):
            Regimes with their results.
        path (`Path`):
            The PNG file.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    methods = list(dict.fromkeys(arm["name"] for r in results for arm in r.regime.arms if arm["role"] == "method"))
    seconds = results[0].seconds
    panels = {
        "tokens": "generated tokens (sample-matched)",
        seconds: f"{results[0].costs[seconds]} (compute-matched)",
    }
    size = (2.2 * len(results) + 2.5, 1.6 * len(methods) + 2.5)
    figure, axes = pyplot.subplots(len(panels), 1, figsize=size)
    for axis, (cost, title) in zip(axes, panels.items(), strict=True):
        grid = np.full((len(methods), len(results)), np.nan)
        for column, of_regime in enumerate(results):
            for row, method in enumerate(methods):
                found = of_regime.effect(method, of_regime.base, metric=of_regime.regime.metric, cost=cost)
                if found is not None:
                    grid[row, column] = found.mean
                    text = str(found).strip("*").replace(" ", "\n", 1)
                    weight = "bold" if found.clear else "normal"
                    axis.text(column, row, text, ha="center", va="center", fontsize=8, weight=weight)
        axis.imshow(grid, cmap="PuOr", vmin=-50, vmax=50, aspect="auto")
        names = []
        for of_regime in results:
            limited = ["optimisation-limited"] * (not of_regime.admitted)
            names.append("\n".join([of_regime.regime.name, label(of_regime.regime.metric), *limited]))
        axis.set_xticks(range(len(results)), names, fontsize=8)
        axis.set_yticks(range(len(methods)), methods, fontsize=9)
        axis.set_title(f"mean along the curve, points more than GRPO at equal {title}; bold: clear of 0", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def report(regimes: list[Regime], path: Path) -> None:
    """
    Writes a Markdown file and the picture.

    Args:
        regimes (`list`):
            Regimes; those without results are left out.
        path (`Path`):
            The files, without their suffix.
    """
    results = []
    for regime in regimes:
        rows, stale = [], set()
        for row in read_results(regime.path):
            if asked_for(regime, row):
                rows.append(row)
            else:
                stale.add((row["arm"], row["seed"]))
        results.append(Results(regime, timed_alike(rows)))
        if results[-1].rows is rows and regime.seeds_of("seconds"):
            print(f"{regime.path.name}: seconds are of runs at different times; `train {regime.name}` times all alike")
        if stale:
            names = ", ".join(sorted({arm for arm, _ in stale}))
            print(f"{regime.path.name}: {len(stale)} runs are not of the regime as it is now and left out: {names}")
    measured = [found for found in results if found.admission() is not None]
    if not measured:
        raise SystemExit("no results yet: run `regimes.py train` first")
    lines = [*verdicts(measured), *(line for found in measured for line in table(found))]
    path.with_suffix(".md").write_text("\n".join([INTRODUCTION, *lines]), encoding="utf-8")
    picture(measured, path.with_suffix(".png"))
    print(f"{path}.md, {path}.png")
