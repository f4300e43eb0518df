"""The order torch really executes is the plan's, and another one is refused."""

from collections import Counter
from collections.abc import Iterator
from random import Random

import pytest
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B, ScheduleLoopedBFS

from megaplan.errors import MegaplanError
from megaplan.schedules import (
    SCHEDULES,
    actions,
    computations,
    num_copies,
    placement,
    receive_buffers,
    schedule_problems,
    shared_buffers,
    slots_of_rank,
)
from megaplan.spec.models import Spec
from megarun.parallel.apply.order import RECEIVED, check_order, executed_order, overwritten
from megarun.parallel.apply.pipeline import schedule_class

pytestmark = pytest.mark.runtime


CASES = [
    *[("gpipe", pp, 1, m) for pp, m in [(2, 1), (2, 4), (4, 3)]],
    *[("looped_bfs", pp, vpp, m) for pp, vpp, m in [(2, 2, 1), (2, 3, 4), (4, 2, 5)]],
    *[("1f1b", pp, 1, m) for pp, m in [(1, 1), (1, 4), (2, 2), (2, 5), (3, 3), (4, 4), (4, 9), (8, 8)]],
    *[("interleaved_1f1b", pp, vpp, m) for pp, vpp, m in [(2, 2, 1), (2, 2, 4), (2, 3, 6), (3, 2, 8), (4, 2, 10), (4, 4, 16), (8, 2, 8)]],
    *[
        ("interleaved_zero_bubble", pp, vpp, m)
        for pp, vpp, m in [(2, 1, 4), (2, 2, 1), (2, 2, 4), (3, 2, 8), (4, 1, 8), (4, 2, 16), (8, 2, 8)]
    ],
    *[("zbv", pp, 2, m) for pp, m in [(2, 1), (2, 3), (2, 4), (3, 5), (4, 4), (4, 12), (8, 16)]],
    *[("dualpipev", pp, 2, m) for pp, m in [(2, 4), (2, 7), (3, 6), (4, 8), (4, 13), (8, 16)]],
    *[("paired_1f1b", pp, vpp, m) for pp, vpp, m in [(2, 1, 1), (2, 1, 5), (4, 1, 7), (2, 2, 4), (3, 2, 8), (4, 2, 10), (4, 4, 16)]],
    *[("dualpipe", pp, 1, m) for pp, m in [(2, 4), (2, 8), (4, 8), (4, 14), (6, 12), (8, 18)]],
]


@pytest.mark.requirement("R-26")
@pytest.mark.parametrize(("name", "pp", "vpp", "num_microbatches"), CASES)
def test_torch_executes_the_plans_order(name: str, pp: int, vpp: int, num_microbatches: int) -> None:
    """Every schedule, every rank."""
    planned = actions(name, pp, vpp, num_microbatches)
    for rank in range(pp):
        slots, copies = slots_of_rank(placement(name), rank, pp, vpp), num_copies(placement(name))
        ordered = executed_order(schedule_class(name), slots, rank, pp, num_microbatches, copies)
        executed = [note for note in ordered if not set(RECEIVED) & set(note)]
        assert executed == [str(action) for action in computations(planned[rank])]


def some_degrees(seed: int) -> Iterator[tuple[str, int, int, int]]:
    """Random legal degrees of every schedule."""
    random = Random(seed)
    for name, schedule in SCHEDULES.items():
        pp, vpp = random.randint(2, 7), schedule.least_vpp if schedule.placement == "v" else random.randint(schedule.least_vpp, 4)
        count = pp * random.randint(1, 5) + random.choice([0, 0, 1])
        vpp = 1 if schedule.placement in ("single", "mirror") else vpp
        pp, count = (2 * pp, 4 * pp + 2 * random.randint(0, 9)) if schedule.placement == "mirror" else (pp, count)
        if not schedule_problems(name, pp, vpp, count):
            yield name, pp, vpp, count


