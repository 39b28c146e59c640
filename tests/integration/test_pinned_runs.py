"""
Short runs of every method give users what `tests/golden_runs/` says: samples, rewards, weights, metrics and files.

A change of the code's form changes none of it. Only if behavior is meant to change:

    python tests/integration/pinned_runs.py --write
"""

import pytest
from pin_files import differences, joined, read, same, text_of
from pinned_runs import CASES, GOLDEN, ON_TWO, ONE, TWO, VARIANTS, golden, known_of, on_two, record, sections_of

MOST_LINES = 60


def assert_as_written(case, processes, records):
    """Fail with the differences between records of a case and its file."""
    common = read((GOLDEN / "common.txt").read_text())
    written = read(golden(case).read_text())
    one = written if processes == TWO else None
    found = sections_of(processes, records, known_of(case, common, one))
    written = {name: section for name, section in written.items() if name.startswith(processes)}
    lines = differences(written, found)
    if lines:
        shown = "\n".join([*lines[:MOST_LINES], *["..."] * (len(lines) > MOST_LINES)])
        pytest.fail(
            f"{golden(case).name} says otherwise; the first difference often explains the others:\n{shown}\n"
            "Only if behavior is meant to change: python tests/integration/pinned_runs.py --write",
            pytrace=False,
        )


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] * (c in VARIANTS)) for c in CASES])
def test_one_process_is_for_users_as_it_was(case, tmp_path):
    assert_as_written(case, ONE, [record(case, tmp_path)])


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return on_two(tmp_path_factory.mktemp("pinned"))


@pytest.mark.slow
@pytest.mark.xdist_group("pinned runs of two processes")
@pytest.mark.parametrize("case", ON_TWO)
def test_two_processes_are_for_users_as_they_were(ranks, case):
    assert_as_written(case, TWO, ranks[case])


@pytest.mark.slow
@pytest.mark.xdist_group("pinned runs of two processes")
@pytest.mark.parametrize("case", ON_TWO)
def test_two_processes_take_part_in_the_same_collectives(ranks, case):
    first, second = (found["collectives"] for found in ranks[case])
    assert first == second
    assert all(first)


def test_only_decimal_numbers_may_differ_a_little():
    assert same("loss 1.000 rows 8 0e12>a1b2", "loss 1.0005 rows 8 0e12>a1b2")
    assert same("kl 0", "kl 0.000001")
    assert not same("loss 1.000", "loss 1.010")
    assert not same("rows 1000", "rows 1001")
    assert not same("1e05>a1b2", "1e06>a1b2")
    assert not same("loss 1.000", "cost 1.000")


def test_a_file_is_read_as_it_was_written():
    long = " ".join(f"{number:04x}>{number:04x}" for number in range(40))
    run = [("step 1", {"sampled": f"8 rows {long}", "random": "torch 0001"}), ("as above: step 2", {})]
    entries = {"loss": "0.5000", "aux/loss": "0.2500", "aux/a": "time", "aux/b": "1", "aux/c": "", "tree/nodes": "3"}
    sections = {"one process": run, "one process, metrics": [("", entries)]}
    text = text_of(sections)
    assert read(text) == sections
    assert max(map(len, text.splitlines())) <= 118
    assert text.splitlines()[-2:] == ["  -         loss=0.5000 tree/nodes=3", "  aux       a=time b=1 c loss=0.2500"]


def test_a_difference_is_named_by_its_place():
    written = {"one process": [("step 1", {"sampled": "8 rows", "random": "torch 0001"})]}
    found = {"one process": [("step 1", {"sampled": "9 rows", "random": "torch 0001"})]}
    lines = ["one process, step 1, sampled", "    written  8 rows", "    found    9 rows"]
    assert differences(written, found) == lines
    assert differences(written, written) == []


def test_what_two_processes_agree_on_is_written_once():
    first, second = [("step 1", {"weights": "moved 1.000", "random": "a"})], [("step 1", {"weights": "moved 1.000"})]
    assert joined(first, second) == [("step 1", {"weights": "moved 1.000", "random": "a / nothing"})]
