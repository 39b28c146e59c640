"""The benchmark of auto: its arms, its differences, and the tables of the documentation."""

import csv
import importlib
import shutil
import statistics
import sys

import pytest
from commands import EXAMPLES

from trl_explore.errors import UsageError

BENCHMARKS = EXAMPLES / "benchmarks"


@pytest.fixture
def auto_regimes(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("auto_regimes")


@pytest.mark.slow
def test_the_tables_are_those_of_the_results(auto_regimes):
    assert (BENCHMARKS / "auto_results" / "results.md").read_text() == auto_regimes.report()


@pytest.mark.slow
def test_the_table_of_fresh_seeds_is_that_of_the_results(auto_regimes):
    fresh = importlib.import_module("auto_fresh")
    assert (fresh.RESULTS / "results.md").read_text() == fresh.report()
    for path in fresh.RESULTS.glob("*.csv"):
        regime = auto_regimes.Regime.load(auto_regimes.folder() / f"{path.stem}.yaml")
        rows = auto_regimes.read_results(path)
        assert rows == fresh.stage_of(regime, fresh.RESULTS).without_stale(rows)  # they have today's settings
        assert [*fresh.read(regime)["auto"]] == [*fresh.read(regime)["GRPO"]]


@pytest.mark.slow
def test_the_table_of_explorer_sets_is_that_of_the_results(auto_regimes):
    sets = importlib.import_module("explorer_sets")
    assert (sets.RESULTS / "results.md").read_text() == sets.report()
    assert len(list(sets.RESULTS.glob("*.csv"))) == 9


def test_the_picture_has_every_problem_with_results(auto_regimes):
    picture, fresh = importlib.import_module("lead_picture"), importlib.import_module("auto_fresh")
    assert set(picture.WORDS) == {path.stem for path in auto_regimes.RESULTS.glob("*.csv")}
    for name in picture.WORDS:
        regime = auto_regimes.Regime.load(auto_regimes.folder() / f"{name}.yaml")
        mean, low, high = picture.leads(regime)["auto"]
        assert f"{mean:+.1f} ± {(high - low) / 2:.1f}" in (fresh.RESULTS / "results.md").read_text(), name


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
    runs = auto_regimes.by_arm_and_seed(auto_regimes.read_results(tmp_path / "dead_ends.csv"), auto_regimes.STAGE)
    mean, half = auto_regimes.gaps(runs, "auto", "GRPO", cost="tokens", metric="greedy_accuracy")
    # Curves are lines from 0. At 10 tokens, those of `auto` are at half of their end.
    expected = [100 * (0.4 - 0.2) / 2, 100 * (0.5 - 0.4) / 2]
    assert mean == pytest.approx(statistics.mean(expected)) and half is None
    assert auto_regimes.verdict(3.0, 2.0) == "ahead" and auto_regimes.verdict(-3.0, 2.0) == "behind"
    assert auto_regimes.verdict(1.0, 2.0) == auto_regimes.verdict(1.0, None) == "level"


@pytest.mark.slow
def test_all_committed_results_have_the_settings_of_today(auto_regimes, monkeypatch):
    """So `auto_regimes.py` would not train them again, and mixes no settings."""
    sets = importlib.import_module("explorer_sets")
    small = importlib.import_module("small_fields")
    stages = []
    for path in auto_regimes.RESULTS.glob("*.csv"):
        regime = auto_regimes.Regime.load(auto_regimes.folder() / path.with_suffix(".yaml").name)
        stages.append(auto_regimes.stage_of(regime, list(auto_regimes.SEEDS), path.parent))
    for path in sets.RESULTS.glob("*.csv"):
        regime = auto_regimes.Regime.load(auto_regimes.folder() / path.with_suffix(".yaml").name)
        stages.append(sets.Stage(sets.STAGE, sets.document_of(regime), path, path.parent))
    for path in small.RESULTS.glob("*.csv"):
        regime = auto_regimes.Regime.load(auto_regimes.folder() / path.with_suffix(".yaml").name)
        stages.append(small.stage_of(regime, path.parent, "verdict", small.chosen(regime), list(small.SEEDS)))
    assert len(stages) >= 18
    for stage in stages:
        rows = auto_regimes.read_results(stage.results)
        assert not stage.missing(rows) and stage.without_stale(rows) == rows, (stage.results, stage.name)


def test_more_seeds_keep_the_seeds_that_are_there(auto_regimes, tmp_path, monkeypatch):
    committed = auto_regimes.RESULTS / "dead_ends.csv"
    monkeypatch.setattr(auto_regimes, "RESULTS", tmp_path)
    shutil.copy(committed, tmp_path)
    regime = auto_regimes.Regime.load(auto_regimes.folder() / "dead_ends.yaml")
    stage = auto_regimes.stage_of(regime, [79, 80], tmp_path)
    rows = auto_regimes.read_results(stage.results)
    assert {seed for _, seed in stage.missing(rows)} == {80} and stage.without_stale(rows) == rows
    assert stage.selected["seeds"] == [79, 80] and stage.document["seeds"] == [*range(70, 81)]


def test_the_arms_have_their_roles_in_any_order_of_the_file(auto_regimes, tmp_path, monkeypatch):
    results = importlib.import_module("regimes_results")
    for name in ("dead_ends", "deep_ends"):  # the tables of all take long
        shutil.copy(auto_regimes.RESULTS / f"{name}.csv", tmp_path)
    monkeypatch.setattr(auto_regimes, "RESULTS", tmp_path)
    expected = auto_regimes.report()
    rows = results.read_results(tmp_path / "dead_ends.csv")
    last = [row for row in rows if row["arm"] != "GRPO"] + [row for row in rows if row["arm"] == "GRPO"]
    retired = [{**row, "arm": "retired", "settings": "other"} for row in rows if row["arm"] == "auto"]
    results.write_results(tmp_path / "dead_ends.csv", [*retired, *last], [])
    assert auto_regimes.report() == expected
    short = [row for row in rows if row["arm"] != "auto"]  # `auto` was not trained yet
    results.write_results(tmp_path / "dead_ends.csv", short, [])
    assert "dead_ends" not in auto_regimes.report() and "deep_ends" in auto_regimes.report()


def test_a_script_trains_the_named_regimes_and_with_report_none(auto_regimes, tmp_path, monkeypatch, capsys):
    script = importlib.import_module("regime_script")
    trained = []

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["script.py", *arguments])
        parser = script.script_parser("Text.", output_dir="out", regimes=["coverage"])

        def train(regime, args):
            trained.append((regime.name, args.processes))

        script.run_script(parser, train, lambda: "the tables", results=tmp_path)

    run("dead_ends", "--processes", "2")
    run()
    run("--report")
    assert trained == [("dead_ends", 2), ("coverage", 1)]
    assert (tmp_path / "results.md").read_text() == "the tables"
    with pytest.raises(SystemExit):
        run("dead_end")
    assert "unknown regime 'dead_end'; did you mean 'dead_ends'" in capsys.readouterr().err


