"""Draw the picture of `README.md`: the leads of `auto` and of the best rival over tuned GRPO on eight problems.

    python examples/benchmarks/lead_picture.py

The script reads the results of `auto_regimes.py` and writes `auto_results/lead.png`.
"""

from auto_regimes import RESULTS, Regime, folder
from evidence_picture import draw_leads, leads_with_auto

PICTURE = RESULTS / "lead.png"
LABELS = {"best rival": "best variant of GRPO\nwithout exploration", "auto": "AutoExploreTrainer"}
# Descriptions of the problems, because a reader of the README does not know their names.
WORDS = {
    "deep_ends": "deep_ends:\neight choices in a row,\na wrong one ends the answer",
    "dead_ends": "dead_ends:\nfive choices in a row,\na wrong one ends the answer",
    "late_code": "late_code:\nan easy answer with one\nrare choice near its end",
    "solution_families": "solution_families:\na number in one of the\ntwo dialects of a prompt",
    "coverage": "coverage:\none prompt, find all of its\ntwenty right answers",
    "many_solutions": "many_solutions:\nCountdown: many solutions,\ngroups have contrast",
    "late_falls": "late_falls:\nan agent that fails late,\nfive to eight turns",
    "tail_errors": "tail_errors:\nan agent whose last turn\nfails, three to five turns",
}


def draw() -> None:
    """Write the picture."""
    rows = {}
    for name, words in WORDS.items():
        regime = Regime.load(folder() / f"{name}.yaml")
        rows[words] = leads_with_auto(regime)
    draw_leads(rows, LABELS, PICTURE, size=(6.2, 7.4))


if __name__ == "__main__":
    draw()
