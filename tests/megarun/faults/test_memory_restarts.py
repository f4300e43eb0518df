"""Processes of two nodes on this machine, or a node, are killed: torchrun starts all again, and they continue from copies in memory."""

import pytest
from fault_bench import Bench
from fault_layouts import FOUR, SHARDED
from fault_memory import NODE, PROCESS, recoveries

from megaplan.spec.models import Mesh

pytestmark = [pytest.mark.runtime, pytest.mark.jobs]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "victims"), [(SHARDED, [PROCESS] * 6), (SHARDED, [PROCESS, NODE]), (FOUR, [PROCESS, NODE, PROCESS])])
def test_a_killed_process_or_node_costs_a_step_at_most(mesh: Mesh, victims: list[str], bench: Bench) -> None:
    """No checkpoint is saved; `recoveries` compares the losses with those of a job that nothing interrupts, bit by bit."""
    assert all(found.lost <= 1 for found in recoveries(bench, mesh, victims, seed=1))