@pytest.mark.slow
def test_known_runs_without_all_costs_do_not_stop_a_new_seed(auto_regimes, tmp_path):
    """`compare` reports the known runs, too."""
    stages = importlib.import_module("stages")
    results = importlib.import_module("regimes_results")
    document = {
        "task": "examples.benchmarks.tasks:DIALECT",
        "warm_start_steps": 2,
        "budget": {"tokens": 48},
        "evaluations": 1,
        "num_eval": 4,
        "metrics": ["greedy_accuracy"],
        "common": {"per_device_train_batch_size": 4, "num_generations": 2},
        "seeds": [1],
        "arms": [{"name": "GRPO", "method": "grpo", "options": {"learning_rate": 1e-3}}],
    }
    path = tmp_path / "small.csv"
    stages.Stage("new seeds", document, path, tmp_path / "out").train()
    rows = results.read_results(path)
    known = [{**row, "seconds": None, "trained_tokens": None} for row in rows]
    results.write_results(path, known, ["greedy_accuracy"])
    more = stages.Stage("new seeds", {**document, "seeds": [1, 2]}, path, tmp_path / "out")
    more.train()
    found = results.read_results(path)
    assert {row["seed"] for row in found} == {1, 2} and found[: len(known)] == known
    again = stages.Stage("new seeds", {**document, "seeds": [1, 3]}, path, tmp_path / "out", seeds=[3])
    again.train()  # other seeds with the same output folder
    assert {row["seed"] for row in results.read_results(path)} == {1, 2, 3}
    with pytest.raises(UsageError, match="does not have the seeds .4."):
        stages.Stage("new seeds", document, path, tmp_path / "out", seeds=[4])
