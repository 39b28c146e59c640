"""Draw the picture of `README.md`: the leads of `auto` and of the best rival over tuned GRPO on eight problems.

    python examples/benchmarks/lead_picture.py

The script reads the results of `auto_regimes.py` and of `auto_fresh.py`, and writes `auto_results/lead.png`.
"""

from auto_regimes import RESULTS, Regime, folder
from evidence_picture import draw_leads, leads

PICTURE = RESULTS / "lead.png"
LABELS = {"best rival": "best variant of GRPO without exploration", "auto": "AutoExploreTrainer"}
# Descriptions of the problems, because a reader of the README does not know their names.
WORDS = {
    "deep_ends": "deep_ends: eight choices in a row,\na wrong one ends the answer",
    "dead_ends": "dead_ends: five choices in a row,\na wrong one ends the answer",
    "late_code": "late_code: an easy answer with\none rare choice near its end",
    "solution_families": "solution_families: numbers in\ntwo of four dialects",
    "coverage": "coverage: one prompt with\ntwenty right answers",
    "many_solutions": "many_solutions: Countdown,\ngroups have contrast",
    "late_falls": "late_falls: an agent that fails\nlate, five to eight turns",
    "tail_errors": "tail_errors: an agent whose last\nturn fails, three to five turns",
}


def draw() -> None:
    """Write the picture."""
    rows = {}
    for name, words in WORDS.items():
        regime = Regime.load(folder() / f"{name}.yaml")
        rows[words] = leads(regime)
    draw_leads(rows, LABELS, PICTURE, size=(6.2, 5.4))


if __name__ == "__main__":
    draw()
