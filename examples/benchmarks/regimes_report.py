"""What `regimes.py` found, as Markdown: the verdicts of all regimes, and a section for each with every number."""

from dataclasses import asdict
from pathlib import Path

import numpy as np
from regimes_effects import Effect, Results, label
from regimes_pictures import draw_changes, draw_forest, draw_frontiers
from regimes_plan import Regime, asked_for
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
    A regime's section.

    Args:
        results ([`Results`]):
            The regime and its results.

    Returns:
        `list[str]`: Lines of Markdown.
    """
    regime = results.regime
    lines = [f"## {regime.name}", "", regime.claim.strip(), "", *admissions(results)]
    runs = to_runs(results.rows, "verdict")
    shown = [arm for arm in regime.arms if any(run.arm == arm["name"] for run in runs)]
    if not shown:
        return lines
    columns = [*map(label, results.metrics), "entropy", "no contrast", *COSTS, "seeds"]
    lines += [f"| at the end | settings | {' | '.join(columns)} |", f"| --- | --- |{' ---: |' * len(columns)}"]
    for arm in shown:
        ends = [run.points[-1] for run in runs if run.arm == arm["name"]]
        names = [f"eval/{name}" for name in results.metrics] + ["train/entropy", "train/frac_reward_zero_std"]
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
        lines.append(f"| {ours} - {theirs} | {' | '.join(str(effect or '') for effect in found)} |")
    return [*lines, "", *starts(results), *frontier(results), *many_samples(results)]


def starts(results: Results) -> list[str]:
    """Which arms began at other values than the baseline, as lines of Markdown."""
    runs = [asdict(run) for run in to_runs(results.rows, "verdict")]
    found = other_starts(runs, results.base, [f"eval/{name}" for name in results.metrics])
    if not found:
        return []
    named = "; ".join(
        f"{arm} ({len(seeds)} of {len({run['seed'] for run in runs})} seeds)" for arm, seeds in found.items()
    )
    return [f'Began at other values than {results.base} ("The same start" in evidence.md says why): {named}.', ""]


def admissions(results: Results) -> list[str]:
    """What GRPO lacks in a regime, as lines of Markdown."""
    regime, found, lost = results.regime, results.admission(), results.collapse()
    if found is None:
        return []
    head = (
        f"Limited by {' and '.join(results.limits)}." if results.limits else "Limited neither by samples nor variety."
    )
    lines = [
        f"{head} {regime.arms[1]['name']} against {results.base} over {regime.admission_steps} steps, "
        f"{label(regime.metric)} along the curve: {found}."
    ]
    if lost is not None:
        arm, start, peak = lost
        lines[0] += (
            f" {arm}: {label(str(regime.variety))} at the end against the start {start}, against its best {peak}."
        )
    return [*lines, ""]


def frontier(results: Results) -> list[str]:
    """Where methods lie beside GRPO and its rivals, as lines of Markdown."""
    found, axes = results.places(), results.axes
    if not found or axes is None:
        return []
    first, second = map(label, axes)
    lines = [f"| frontier of {first} and {second} | | weight of {first} | lead over the closest rival |"]
    lines.append("| --- | --- | ---: | --- |")
    for name, (where, rival) in found.items():
        lead = f"{where.lead:+.1f}" if where.half is None else f"{where.lead:+.1f} ± {where.half:.1f}"
        lines.append(f"| {name} | {where.verdict} | {where.weight:.2f} | {lead} ({rival}) |")
    return [*lines, ""]


def many_samples(results: Results) -> list[str]:
    """Pass@k before training and after it, and problems newly solved and lost, as lines of Markdown."""
    return [*ends_table(results.ends), ""] if results.ends else []


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
    for method in dict.fromkeys(name for of in admitted for name in of.named("rival", "method")):
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
        lies = {of.regime.name: of.places()[method][0].verdict for of in admitted if method in of.places()}
        pairs = zip(found["tokens"].values(), found[seconds].values(), strict=True)
        texts = [f"{matched} / {timed}" if matched else "-" for matched, timed in pairs]
        cells.append(f"| {method} | {' | '.join(texts)} |")
        own = [
            _verdict("Against GRPO at equal generated tokens", found["tokens"]),
            _verdict(f"At equal {duration}", found[seconds]),
            _verdict("Against its controls at equal generated tokens", controls),
            f"Frontier: {', '.join(f'{verdict} in {name}' for name, verdict in lies.items())}." if lies else "",
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
            kind = "neither clearly"
            if found.clear and found.has_interval:
                kind = "clearly ahead" if found.mean > 0 else "clearly behind"
            parts[kind].append(f"{where} {str(found).strip('*')}")
    words = "; ".join(f"{kind} in {', '.join(places)}" for kind, places in parts.items() if places)
    return f"{title}: {words}." if words else ""


def report(regimes: list[Regime], path: Path) -> None:
    """
    Writes a Markdown file and the pictures.

    Args:
        regimes (`list`):
            Regimes; those without results are left out.
        path (`Path`):
            The Markdown file without its suffix; `forest.png`, `frontier.png` and `changes.png` go beside it.
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
    known = [found for found in results if found.admission() is not None]
    if not known:
        raise SystemExit("no results yet: run `regimes.py train` first")
    lines = [*verdicts(known), *(line for found in known for line in table(found))]
    path.with_suffix(".md").write_text("\n".join([INTRODUCTION, *lines]), encoding="utf-8")
    pictures = (
        draw_forest(known, path.with_name("forest.png")),
        draw_frontiers(known, path.with_name("frontier.png")),
        draw_changes(known, path.with_name("changes.png")),
    )
    print(", ".join([f"{path}.md", *(str(picture) for picture in pictures if picture)]))
