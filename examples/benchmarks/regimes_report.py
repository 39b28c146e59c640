"""Report of `regimes.py` as Markdown: verdicts over all regimes, then a section with all numbers for each regime."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from regimes_effects import Effect, Results, label
from regimes_pictures import draw_changes, draw_forest, draw_frontiers
from regimes_plan import Arm, Regime, asked_for
from regimes_results import COSTS, read_results, timed_alike, to_runs

from trl_explore.compare.costs import other_starts
from trl_explore.compare.ends import ends_table

INTRODUCTION = """# When does exploration pay? All numbers

Made by `python examples/benchmarks/regimes.py report` from `results/*.csv`. Arms are tuned and judged by the mean
along their curves, which also tells which of two that end alike rose earlier. Differences are in points, paired by
seed and problem; intervals are 95 %, the wider of Student's over seeds and a bootstrap over seeds and problems (those
of one fact together). **Bold** ones exclude 0. Tokens in the loss count rows without advantage for GRPO, whose loss
computes them, and not for branches, where they are left out. Seconds are those of runs in one sitting on the first
fresh seed, or the mean of two on the first two, for as many tokens, where all arms have one.

Frontier: the weighting of the two metrics under which an arm looks best is chosen on the development seeds. The arm is
outside if it is clearly ahead of GRPO and of every rival under that weighting on the fresh seeds, and inside if it is
clearly behind the one that was best under it on the development seeds; else it is on the frontier.
"""


def table(results: Results) -> list[str]:
    """
    Return the section of a regime.

    Args:
        results ([`Results`]):
            The regime with its results.

    Returns:
        `list[str]`: Lines of Markdown.
    """
    regime = results.regime
    lines = [f"## {regime.name}", "", regime.claim.strip(), "", *admissions(results)]
    measured = {run.arm for run in to_runs(results.rows, "verdict")}
    arms = [arm for arm in regime.arms if arm["name"] in measured]
    if not arms:
        return lines
    lines += [*_ends_of_arms(results, arms), "", *_differences(results, arms), ""]
    return [*lines, *starts(results), *frontier(results), *many_samples(results)]


def _ends_of_arms(results: Results, arms: list[Arm]) -> list[str]:
    """Return a table of metrics and costs at the end of the verdict runs, with a line per arm."""
    columns = [*map(label, results.metrics), "entropy", "no contrast", *COSTS, "seeds"]
    lines = [f"| at the end | settings | {' | '.join(columns)} |", f"| --- | --- |{' ---: |' * len(columns)}"]
    runs = to_runs(results.rows, "verdict")
    for arm in arms:
        ends = [run.points[-1] for run in runs if run.arm == arm["name"]]
        cells = [_mean_percentage(ends, f"eval/{metric}") for metric in results.metrics]
        cells.append(f"{np.mean([end['train/entropy'] for end in ends]):.2f}")
        cells.append(_mean_percentage(ends, "train/frac_reward_zero_std"))
        for cost in COSTS:
            cells.append(f"{np.mean([end[cost] for end in ends]):,.0f}")
        lines.append(f"| {arm['name']} | {results.settings(arm)} | {' | '.join(cells)} | {len(ends)} |")
    return lines


def _mean_percentage(points: list[dict[str, Any]], name: str) -> str:
    """Return the mean of a metric over evaluations, in percent."""
    return f"{100 * np.mean([point[name] for point in points]):.1f}"


def _differences(results: Results, arms: list[Arm]) -> list[str]:
    """Return a table of differences: of every arm to the baseline, and of every method to its controls."""
    metric = results.regime.metric
    titles = [f"{label(metric)} along, equal {text}" for text in results.costs.values()]
    titles += [f"{label(name)} at the end, equal generated tokens" for name in results.metrics]
    lines = [f"| difference | {' | '.join(titles)} |", f"| --- |{' --- |' * len(titles)}"]
    pairs = [(arm["name"], results.base) for arm in arms[1:]]
    pairs += [(arm["of"], arm["name"]) for arm in arms if arm["role"] == "control"]
    for ours, theirs in pairs:
        effects = [results.effect(ours, theirs, metric=metric, cost=cost) for cost in results.costs]
        for name in results.metrics:
            effects.append(results.effect(ours, theirs, metric=name, cost="tokens", along=False))
        lines.append(f"| {ours} - {theirs} | {' | '.join(str(effect or '') for effect in effects)} |")
    return lines


def starts(results: Results) -> list[str]:
    """Return lines of Markdown that name the arms whose model before training differed from the baseline's model."""
    runs = [asdict(run) for run in to_runs(results.rows, "verdict")]
    found = other_starts(runs, results.base, [f"eval/{name}" for name in results.metrics])
    if not found:
        return []
    num_seeds = len({run["seed"] for run in runs})
    named = "; ".join(f"{arm} ({len(seeds)} of {num_seeds} seeds)" for arm, seeds in found.items())
    return [f'Began at other values than {results.base} ("The same start" in evidence.md says why): {named}.', ""]


