"""Draw how far `auto` is above tuned GRPO on each problem, next to the best rival.

    python examples/benchmarks/lead_picture.py

The script reads the results of `auto_regimes.py` and writes `auto_results/lead.png`.
"""

import matplotlib
from auto_regimes import RESULTS, Regime, folder, gaps, read

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

PICTURE = RESULTS / "lead.png"
# A reader of the README knows none of our names for the problems.
WORDS = {
    "deep_ends": "deep_ends:\neight choices in a row,\na wrong one ends the answer",
    "dead_ends": "dead_ends:\nfive choices in a row,\na wrong one ends the answer",
    "late_code": "late_code:\nan easy answer with one\nrare choice near its end",
    "coverage": "coverage:\none prompt, find all of its\ntwenty right answers",
    "many_solutions": "many_solutions:\nCountdown: many solutions,\ngroups have contrast",
}


def leads() -> dict[str, dict[str, tuple[float, float | None]]]:
    """Return by problem the lead of the best rival and of `auto` over GRPO at equal tokens: mean and half of the
    interval. The second arm of the results is the best rival."""
    found = {}
    for name in WORDS:
        regime = Regime.load(folder() / f"{name}.yaml")
        runs = read(regime)
        base, rival, *_ = runs
        given = {"cost": "tokens", "metric": regime.metric}
        found[name] = {"rival": gaps(runs, rival, base, **given), "auto": gaps(runs, "auto", base, **given)}
    return found


def draw() -> None:
    """Write the picture."""
    figure, axis = plt.subplots(figsize=(5.8, 4.9))
    styles = {
        "rival": dict(color="#999999", marker="o", label="best variant of GRPO\nwithout exploration"),
        "auto": dict(color="#0072B2", marker="D", label="AutoExploreTrainer"),
    }
    found = leads()
    for place, name in enumerate(reversed(found)):
        for shift, (arm, (mean, half)) in zip((0.16, -0.16), found[name].items(), strict=True):
            style = dict(styles[arm])
            if place:
                style.pop("label")
            axis.errorbar(mean, place + shift, xerr=half, markersize=7, capsize=3, linestyle="", **style)
    axis.axvline(0, color="black", linewidth=1)
    axis.set_yticks(range(len(found)), [WORDS[name] for name in reversed(found)])
    axis.set_xlabel("points of accuracy above tuned GRPO,\nfor the same number of generated tokens")
    axis.legend(loc="lower right", fontsize=9, frameon=False)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=160)


if __name__ == "__main__":
    draw()
