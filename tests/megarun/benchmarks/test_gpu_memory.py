"""Specs that the GPU benchmark trains: plans that are legal and large enough, estimates with peaks, blocks and profiles read right."""

from typing import Any, NamedTuple

import pytest

pytest.importorskip("triton")
from accuracy.matrix import cases
from gpu import blocks, measure, profiles
from gpu.jobs import SPECS

from megaplan.columns import Column
from megarun.job.support import refuse_unbuilt
from megarun.trace.values import Row

pytestmark = pytest.mark.runtime
GIB = 2**30


def test_plans_fill_a_good_part_of_one_gpu() -> None:
    found = list(cases(matrix=measure.MEMORY))
    assert len(found) == 20
    for case in found:
        assert case.job.spec.mesh.world_size == 1
        assert case.job.spec.host.kernels == "triton"
        assert 15 * GIB < case.budget.worst.allocated_bytes < 110 * GIB
        assert case.budget.fits
        refuse_unbuilt(case.job.spec)
    families = {block.family for case in found for block in case.job.inventory.layers}
    assert families == set("AMERD")
    assert sum(case.job.spec.precision.recipe is not None for case in found) == 2


@pytest.mark.parametrize("name", SPECS)
def test_what_is_trained_fits_one_gpu(name: str) -> None:
    case = measure.find_case(name)
    assert case.job.spec.mesh.world_size == 1
    assert case.budget.fits
    refuse_unbuilt(case.job.spec)


def test_what_is_reserved_never_shrinks_and_the_last_two_phases_alternate() -> None:
    found = measure.estimate_of(measure.find_case("tiny-hybrid"))
    reserved = [phase["reserved"] for phase in found.values()]
    assert reserved == sorted(reserved)
    assert reserved[-1] == reserved[-2] == max(reserved)
    assert any(phase["allocated"] < before["allocated"] for before, phase in zip(found.values(), list(found.values())[1:], strict=False))


def test_every_plan_has_rows_of_its_features() -> None:
    spec = measure.find_case("nam56r").job.spec
    source = measure.RandomRows(spec)
    rows, classes = source.rows(3, 0, 2, 64), source.structure_rows(3, 0, 2, 64)
    assert rows.shape == classes.shape == (2, 65)
    assert 0 <= rows.min() <= rows.max() < spec.model.vocab_size
    assert classes.max() < spec.model.features.structure.num_categories
    assert (rows == source.rows(3, 0, 2, 64)).all()
    assert (rows != source.rows(4, 0, 2, 64)).any()


def test_blocks_count_until_their_free_is_requested() -> None:
    def event(action: str, addr: int, size: int, place: str = "") -> dict[str, Any]:
        frames = [{"filename": "torch/x.py", "line": 1, "name": "f"}, {"filename": f"/r/src/megarun/{place}", "line": 7, "name": "g"}]
        return {"action": action, "addr": addr, "size": size, "frames": frames if place else []}

    found = blocks.blocks_at_peak(
        [
            event("alloc", 0, 1000, "a.py"),
            event("alloc", 1, 1000, "a.py"),
            event("alloc", 2, 5000),
            event("free_requested", 2, 5000),
            event("alloc", 3, 4000, "b.py"),  # 6,000 alive: below the 7,000 of before, if the freed ones were not counted
            event("free_completed", 2, 5000),
        ]
    )
    assert sorted(found) == [(1024, "megarun/a.py:7 g", 2), (5120, "no Python frame", 1)]


def test_differences_from_the_trace_are_by_size_largest_first() -> None:
    rows = [Row(Column.ACTIVATIONS, "working", "layers.0", "aten.mm", (4,), "float32", 3, 3 * 4096)]
    found = blocks.compared_with_trace([(4096, "a", 1), (1 << 20, "b", 2)], rows)
    assert [(row.block_bytes, row.num_measured, row.num_traced, row.excess_bytes) for row in found] == [
        (1 << 20, 2, 0, 2 << 20),
        (4096, 1, 3, -8192),
    ]
    assert "layers.0" in found[1].rows[0]


class Event(NamedTuple):
    """An event of torch's profiler."""

    named: str
    device: str
    start: int
    length: int
    correlation: int = 0
    linked: int = 0
    annotation: bool = False

    def is_user_annotation(self) -> bool:
        return self.annotation

    def name(self) -> str:
        return self.named

    def device_type(self) -> str:
        return f"DeviceType.{self.device}"

    def correlation_id(self) -> int:
        return self.correlation

    def linked_correlation_id(self) -> int:
        return self.linked

    def start_ns(self) -> int:
        return self.start

    def duration_ns(self) -> int:
        return self.length


def test_a_profile_is_of_the_device_and_by_part() -> None:
    product = "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NNT"
    events = [
        Event("aten::baddbmm", "CPU", 0, 9_000_000, correlation=7),
        Event(product, "CUDA", 1_000_000, 2_000_000, linked=7),
        Event(product, "CUDA", 2_000_000, 2_000_000),  # on another stream
        Event("m2rnn_forward_kernel", "CUDA", 6_000_000, 1_000_000),
        Event("Optimizer.step#Muon.step", "CUDA", 0, 9_000_000, annotation=True),  # a range around kernels
    ]
    found = profiles.summary(events, on_gpu=True)
    assert (found["kernels"], found["busy_ms"], found["span_ms"], found["sum_ms"]) == (3, 4.0, 6.0, 5.0)
    assert found["by_kernel"] == [[product, 2, 4.0], ["m2rnn_forward_kernel", 1, 1.0]]
    assert sorted(found["by_group"]) == [["GEMM dgrad, Muon's products", 1, 2.0], ["Muon GEMM (baddbmm)", 1, 2.0], ["m2rnn fwd", 1, 1.0]]
    assert found["idle"] == [["GEMM dgrad, Muon's products", "m2rnn fwd", 1, 2.0]]
    assert profiles.summary([], on_gpu=True)["busy_ms"] == 0