@pytest.mark.parametrize("seeds", [range(12), pytest.param(range(12, 120), marks=pytest.mark.slow)], ids=["few", "many"])
def test_no_receive_overwrites_a_buffer_in_use(seeds: range) -> None:
    """In torch's order of receives; with one buffer less a receive does, in some schedule where microbatches share buffers."""
    needed, shared = Counter[str](), set()
    for name, pp, vpp, count in (case for seed in seeds for case in some_degrees(seed)):
        buffers, whole = shared_buffers(name, pp, vpp, count), receive_buffers(name, pp, vpp, count)
        for rank in range(pp):
            slots = slots_of_rank(placement(name), rank, pp, vpp)
            ordered = executed_order(schedule_class(name), slots, rank, pp, count, num_copies(placement(name)))
            for slot, numbers, most in zip(slots, buffers[rank], whole[rank], strict=True):
                assert overwritten(ordered, slot, numbers) is None, (name, pp, vpp, count, rank, slot)
                assert (numbers[0] <= most[0], numbers[1] <= most[1]) == (True, True)
                shared |= {name} if numbers[0] < most[0] else set()
                if numbers[0] > 1:
                    needed[name] += overwritten(ordered, slot, (numbers[0] - 1, numbers[1])) is not None
    assert shared == set(SCHEDULES) - {"gpipe", "looped_bfs"}
    assert set(needed) >= {"1f1b", "interleaved_1f1b", "zbv", "dualpipev", "dualpipe", "gpipe", "looped_bfs"}
    assert needed["1f1b"] > 0


def test_a_schedule_that_would_overwrite_a_buffer_is_refused(spec_with: object, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = Spec.model_validate(spec_with({"mesh.pp": 2, "schedule.num_microbatches": 4}))  # type: ignore[operator]
    monkeypatch.setattr("megarun.parallel.apply.order.shared_buffers", lambda *_: (((0, 1),), ((1, 0),)))
    check_order(Schedule1F1B, 1, spec)
    spec = Spec.model_validate(spec_with({"mesh.pp": 3, "schedule.num_microbatches": 6}))  # type: ignore[operator]
    monkeypatch.setattr("megarun.parallel.apply.order.shared_buffers", lambda *_: (((0, 1),), ((1, 1),), ((1, 0),)))
    with pytest.raises(MegaplanError) as refused:
        check_order(Schedule1F1B, 1, spec)
    assert "receives 1>1 while its buffer is in use" in refused.value.diagnostics[0].detail


def test_another_order_is_refused(spec_with: object) -> None:
    """The refusal names rank, position, both actions and the class."""
    spec = Spec.model_validate(spec_with({"mesh.pp": 2, "schedule.num_microbatches": 4}))  # type: ignore[operator]
    check_order(Schedule1F1B, 0, spec)
    with pytest.raises(MegaplanError) as refused:
        check_order(ScheduleGPipe, 0, spec)
    found = refused.value.diagnostics[0]
    assert found.code == "MP606"
    assert "pp rank 0, position 2: the plan has 0B0, ScheduleGPipe of torch" in found.detail
    assert "runs 0F2" in found.detail


def test_another_order_of_several_chunks_is_refused(spec_with: object) -> None:
    """The position is counted in the rank's computations, waits and communication left out."""
    overrides = {"mesh": {"pp": 2, "vpp": 2}, "schedule": {"kind": "interleaved_1f1b", "num_microbatches": 4}}
    spec = Spec.model_validate(spec_with(overrides))  # type: ignore[operator]
    check_order(ScheduleInterleaved1F1B, 1, spec)
    with pytest.raises(MegaplanError) as refused:
        check_order(ScheduleLoopedBFS, 1, spec)
    found = refused.value.diagnostics[0].detail
    assert "pp rank 1, position 2: the plan has 3F0, ScheduleLoopedBFS of torch" in found
    assert "runs 1F2" in found
