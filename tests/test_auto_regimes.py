"""The benchmark of auto: its arms, its differences, and the tables of the documentation."""

import csv
import importlib
import shutil
import statistics

import pytest
from commands import EXAMPLES

BENCHMARKS = EXAMPLES / "benchmarks"


@pytest.fixture
def auto_regimes(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("auto_regimes")


def test_the_tables_are_those_of_the_results(auto_regimes):
    assert (BENCHMARKS / "auto_results" / "results.md").read_text() == auto_regimes.report()


def test_the_table_of_explorer_sets_is_that_of_the_results(auto_regimes):
    sets = importlib.import_module("explorer_sets")
    assert (sets.RESULTS / "results.md").read_text() == sets.report()
    assert len(list(sets.RESULTS.glob("*.csv"))) == 9


def test_the_picture_has_every_problem_with_results(auto_regimes):
    picture = importlib.import_module("lead_picture")
    assert set(picture.WORDS) == {path.stem for path in auto_regimes.RESULTS.glob("*.csv")}
    for name in picture.WORDS:
        regime = auto_regimes.Regime.load(auto_regimes.folder() / f"{name}.yaml")
        mean, low, high = picture.leads_with_auto(regime)["auto"]
        assert f"{mean:+.1f} ± {(high - low) / 2:.1f}" in (auto_regimes.RESULTS / "results.md").read_text(), name


@pytest.mark.slow
def test_auto_has_the_tuned_fields_of_grpo_and_nothing_else(auto_regimes):
    for path in auto_regimes.folder().glob("*.yaml"):
        arms = {arm["name"]: arm for arm in auto_regimes.arms_of(auto_regimes.Regime.load(path))}
        grpo, rival, method, *_ = arms
        assert grpo == "GRPO" and arms["auto"]["options"] == arms["GRPO"]["options"]
        assert "learning_rate" in arms["auto"]["options"] and arms[method]["method"] not in ("grpo", "exploration")
        uniform = arms["uniform choice"]["options"]
        assert uniform == {**arms["GRPO"]["options"], "explore_min_share": 1.0}


def test_a_gap_is_paired_by_seed_and_ends_where_the_cheapest_run_does(auto_regimes, tmp_path, monkeypatch):
    monkeypatch.setattr(auto_regimes, "RESULTS", tmp_path)
    ends = {("GRPO", 1): (10, 0.2), ("GRPO", 2): (10, 0.4), ("auto", 1): (20, 0.8), ("auto", 2): (20, 1.0)}
    with open(tmp_path / "dead_ends.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["stage", "arm", "seed", "step", "tokens", "cpu_seconds", "greedy_accuracy"])
        for (arm, seed), (tokens, value) in ends.items():
            writer.writerow([auto_regimes.STAGE, arm, seed, 0, 0, 0, 0.0])
            writer.writerow([auto_regimes.STAGE, arm, seed, 1, tokens, 1, value])
    regime = auto_regimes.Regime.load(auto_regimes.folder() / "dead_ends.yaml")
    assert auto_regimes.read(regime) == {}  # an arm is missing
    runs = auto_regimes.by_arm_and_seed(auto_regimes.read_results(tmp_path / "dead_ends.csv"), auto_regimes.STAGE)
    mean, half = auto_regimes.gaps(runs, "auto", "GRPO", cost="tokens", metric="greedy_accuracy")
    # Curves are lines from 0. At 10 tokens, those of `auto` are at half of their end.
    expected = [100 * (0.4 - 0.2) / 2, 100 * (0.5 - 0.4) / 2]
    assert mean == pytest.approx(statistics.mean(expected)) and half is None
    assert auto_regimes.verdict(3.0, 2.0) == "ahead" and auto_regimes.verdict(-3.0, 2.0) == "behind"
    assert auto_regimes.verdict(1.0, 2.0) == auto_regimes.verdict(1.0, None) == "level"


def test_all_committed_results_have_the_settings_of_today(auto_regimes, monkeypatch):
    """So `auto_regimes.py` would not train them again, and mixes no settings."""
    sets = importlib.import_module("explorer_sets")
    small = importlib.import_module("small_fields")
    stages = []
    for path in auto_regimes.RESULTS.glob("*.csv"):
        (regime,) = auto_regimes.load_regimes([path.stem])
        stages.append(auto_regimes.stage_of(regime, list(auto_regimes.SEEDS), path.parent))
    for path in sets.RESULTS.glob("*.csv"):
        (regime,) = auto_regimes.load_regimes([path.stem])
        stages.append(sets.Stage(sets.STAGE, sets.document_of(regime), path, path.parent))
    for path in small.RESULTS.glob("*.csv"):
        (regime,) = auto_regimes.load_regimes([path.stem])
        stages.append(small.stage_of(regime, path.parent, "verdict", small.chosen(regime), list(small.SEEDS)))
    assert len(stages) >= 18
    for stage in stages:
        rows = auto_regimes.read_results(stage.results)
        assert not stage.missing(rows) and stage.without_stale(rows) == rows, (stage.results, stage.name)


def test_more_seeds_keep_the_seeds_that_are_there(auto_regimes, tmp_path, monkeypatch):
    committed = auto_regimes.RESULTS / "dead_ends.csv"
    monkeypatch.setattr(auto_regimes, "RESULTS", tmp_path)
    shutil.copy(committed, tmp_path)
    (regime,) = auto_regimes.load_regimes(["dead_ends"])
    stage = auto_regimes.stage_of(regime, [79, 80], tmp_path)
    rows = auto_regimes.read_results(stage.results)
    assert {seed for _, seed in stage.missing(rows)} == {80} and stage.without_stale(rows) == rows
    assert stage.selected["seeds"] == [79, 80] and stage.document["seeds"] == [*range(70, 81)]
