"""The fault table: whatever breaks a run, nothing past its last checkpoint is lost, and one true sentence says why.

`python scripts/faults_table.py` runs all cases and writes docs/reference/faults.md.
"""

import pytest
from fault_bench import Bench
from fault_cases import KILLS, PROCESSES, QUICK, SLOW, STOPS, RefusedError
from fault_kills import CELLS, MOST_LOST, kill
from fault_replicas import REPLICAS

pytestmark = [pytest.mark.runtime, pytest.mark.jobs]
IN_CI = [*list(KILLS)[:1], *list(REPLICAS)[:2]]
LAUNCHED = KILLS | STOPS | PROCESSES | SLOW


@pytest.mark.parametrize("name", QUICK)
def test_a_fault_of_one_process(name: str, bench: Bench) -> None:
    try:
        row = bench.row(QUICK[name])
    except RefusedError as error:
        pytest.skip(str(error))
    assert row.said


@pytest.mark.jobs
@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in IN_CI else pytest.mark.slow) for name in LAUNCHED])
def test_a_fault_of_several(name: str, bench: Bench) -> None:
    row = bench.row(LAUNCHED[name])
    print(row)  # noqa: T201  (with the seed, which a failure shows)
    assert row.said


@pytest.mark.slow
@pytest.mark.parametrize("number", range(0, len(CELLS), 4))
def test_a_kill_at_a_random_time(number: int, bench: Bench) -> None:
    """`make kills` makes many; `kill` itself compares the losses after the resume."""
    found = kill(bench, 1, number)
    assert found.lost <= MOST_LOST or found.saved == 0, found
