"""The table of docs/evidence.md is that of the committed results."""

import importlib

import pytest
from commands import EXAMPLES

BENCHMARKS = EXAMPLES / "benchmarks"
COMMAND = "run `python examples/benchmarks/evidence_table.py`"


@pytest.fixture
def evidence_table(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("evidence_table")


def test_the_cells_of_auto_are_those_of_the_results(evidence_table):
    auto_fresh = evidence_table.auto_fresh
    committed = {line.partition("]")[0]: line for line in evidence_table.TARGET.read_text().splitlines()}
    measured = [file.stem for file in auto_fresh.RESULTS.glob("*.csv")]
    assert measured and set(measured) <= set(evidence_table.PROBLEMS)
    for name in measured:
        regime = evidence_table.Regime.load(evidence_table.folder() / f"{name}.yaml")
        cells = " | ".join(evidence_table.cells_of_auto(regime))
        assert committed[f"| [{name}"].endswith(f" | {cells} |"), COMMAND
    not_measured = len(evidence_table.PROBLEMS) - len(measured)
    assert evidence_table.TARGET.read_text().count(evidence_table.NOT_MEASURED) == not_measured, COMMAND


@pytest.mark.slow
def test_the_picture_draws_the_numbers_of_the_table(evidence_table):
    picture = importlib.import_module("evidence_picture")
    rows = evidence_table.TARGET.read_text().splitlines()[2:]
    for name, row in zip(evidence_table.PROBLEMS, rows, strict=True):
        found = picture.leads(evidence_table.Regime.load(evidence_table.folder() / f"{name}.yaml"))
        assert {"best rival", "best method"} <= found.keys()
        assert ("auto" in found) == (evidence_table.NOT_MEASURED not in row)
        assert all(f"{mean:+.1f}" in row and low <= mean <= high for mean, low, high in found.values())


@pytest.mark.slow
def test_the_table_is_that_of_the_results(evidence_table):
    assert evidence_table.TARGET.read_text() == evidence_table.table(), COMMAND


def test_every_regime_is_a_problem(evidence_table):
    known = {path.stem for path in evidence_table.folder().glob("*.yaml")}
    assert known == set(evidence_table.PROBLEMS)


def test_verdicts(evidence_table):
    effect = evidence_table.Effect
    assert evidence_table.verdict_of(effect(2.0, 1.0, 3.0)) == "ahead"
    assert evidence_table.verdict_of(effect(-2.0, -3.0, -1.0)) == "behind"
    assert evidence_table.verdict_of(effect(2.0, -1.0, 5.0)) == evidence_table.verdict_of(effect(2.0)) == "level"
    assert evidence_table.joined("ahead", "ahead") == "ahead"
    assert evidence_table.joined("ahead", "level") == "ahead; at equal CPU seconds level"
