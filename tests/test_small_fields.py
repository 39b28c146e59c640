"""The benchmark of the small fields: its arms, the choice between two values of a field, and the committed table."""

import csv
import importlib
import json

import pytest
from commands import EXAMPLES

BENCHMARKS = EXAMPLES / "benchmarks"
GRPO, WEAK, STRONG = {"learning_rate": 1e-3}, {"success_weight": 0.1}, {"success_weight": 1.0}


@pytest.fixture
def small_fields(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("small_fields")


def write(path, rows):
    """Write runs of two evaluations: arm, fields, seed and the accuracy at 10 tokens, on both stages."""
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        costs = ["tokens", "trained_tokens", "cpu_seconds"]
        writer.writerow(["stage", "arm", "options", "seed", "step", *costs, "greedy_accuracy"])
        for stage, arm, options, seed, value in rows:
            for step, accuracy in ((0, 0.0), (1, value)):
                cost = 10 * step
                writer.writerow([stage, arm, json.dumps(options), seed, step, cost, cost, cost, accuracy])


@pytest.mark.slow
def test_the_table_is_that_of_the_results(small_fields):
    assert (small_fields.RESULTS / "results.md").read_text() == small_fields.report()


def test_pods_and_its_control_sample_four_times_and_pods_trains_fewer(small_fields):
    arms = small_fields.variants({"learning_rate": 1e-3}, num_generations=8, rows=128)
    (control,) = arms["GRPO, 4x samples"]
    assert control["num_generations"] == 32 and control["per_device_train_batch_size"] == 512
    assert [options["trained_generations"] for options in arms["PODS"]] == [8, 16]
    for options in arms["PODS"]:
        assert {name: value for name, value in options.items() if name != "trained_generations"} == control
    rates = [options["learning_rate"] for options in arms["REINFORCE with weights"]]
    assert rates == [1e-3, 1e-3, 1e-4, 1e-4]


def test_the_better_value_on_the_development_seeds_is_chosen_and_differences_are_paired(
    small_fields, tmp_path, monkeypatch
):
    monkeypatch.setattr(small_fields, "RESULTS", tmp_path)
    rows = [("knob", "GRPO / 1", GRPO, 1, 0.4)]
    rows += [("knob", "REINFORCE with weights / 1", WEAK, 1, 0.2)]
    rows += [("knob", "REINFORCE with weights / 2", STRONG, 1, 0.3)]
    for seed, plain, other in ((2, 0.4, 0.6), (3, 0.2, 0.4), (4, 0.6, 0.8)):
        rows += [("verdict", "GRPO", GRPO, seed, plain), ("verdict", "REINFORCE with weights", STRONG, seed, other)]
    write(tmp_path / "dead_ends.csv", rows)
    regime = small_fields.Regime.load(small_fields.folder() / "dead_ends.yaml")
    assert small_fields.chosen(regime) == {"GRPO": GRPO, "REINFORCE with weights": STRONG}
    *_, grpo, reinforce = small_fields.report().splitlines()
    assert grpo == "| dead_ends | GRPO |  | 20.0 | 20.0 | 20.0 |"  # the curve's mean is half of its end, 40
    assert reinforce.startswith("| dead_ends | REINFORCE with weights | success_weight 1.0 | +10.0 ± 0.0 |")
