"""Print the table of `docs/evidence.md`: GRPO, the best rival, the best method and `auto` on every problem.

    python examples/benchmarks/evidence_table.py

The script writes the table to `evidence_table.md`. Run it after `regimes.py train`, `auto_regimes.py` and
`auto_fresh.py`.

If all arms of a problem are finished in `auto_results`, GRPO, the rival and the method come from there. They ran on
new seeds, and the rival and the method had been chosen before on other seeds. Otherwise, they come from the verdict
stage of the regime, and were chosen on the seeds of the row itself. The cells of `auto` come from
`auto_fresh_results`: `auto` and GRPO ran on other seeds than the other arms.
"""

import statistics
from pathlib import Path

import auto_fresh
import auto_regimes
from regimes_effects import Effect, Results, label
from regimes_plan import Regime, asked_for, folder
from regimes_results import read_results, timed_alike, to_runs

from trl_explore.compare.costs import mean_along

TARGET = Path(__file__).resolve().with_suffix(".md")
# In the order of the questions in docs/evidence.md.
PROBLEMS = {
    "dead_ends": "five doors in a row; a wrong door ends the answer",
    "deep_ends": "eight doors in a row; a wrong door ends the answer",
    "late_code": "an easy calculation that ends with an unknown code",
    "coverage": "one prompt with twenty right answers",
    "many_plans": "an answer may be written in six of sixteen dialects",
    "solution_families": "an answer may be written in two of four dialects",
    "many_solutions": "Countdown with four numbers",
    "maze": "a way over a frozen lake; 3.4 million parameters",
    "late_falls": "an agent that fails late, five to eight turns",
    "tail_errors": "an agent that fails in its last turn, three to five turns",
}
# Names of metrics in the table. Other metrics keep their names.
METRICS = {"greedy": "greedy accuracy", "reward": "mean reward"}
# Names of arms in the table. The name `clip-higher` in the results hides that this arm trains twice on every batch.
NAMES = {"clip-higher": "higher clip, two iterations"}
NOT_MEASURED = "no fresh seeds yet"


def joined(tokens: str, seconds: str) -> str:
    """Return the verdict at equal tokens as text. Add the verdict at equal CPU seconds if it differs."""
    return tokens if tokens == seconds else f"{tokens}; at equal CPU seconds {seconds}"


def cells_of_auto(regime: Regime) -> list[str]:
    """Return the difference between `auto` and GRPO, and its verdict."""
    at_tokens, at_seconds = (auto_fresh.gap_of_auto(regime, cost) for cost in ("tokens", "cpu_seconds"))
    if at_tokens is None or at_seconds is None:
        return [NOT_MEASURED, ""]
    verdict = joined(auto_regimes.verdict(*at_tokens), auto_regimes.verdict(*at_seconds))
    return [auto_regimes.shown(*at_tokens), verdict]


def cells_on_new_seeds(regime: Regime) -> list[str]:
    """Return the cells of GRPO, the rival and the method from `auto_results`."""
    runs, metric = auto_regimes.read(regime), regime.metric
    base, rival, method, *_ = runs  # the order of `auto_regimes.arms_of`
    at_tokens = {arm: auto_regimes.gaps(runs, arm, base, cost="tokens", metric=metric) for arm in (rival, method)}
    at_seconds = auto_regimes.gaps(runs, method, base, cost="cpu_seconds", metric=metric)
    reading = auto_regimes.reading_of(runs, "tokens")
    level = statistics.mean(mean_along(points, "tokens", reading, metric) for points in runs[base].values())
    names = [f"{NAMES.get(arm, arm)} {auto_regimes.shown(*gap)}" for arm, gap in at_tokens.items()]
    verdict = joined(auto_regimes.verdict(*at_tokens[method]), auto_regimes.verdict(*at_seconds))
    return [f"{100 * level:.1f}", *names, verdict]


def results_of(regime: Regime) -> Results:
    """Return the results of a regime for the arms, fields and seeds in its file. If all arms were also timed one after
    the other in one sitting, CPU seconds come from there."""
    rows = [row for row in read_results(regime.path) if asked_for(regime, row)]
    return Results(regime, timed_alike(rows))


def cells_of_verdict(regime: Regime) -> list[str]:
    """Return the cells of GRPO, the rival and the method from the verdict stage of a regime."""
    results = results_of(regime)
    rival = auto_regimes.best_with_role(regime, "rival", "more samples")["name"]
    method = auto_regimes.best_with_role(regime, "method")["name"]
    runs = [run for run in to_runs(results.rows, "verdict") if run.arm == results.base]
    reading = min(run.points[-1]["tokens"] for run in runs)
    level = statistics.mean(mean_along(run.points, "tokens", reading, f"eval/{regime.metric}") for run in runs)

    def effect(arm: str, cost: str) -> Effect:
        found = results.effect(arm, results.base, metric=regime.metric, cost=cost)
        assert found is not None, f"{regime.name} has no results for {arm}"
        return found

    names = []
    for arm in (rival, method):
        text = f"{NAMES.get(arm, arm)} {effect(arm, 'tokens')}"
        names.append(text.replace("**", ""))  # clear effects are bold
    cells = [f"{100 * level:.1f}", *names]
    at_tokens = verdict_of(effect(method, "tokens"))
    at_seconds = verdict_of(effect(method, results.seconds))
    return [*cells, joined(at_tokens, at_seconds)]


def verdict_of(effect: Effect) -> str:
    """Return "ahead" or "behind" if the interval of the effect excludes 0, otherwise "level"."""
    if not effect.clear:
        return "level"
    return "ahead" if effect.mean > 0 else "behind"


def table() -> str:
    """Return the table as Markdown."""
    lines = [
        "| problem | GRPO | best rival | best method | verdict on the method | `auto` | verdict on `auto` |",
        "| --- | ---: | --- | --- | --- | ---: | --- |",
    ]
    for name, text in PROBLEMS.items():
        regime = Regime.load(folder() / f"{name}.yaml")
        cells = cells_on_new_seeds(regime) if auto_regimes.read(regime) else cells_of_verdict(regime)
        cells += cells_of_auto(regime)
        metric = METRICS.get(label(regime.metric), label(regime.metric))
        lines.append(f"| [{name}](evidence-details.md#{name}) ({metric}): {text} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Write the table to a file and print it."""
    text = table()
    TARGET.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
