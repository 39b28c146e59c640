"""What `regimes.py` found: admission, a table per regime, verdicts with intervals, and the picture of all.

Intervals are 95 %: the wider of Student's over seeds and a bootstrap over seeds and problems, which all arms share.
Differences are paired by seed and problem.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from regimes import COSTS, Regime, folder, read_results, results_path, to_runs

from trl_explore.clocks import interval, mean_along, value_at
from trl_explore.comparison import TRAINING, Run
from trl_explore.intervals import crossed_interval
from trl_explore.metrics import pass_at_k

CLOCKS = {
    "step": "optimizer steps",
    "tokens": "generated tokens",
    "trained_tokens": "trained tokens",
    "cpu_seconds": "CPU seconds",
}
PASS = re.compile(r"pass_at_(\d+)")


@dataclass(frozen=True)
class Effect:
    """
    How much more one arm has than another.

    Args:
        mean (`float`):
            Mean difference, in points of a hundred (for rewards: times 100).
        low (`float`):
            Lower end of its interval.
        high (`float`):
            Upper end.
    """

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:+.1f} [{self.low:+.1f}, {self.high:+.1f}]"

    @property
    def verdict(self) -> str:
        """In a word."""
        return "ahead" if self.low > 0 else "behind" if self.high < 0 else "undecided"


def curve(run: Run, metric: str, num_samples: int) -> list[dict[str, Any]]:
    """
    A run's learning curve with the metric by problem, where its successes are known by problem.

    Args:
        run ([`~trl_explore.comparison.Run`]):
            The run.
        metric (`str`):
            Such as `"pass_at_16"`.
        num_samples (`int`):
            Samples per problem.

    Returns:
        `list[dict]`: Points with their costs and the metric as an array, of one value where nothing more is known.
    """

    def values(point: dict[str, Any]) -> np.ndarray:
        found = PASS.fullmatch(metric)
        if metric == "greedy_accuracy" and point["greedy_correct"]:
            return np.array(point["greedy_correct"], dtype=float)
        if found and point["correct"]:
            return np.array([pass_at_k(num_samples, count, int(found[1])) for count in point["correct"]])
        return np.array([point[f"eval/{metric}"]])

    return [{**point, metric: values(point)} for point in run.points]


def num_samples(regime: Regime) -> int:
    """Samples per problem of an evaluation, as `trl-explore compare` draws them."""
    counts = [re.fullmatch(r"(?:pass|maj|coverage)_at_(\d+)", name) for name in regime.comparison["metrics"]]
    return max([8, *(int(match[1]) for match in counts if match)])


def effect(
    regime: Regime, runs: list[Run], arm: str, base: str, *, metric: str, clock: str, along: bool = False
) -> Effect | None:
    """
    What one arm has more than another at equal cost.

    Args:
        regime ([`~regimes.Regime`]):
            The regime.
        runs (`list`):
            Its runs.
        arm (`str`):
            One arm.
        base (`str`):
            The other.
        metric (`str`):
            What is compared.
        clock (`str`):
            Which cost is equal: as much as the run among theirs that got least far.
        along (`bool`, *optional*, defaults to `False`):
            Whether the means along both curves are compared, rather than their ends.

    Returns:
        [`Effect`] or `None`: Over the seeds that both have, if there are any.
    """
    by_arm = {name: {run.seed: run for run in runs if run.arm == name} for name in (arm, base)}
    seeds = sorted(by_arm[arm].keys() & by_arm[base].keys())
    if not seeds:
        return None
    pairs = [(by_arm[arm][seed], by_arm[base][seed]) for seed in seeds]
    reading = min(run.points[-1][clock] for pair in pairs for run in pair)
    read = mean_along if along else value_at
    values = [
        [read(curve(run, metric, num_samples(regime)), clock, reading, metric) for run in pair] for pair in pairs
    ]
    gaps = 100 * np.array([ours - theirs for ours, theirs in values])  # (S, P)
    low, high = crossed_interval(gaps)
    mean, half = interval(gaps.mean(axis=1).tolist())
    if half is not None:
        low, high = min(low, mean - half), max(high, mean + half)
    return Effect(mean, low, high)


def admission(regime: Regime, runs: list[Run]) -> Effect | None:
    """What four times the samples per prompt add to plain GRPO per step, along the curve."""
    names = [arm["name"] for arm in regime.arms if arm["role"] == "admission"]
    base = regime.arms[0]["name"]
    return effect(regime, runs, names[0], base, metric=regime.metric, clock="step", along=True) if names else None


def label(metric: str) -> str:
    """A metric as tables show it."""
    return metric.removesuffix("_accuracy").replace("_at_", "@")


def table(regime: Regime, runs: list[Run]) -> list[str]:
    """
    A regime's section.

    Args:
        regime ([`~regimes.Regime`]):
            The regime.
        runs (`list`):
            The runs of the verdict.

    Returns:
        `list[str]`: Lines of Markdown.
    """
    base, admitted = regime.arms[0]["name"], admission(regime, runs)
    metrics = regime.comparison["metrics"]
    at_end = [*metrics, *TRAINING]
    lines = [f"## {regime.name}", "", regime.claim.strip(), ""]
    if admitted is not None:
        word = "admitted" if admitted.low > 0 else "optimisation-limited: not admitted"
        lines += [
            f"**{word}**: GRPO with four times the samples per prompt, against GRPO, mean {label(regime.metric)} "
            f"along the curve at equal steps: {admitted}",
            "",
        ]
    lines += [
        "At the end of every run (mean over seeds), and differences to the first arm at equal cost:",
        "",
        f"| arm | settings | {' | '.join(map(label, at_end))} | {' | '.join(COSTS)} | seeds |",
        f"| --- | --- |{' ---: |' * (len(at_end) + len(COSTS) + 1)}",
    ]
    for arm in regime.arms:
        own = [run for run in runs if run.arm == arm["name"]]
        if not own:
            continue
        ends = [run.points[-1] for run in own]
        names = [f"eval/{name}" for name in metrics] + [f"train/{name}" for name in TRAINING]
        values = [np.mean([end[name] for end in ends]) for name in names]
        shown = [
            f"{value:.2f}" if name.endswith("entropy") else f"{100 * value:.1f}"
            for name, value in zip(names, values, strict=True)
        ]
        costs = [f"{np.mean([end[name] for end in ends]):,.0f}" for name in COSTS]
        lines.append(f"| {arm['name']} | {settings(regime, arm)} | {' | '.join(shown + costs)} | {len(own)} |")
    columns = [(regime.metric, clock) for clock in CLOCKS]
    columns += [(metric, "tokens") for metric in metrics if metric != regime.metric]
    titles = [f"{label(metric)} at equal {CLOCKS[clock]}" for metric, clock in columns]
    lines += ["", f"| against {base} | {' | '.join(titles)} |", f"| --- |{' --- |' * len(columns)}"]
    for arm in regime.arms[1:]:
        found = [effect(regime, runs, arm["name"], base, metric=metric, clock=clock) for metric, clock in columns]
        if all(found):
            lines.append(f"| {arm['name']} | {' | '.join(f'{e} {e.verdict}' for e in found if e)} |")
    return [*lines, ""]


def settings(regime: Regime, arm: dict[str, Any]) -> str:
    """The tuned fields of an arm, as the results have them."""
    rows = [
        row for row in read_results(results_path(regime)) if row["stage"] == "verdict" and row["arm"] == arm["name"]
    ]
    found = json.loads(rows[0]["options"])
    return ", ".join(f"{name} {found[name]}" for name in arm.get("grid", {}))


def picture(regimes: list[Regime], path: Path) -> None:
    """
    Methods by regimes, coloured by effect.

    Args:
        regimes (`list`):
            The regimes.
        path (`Path`):
            The PNG file.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    known = {regime.name: to_runs(read_results(results_path(regime)), "verdict") for regime in regimes}
    methods = list(dict.fromkeys(arm["name"] for r in regimes for arm in r.arms if arm["role"] == "method"))
    clocks = {
        "tokens": "equal generated tokens (sample-matched)",
        "cpu_seconds": "equal CPU seconds (compute-matched)",
    }
    figure, panels = pyplot.subplots(len(clocks), 1, figsize=(2.1 * len(regimes) + 2, 1.6 * len(methods) + 2.5))
    for panel, (clock, title) in zip(panels, clocks.items(), strict=True):
        grid = np.full((len(methods), len(regimes)), np.nan)
        for column, regime in enumerate(regimes):
            for row, method in enumerate(methods):
                runs, base = known[regime.name], regime.arms[0]["name"]
                found = effect(regime, runs, method, base, metric=regime.metric, clock=clock)
                if found is None:
                    continue
                grid[row, column] = found.mean
                text = f"{found.mean:+.1f}\n[{found.low:+.0f}, {found.high:+.0f}]"
                weight = "normal" if found.verdict == "undecided" else "bold"
                panel.text(column, row, text, ha="center", va="center", fontsize=8, weight=weight)
        panel.imshow(grid, cmap="PuOr", vmin=-50, vmax=50, aspect="auto")
        names = []
        for regime in regimes:
            admitted = admission(regime, known[regime.name])
            limited = admitted is not None and admitted.low <= 0
            names.append("\n".join([regime.name, label(regime.metric), *["(not admitted)"] * limited]))
        panel.set_xticks(range(len(regimes)), names, fontsize=8)
        panel.set_yticks(range(len(methods)), methods, fontsize=9)
        panel.set_title(f"difference to GRPO in points at {title}; bold: the interval excludes 0", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def report(regimes: list[Regime]) -> None:
    """
    Writes `results.md` and `results.png` beside the regimes.

    Args:
        regimes (`list`):
            Regimes; those without results are left out.
    """
    done = [regime for regime in regimes if to_runs(read_results(results_path(regime)), "verdict")]
    if not done:
        raise SystemExit("no results yet: run `regimes.py train` first")
    lines = [
        "# When does exploration pay?",
        "",
        "Made by `python examples/benchmarks/regimes.py report` from `results/*.csv`. Differences are in points and "
        "paired; intervals are 95 %, the wider of Student's over seeds and a bootstrap over seeds and problems.",
        "",
    ]
    for regime in done:
        lines += table(regime, to_runs(read_results(results_path(regime)), "verdict"))
    text, drawing = folder() / "results.md", folder() / "results.png"
    text.write_text("\n".join(lines), encoding="utf-8")
    picture(done, drawing)
    print(f"{text}\n{drawing}")