def admissions(results: Results) -> list[str]:
    """Return lines of Markdown that say whether GRPO is limited by samples or variety. Empty if the admission was not
    measured."""
    regime, more_samples, collapse = results.regime, results.admission(), results.collapse()
    if more_samples is None:
        return []
    text = "Limited neither by samples nor variety."
    if results.limits:
        text = f"Limited by {' and '.join(results.limits)}."
    text += (
        f" {regime.arms[1]['name']} against {results.base} over {regime.admission_steps} steps, "
        f"{label(regime.metric)} along the curve: {more_samples}."
    )
    if collapse is not None:
        arm, since_start, since_peak = collapse
        variety = label(str(regime.variety))
        text += f" {arm}: {variety} at the end against the start {since_start}, against its best {since_peak}."
    return [text, ""]


def frontier(results: Results) -> list[str]:
    """Return a table of the places of methods and controls relative to the frontier. Empty if there are no places."""
    places, metrics = results.places(), results.frontier_metrics
    if not places or metrics is None:
        return []
    first, second = map(label, metrics)
    lines = [f"| frontier of {first} and {second} | | weight of {first} | lead over the closest rival |"]
    lines.append("| --- | --- | ---: | --- |")
    for name, (place, rival) in places.items():
        lead = f"{place.lead:+.1f}"
        if place.half is not None:
            lead += f" ± {place.half:.1f}"
        lines.append(f"| {name} | {place.verdict} | {place.weight:.2f} | {lead} ({rival}) |")
    return [*lines, ""]


def many_samples(results: Results) -> list[str]:
    """Return a table of pass@k at large k before and after training, and of problems newly solved and lost. Empty if
    they were not measured."""
    return [*ends_table(results.ends), ""] if results.ends else []


def verdicts(all_results: list[Results]) -> list[str]:
    """
    Return the section that compares each rival and method with GRPO and with its controls, over all admitted regimes.

    Args:
        all_results (`list[Results]`):
            Regimes with their results. Regimes that are not admitted are left out, because GRPO lacks nothing there.

    Returns:
        `list[str]`: Lines of Markdown: a table, and an entry per rival and method. Empty if no regime is admitted.
    """
    admitted = [results for results in all_results if results.admitted]
    if not admitted:
        return []
    seconds = admitted[0].seconds
    duration = admitted[0].costs[seconds]
    head = " | ".join(f"{results.regime.name}: {label(results.regime.metric)}" for results in admitted)
    methods: list[str] = []
    for results in admitted:
        methods += results.measured_arms("rival", "method")
    lines, entries = [], []
    for method in dict.fromkeys(methods):  # each name once
        at_tokens, at_seconds = _effects(admitted, method, "tokens"), _effects(admitted, method, seconds)
        cells = []
        for matched, timed in zip(at_tokens.values(), at_seconds.values(), strict=True):
            cells.append(f"{matched} / {timed}" if matched else "-")
        lines.append(f"| {method} | {' | '.join(cells)} |")
        sentences = [
            _verdict("Against GRPO at equal generated tokens", at_tokens),
            _verdict(f"At equal {duration}", at_seconds),
            _verdict("Against its controls at equal generated tokens", _effects_over_controls(admitted, method)),
            _frontier_verdict(admitted, method),
        ]
        if any(sentences):
            entries.append(f"- **{method}.** {' '.join(filter(None, sentences))}")
    return [
        "## Verdicts",
        "",
        "Means along the curves in admitted regimes, against GRPO: at equal generated tokens (sample-matched), and at "
        f"equal {duration} (compute-matched).",
        "",
        f"| | {head} |",
        f"| --- |{' --- |' * len(admitted)}",
        *lines,
        "",
        *entries,
        "",
    ]


