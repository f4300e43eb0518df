"""The host of a step of CUDA graphs: it launches a graph, whatever the number of kernels and microbatches."""

from megaplan.cost.data import GRAPH_OPERATIONS, UPDATE_GRAPH_OPERATIONS, DataTimes, host_ns
from megaplan.spec.load import load_spec

ISSUE_NS = 100_000


def waits(*overrides: str, launches: int = 1000) -> int:
    spec = load_spec("plans/tiny-hybrid.yaml", ("schedule.num_microbatches=4", *overrides)).spec
    return host_ns(spec, ISSUE_NS, 0, DataTimes(0, 0, 0), (60_000_000, launches), (0, 0))


def test_launches_of_graphs_do_not_add_up() -> None:
    assert waits("host.cuda_graphs=none") == 4 * 40_000_000
    assert waits() == waits(launches=5000) == GRAPH_OPERATIONS * ISSUE_NS


def test_graphs_never_wait_longer_than_eager_steps() -> None:
    assert waits(launches=600) == waits("host.cuda_graphs=none", launches=600) == 0
    once = "schedule.num_microbatches=1"
    assert waits(once, launches=601) == waits(once, "host.cuda_graphs=none", launches=601) == ISSUE_NS


def test_the_launches_of_a_recorded_update_do_not_add_up() -> None:
    """Clipping waits as before; AdamW's and Muon's operations wait for two at most."""

    def wait(graphs: str, muon: tuple[int, int], late: int = 0) -> int:
        spec = load_spec("plans/tiny-hybrid.yaml", (f"host.cuda_graphs={graphs}",)).spec
        return host_ns(spec, 0, 1000, DataTimes(0, 0, 0, phases=((2000, 4), muon), late=late), (1, 1), (1, 1))

    assert wait("microbatch", (70_000, 100), 5) == 2000 + 30_000 + 5000
    assert wait("step", (70_000, 100), 5) == 2000 + UPDATE_GRAPH_OPERATIONS * 1000
    assert wait("step", (99_500, 100)) == wait("microbatch", (99_500, 100)) == 2500


def test_a_plan_of_several_ranks_waits_for_every_launch() -> None:
    assert waits("mesh.dp_shard=2") >= 4 * 40_000_000
