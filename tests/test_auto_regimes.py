"""The benchmark of auto: its arms, its differences, and the tables of the documentation."""

import csv
import importlib
import statistics
import subprocess

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
        writer.writerow(["arm", "seed", "step", "tokens", "cpu_seconds", "greedy_accuracy", "version"])
        for (arm, seed), (tokens, value) in ends.items():
            writer.writerow([arm, seed, 0, 0, 0, 0.0, "v"])
            writer.writerow([arm, seed, 1, tokens, 1, value, "v"])
    regime = auto_regimes.Regime.load(auto_regimes.folder() / "dead_ends.yaml")
    mean, half = auto_regimes.gaps(auto_regimes.read(regime), "auto", "GRPO", cost="tokens", metric="greedy_accuracy")
    # Curves are lines from 0. At 10 tokens, those of `auto` are at half of their end.
    expected = [100 * (0.4 - 0.2) / 2, 100 * (0.5 - 0.4) / 2]
    assert mean == pytest.approx(statistics.mean(expected)) and half is None
    assert auto_regimes.verdict(3.0, 2.0) == "ahead" and auto_regimes.verdict(-3.0, 2.0) == "behind"
    assert auto_regimes.verdict(1.0, 2.0) == auto_regimes.verdict(1.0, None) == "level"


def test_seeds_are_added_and_known_seeds_are_not_trained_again(auto_regimes, tmp_path, monkeypatch):
    monkeypatch.setattr(auto_regimes, "RESULTS", tmp_path / "results")
    asked = []

    def compare(command):  # the parts of `trl-explore compare` that the script sees: finishes one more seed per call
        document = auto_regimes.yaml.safe_load((tmp_path / "out/dead_ends/comparison.yaml").read_text())
        asked.append(document["seeds"])
        folder = tmp_path / "out/dead_ends/runs"
        folder.mkdir(exist_ok=True)
        with open(folder / "curves.csv", "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["arm", "seed", "step", "tokens", "seconds", "cpu_seconds", *columns])
            for seed in document["seeds"][: len(asked)]:
                for arm in document["arms"]:
                    writer.writerow([arm["name"], seed, 1, 10, 1, 1, *(0.5 for _ in columns)])
        return subprocess.CompletedProcess(command, returncode=int(len(asked) < len(document["seeds"])))

    monkeypatch.setattr(auto_regimes.subprocess, "run", compare)
    monkeypatch.setattr(auto_regimes, "version", lambda: "v")
    regime = auto_regimes.Regime.load(auto_regimes.folder() / "dead_ends.yaml")
    columns = regime.comparison["metrics"]
    with pytest.raises(SystemExit):  # interrupted after one seed
        auto_regimes.train(regime, [70, 71], tmp_path / "out", 1)
    assert all(set(seeds) == {70} for seeds in auto_regimes.read(regime).values())
    auto_regimes.train(regime, [70, 71], tmp_path / "out", 1)
    assert asked == [[70, 71], [70, 71]]  # `compare` refuses a folder that has other seeds
    auto_regimes.train(regime, [70, 71], tmp_path / "out", 1)
    assert len(asked) == 2
    runs = auto_regimes.read(regime)
    assert all(set(seeds) == {70, 71} and len(seeds[70]) == 1 for seeds in runs.values()) and len(runs) >= 7
