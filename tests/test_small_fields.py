"""The benchmark of the small fields: its arms, the choice between two values of a field, and the committed table."""

import importlib

import pytest
from commands import EXAMPLES

BENCHMARKS = EXAMPLES / "benchmarks"


@pytest.fixture
def small_fields(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("small_fields")


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


def test_the_best_fields_on_the_development_seeds_are_those_of_the_verdict(small_fields):
    regime = small_fields.Regime.load(small_fields.folder() / "dead_ends.yaml")
    assert small_fields.chosen(regime) == small_fields.read(regime, "verdict")[1]