def _effects(all_results: list[Results], arm: str, cost: str) -> dict[str, Effect | None]:
    """Return the difference of an arm to GRPO along the curve, by regime. None for a regime without the arm."""
    effects = {}
    for results in all_results:
        regime = results.regime
        effects[regime.name] = results.effect(arm, results.base, metric=regime.metric, cost=cost)
    return effects


def _effects_over_controls(all_results: list[Results], method: str) -> dict[str, Effect | None]:
    """Return the difference of a method to each of its controls along the curve at equal generated tokens, by regime
    and control."""
    effects = {}
    for results in all_results:
        regime = results.regime
        for arm in regime.arms:
            if arm.get("of") == method:
                effect = results.effect(method, arm["name"], metric=regime.metric, cost="tokens")
                effects[f"{regime.name}, {arm['name']}"] = effect
    return effects


def _verdict(title: str, effects: dict[str, Effect | None]) -> str:
    """Return a sentence that sorts differences into clearly ahead, clearly behind and neither. It is empty if no
    difference was measured."""
    parts: dict[str, list[str]] = {"clearly ahead": [], "clearly behind": [], "neither clearly": []}
    for name, effect in effects.items():
        if effect is None:
            continue
        kind = "neither clearly"
        if effect.clear and effect.has_interval:
            kind = "clearly ahead" if effect.mean > 0 else "clearly behind"
        parts[kind].append(f"{name} {str(effect).strip('*')}")
    words = "; ".join(f"{kind} in {', '.join(names)}" for kind, names in parts.items() if names)
    return f"{title}: {words}." if words else ""


def _frontier_verdict(all_results: list[Results], method: str) -> str:
    """Return a sentence with the place of a method relative to the frontier of each regime. Empty without a place."""
    parts = []
    for results in all_results:
        places = results.places()
        if method in places:
            place, _ = places[method]
            parts.append(f"{place.verdict} in {results.regime.name}")
    return f"Frontier: {', '.join(parts)}." if parts else ""


def report(regimes: list[Regime], path: Path) -> None:
    """
    Write the Markdown file and the pictures, and print their paths. Warn about results that are left out.

    Args:
        regimes (`list[Regime]`):
            The regimes. Regimes without results of the stage *admission* are left out.
        path (`Path`):
            The Markdown file without its suffix. `forest.png`, `frontier.png` and `changes.png` go to the same folder.

    Raises:
        SystemExit: If no regime has results.
    """
    all_results = [_current_results(regime) for regime in regimes]
    known = [results for results in all_results if results.admission() is not None]
    if not known:
        raise SystemExit("no results yet: run `regimes.py train` first")
    lines = [INTRODUCTION, *verdicts(known)]
    for results in known:
        lines += table(results)
    path.with_suffix(".md").write_text("\n".join(lines), encoding="utf-8")
    pictures = (
        draw_forest(known, path.with_name("forest.png")),
        draw_frontiers(known, path.with_name("frontier.png")),
        draw_changes(known, path.with_name("changes.png")),
    )
    print(", ".join([f"{path}.md", *(str(picture) for picture in pictures if picture)]))


def _current_results(regime: Regime) -> Results:
    """Return the results that match the regime's file, with seconds of one sitting. Print a warning if other results
    are left out, and if the seconds are of different sittings."""
    rows, left_out = [], set()
    for row in read_results(regime.path):
        if asked_for(regime, row):
            rows.append(row)
        else:
            left_out.add((row["stage"], row["arm"], row["seed"]))
    results = Results(regime, timed_alike(rows))
    if results.rows is rows and regime.seeds_of("seconds"):  # `timed_alike` replaced nothing
        print(
            f"{regime.path.name}: not all arms were timed in one sitting, so differences at equal seconds may come "
            f"from the machine; `regimes.py train {regime.name}` times all arms"
        )
    if left_out:
        names = ", ".join(sorted({arm for _, arm, _ in left_out}))
        print(f"{regime.path.name}: {len(left_out)} runs do not match the regime's file and are left out: {names}")
    return results
