"""Draw the first picture of `docs/evidence.md`: the leads of best rival, best method and `auto` over tuned GRPO.

    python examples/benchmarks/evidence_picture.py

The picture `evidence.png` has one row per problem. It shows the numbers of `evidence_table.md`, and computes them from
the same results. Run both scripts after new results.
"""

from collections.abc import Mapping
from pathlib import Path

import auto_fresh
import auto_regimes
import matplotlib
from evidence_table import PROBLEMS, results_of
from regimes_plan import Regime, folder

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

TARGET = Path(__file__).resolve().with_name("evidence.png")
STYLES = {
    "best rival": dict(color="#999999", marker="o"),
    "best method": dict(color="#D55E00", marker="s"),
    "auto": dict(color="#0072B2", marker="D"),
}
Lead = tuple[float, float, float]  # points above GRPO: mean, lower and upper end of the interval


def leads(regime: Regime) -> dict[str, Lead]:
    """Return the leads over GRPO at equal tokens, by the keys of `STYLES`: of `auto` on the seeds of `auto_fresh.py`,
    and of the others on other seeds (see `evidence_table.py`). `auto` is missing if it was not measured."""
    found = leads_on_new_seeds(regime) if auto_regimes.read(regime) else leads_of_verdict(regime)
    gap = auto_fresh.gap_of_auto(regime, "tokens")
    if gap is not None:
        found["auto"] = with_ends(*gap, name=regime.name)
    return found


def with_ends(mean: float, half: float | None, *, name: str) -> Lead:
    """Return a mean and the ends of its interval. `name` is the regime, for the error message."""
    assert half is not None, f"{name} has one seed only"
    return (mean, mean - half, mean + half)


def leads_of_verdict(regime: Regime) -> dict[str, Lead]:
    """Return the leads of the best rival and of the best method in the verdict stage of a regime."""
    results = results_of(regime)
    arms = {
        "best rival": auto_regimes.best_with_role(regime, "rival", "more samples")["name"],
        "best method": auto_regimes.best_with_role(regime, "method")["name"],
    }
    found = {}
    for role, arm in arms.items():
        effect = results.effect(arm, results.base, metric=regime.metric, cost="tokens")
        assert effect is not None, f"{regime.name} has no results for {arm}"
        found[role] = (effect.mean, effect.low, effect.high)
    return found


def leads_on_new_seeds(regime: Regime) -> dict[str, Lead]:
    """Return the leads of the best rival and of the best method on the seeds of `auto_regimes.py`."""
    runs = auto_regimes.read(regime)
    base, rival, method, *_ = runs  # the order of `auto_regimes.arms_of`
    found = {}
    for role, arm in (("best rival", rival), ("best method", method)):
        gap = auto_regimes.gaps(runs, arm, base, cost="tokens", metric=regime.metric)
        found[role] = with_ends(*gap, name=regime.name)
    return found


def draw_leads(
    rows: Mapping[str, Mapping[str, Lead]], labels: Mapping[str, str], path: Path, *, size: tuple[float, float]
) -> None:
    """
    Draw leads over GRPO with their intervals, and write the picture.

    Args:
        rows (`Mapping[str, Mapping[str, Lead]]`):
            Name of each row, from top to bottom, and the leads in this row by role.
        labels (`Mapping[str, str]`):
            Roles to draw, and their labels in the legend. Each role is a key of `STYLES`.
        path (`Path`):
            File of the picture.
        size (`tuple[float, float]`):
            Width and height of the picture, in inches.
    """
    figure, axis = plt.subplots(figsize=size, layout="constrained")
    in_legend = set()
    for place, found in enumerate(reversed(rows.values())):
        for number, role in enumerate(labels):
            if role not in found:
                continue
            mean, low, high = found[role]
            label = None if role in in_legend else labels[role]
            in_legend.add(role)
            height = place + 0.24 * ((len(labels) - 1) / 2 - number)
            style = dict(STYLES[role], label=label, linestyle="", markersize=6, capsize=2.5)
            axis.errorbar(mean, height, xerr=[[mean - low], [high - mean]], **style)
        if place:
            axis.axhline(place - 0.5, color="#dddddd", linewidth=0.8)
    axis.axvline(0, color="black", linewidth=1)
    axis.set_yticks(range(len(rows)), list(reversed(rows)))
    axis.set_ylim(-0.5, len(rows) - 0.5)
    axis.set_xlabel("percentage points above tuned GRPO,\nfor the same number of generated tokens")
    # The legend is at the top, because readers look there first.
    figure.legend(loc="outside upper center", ncols=len(labels), frameon=False)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    figure.savefig(path, dpi=160)


def draw() -> None:
    """Write the picture of all problems."""
    rows = {name: leads(Regime.load(folder() / f"{name}.yaml")) for name in PROBLEMS}
    draw_leads(rows, {role: role for role in STYLES}, TARGET, size=(6.6, 5.6))


if __name__ == "__main__":
    draw()
