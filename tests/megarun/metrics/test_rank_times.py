"""The rank that the others wait for, found from each rank's times of a step."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from megaplan.spec.models import Mesh
from megarun.metrics.rank_times import COMPUTING, DATA, WaitSampler, rank_times

pytestmark = pytest.mark.runtime
DP4 = Mesh(dp_shard=4)


def compared(mesh: Mesh, computing: list[float], data: list[float] | None = None, *, is_sampled: bool = True) -> Any:
    step = 2.0
    data = data or [0.01] * len(computing)
    return rank_times(mesh, 10, data, computing, [step - each for each in computing], is_sampled=is_sampled)


def test_a_slow_rank_is_named_with_its_place() -> None:
    found = compared(DP4, [1.0, 1.0, 1.9, 1.1])
    assert (found.slowest_rank, found.slowest_in) == (2, COMPUTING)
    assert found.note == "rank 2 (dp_shard 2) is slow: computing 1.9 s per step, 1 s on other ranks of its stage"
    assert found.rank_communication_seconds == pytest.approx([1.0, 1.0, 0.1, 0.9])


def test_within_the_spread_no_rank_is_named() -> None:
    assert compared(DP4, [1.0, 1.4, 1.2, 1.0]).note is None
    assert compared(DP4, [0.01, 0.02, 0.01, 0.01]).note is None, "too short a time to matter in a step"


def test_stages_may_take_unequal_times() -> None:
    """Ranks are compared with others of their pipeline rank; the only rank of its stage has none."""
    assert compared(Mesh(pp=2, dp_shard=2), [0.5, 0.5, 1.9, 1.9]).note is None
    assert compared(Mesh(pp=2, dp_shard=2), [0.5, 0.5, 1.0, 1.9]).slowest_rank == 3
    assert compared(Mesh(pp=2), [0.5, 1.9]).note is None


def test_a_slow_disk_is_not_slow_computing() -> None:
    found = compared(DP4, [1.0] * 4, [0.1, 0.9, 0.1, 0.1])
    assert (found.slowest_rank, found.slowest_in) == (1, DATA)


def test_what_is_not_measured_is_not_judged() -> None:
    found = compared(DP4, [1.0, 1.0, 1.9, 1.0], is_sampled=False)
    assert (found.rank_compute_seconds, found.rank_communication_seconds, found.slowest_rank) == (None, None, None)
    assert compared(DP4, [1.0] * 4, [0.1, 0.9, 0.1, 0.1], is_sampled=False).slowest_rank == 1


@pytest.mark.parametrize("waits", [True, False])
def test_waiting_is_not_computing(waits: bool) -> None:
    looked = threading.Event()
    left = iter(range(3))

    def operation() -> tuple[str, bool]:
        if next(left, None) is None:
            looked.set()
        return "x", waits

    with WaitSampler(SimpleNamespace(operation=operation)) as sampler:  # type: ignore[arg-type]
        assert looked.wait(30)
        assert (sampler.take() > 0) == waits
