"""
What every method does at TRL's level, in which order, and what it leaves in a checkpoint: as in `tests/golden_seams/`.

A change of the code's form changes none of it. Where behaviour is meant to change, and only there:

    python tests/integration/seam_runs.py --write
"""

from difflib import unified_diff
from itertools import islice

import pytest
from seam_runs import CASES, ON_TWO, VARIANTS, golden, on_two, record


def assert_as_written(found, path):
    differences = unified_diff(path.read_text().splitlines(), found, "as written", "as found", n=4, lineterm="")
    first = "\n".join(islice(differences, 40))
    if first:
        pytest.fail(f"{path.name} is to be written anew only if behaviour is meant to change:\n{first}", pytrace=False)


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] * (c in VARIANTS)) for c in CASES])
def test_one_process_does_what_is_written_down(case, tmp_path):
    assert_as_written(record(case, tmp_path), golden(case))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return on_two(tmp_path_factory.mktemp("seams"))


@pytest.mark.slow
@pytest.mark.xdist_group("seams of two processes")
@pytest.mark.parametrize("case", ON_TWO)
def test_two_processes_do_what_is_written_down(ranks, case):
    for rank, found in ranks.items():
        assert_as_written(found[case], golden(case, rank))


@pytest.mark.slow
@pytest.mark.xdist_group("seams of two processes")
@pytest.mark.parametrize("case", ON_TWO)
def test_two_processes_take_part_in_the_same_collectives(ranks, case):
    first, second = (
        [line.strip() for line in found[case] if line.lstrip().startswith("*")] for found in ranks.values()
    )
    assert first == second != []
