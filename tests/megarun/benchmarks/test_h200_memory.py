"""The GPU benchmark of memory: its plans are legal and large enough, its sums are right, and without a GPU it measures nothing."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megakernels.ops.activation import reference

pytestmark = pytest.mark.runtime
ROOT = Path(__file__).parents[3]
GIB, MIB = 2**30, 2**20


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    for folder in ("benchmarks/accuracy", "benchmarks"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    return importlib.import_module


def test_plans_fill_a_good_part_of_one_gpu(load: Any) -> None:
    cases = list(load("matrix").cases(matrix=ROOT / "benchmarks/h200/memory.yaml"))
    assert len(cases) >= 10
    for case in cases:
        assert case.job.spec.mesh.world_size == 1
        assert 20 * GIB < case.budget.worst.allocated_bytes < 110 * GIB
        assert case.budget.fits
    families = {block.family for case in cases for block in case.job.inventory.layers}
    assert families == set("AMERD")


def test_the_hybrid_has_about_a_billion_parameters(load: Any) -> None:
    for case in load("matrix").cases(frozenset(["hybrid"]), ROOT / "benchmarks/h200/train.yaml"):
        assert case.job.spec.mesh.world_size == 1
        assert 1.0e9 < case.budget.worst.parameters < 1.3e9
        assert case.budget.fits


def test_what_is_reserved_never_shrinks_and_the_last_two_phases_alternate(load: Any) -> None:
    measure = load("h200.measure")
    found = measure.estimate_of(measure.find_case("tiny-hybrid"))
    reserved = [phase["reserved"] for phase in found.values()]
    assert reserved == sorted(reserved)
    assert reserved[-1] == reserved[-2] == max(reserved)
    assert any(phase["allocated"] < before["allocated"] for before, phase in zip(found.values(), list(found.values())[1:], strict=False))


def test_blocks_count_until_their_free_is_requested(load: Any) -> None:
    def event(action: str, addr: int, size: int, place: str = "") -> dict[str, Any]:
        frames = [{"filename": "torch/x.py", "line": 1, "name": "f"}, {"filename": f"/r/src/megarun/{place}", "line": 7, "name": "g"}]
        return {"action": action, "addr": addr, "size": size, "frames": frames if place else []}

    blocks = load("h200.blocks").blocks_at_peak(
        [
            event("alloc", 0, 1000, "a.py"),
            event("alloc", 1, 1000, "a.py"),
            event("alloc", 2, 5000),
            event("free_requested", 2, 5000),
            event("alloc", 3, 4000, "b.py"),  # 6,000 alive: below the 7,000 of before, if the freed ones were not counted
            event("free_completed", 2, 5000),
        ]
    )
    assert sorted(blocks) == [(1024, "megarun/a.py:7 g", 2), (5120, "no Python frame", 1)]


def test_differences_from_the_trace_are_by_size_largest_first(load: Any) -> None:
    from megaplan.columns import Column  # noqa: PLC0415
    from megarun.trace.values import Row  # noqa: PLC0415

    rows = [Row(Column.ACTIVATIONS, "working", "layers.0", "aten.mm", (4,), "float32", 3, 3 * 4096)]
    found = load("h200.blocks").compared_with_trace([(4096, "a", 1), (1 << 20, "b", 2)], rows)
    assert [(row.block_bytes, row.num_measured, row.num_traced, row.excess_bytes) for row in found] == [
        (1 << 20, 2, 0, 2 << 20),
        (4096, 1, 3, -8192),
    ]
    assert "layers.0" in found[1].rows[0]


def test_an_operations_inside_is_the_same_on_fake_and_real_tensors(load: Any) -> None:
    inside = load("h200.scratch").inside

    def run(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return reference.swiglu_forward(gate, up)

    real = torch.ones(256, 1024, dtype=torch.bfloat16), torch.ones(256, 1024, dtype=torch.bfloat16)
    with FakeTensorMode():
        fake = inside(run, (torch.empty(256, 1024, dtype=torch.bfloat16), torch.empty(256, 1024, dtype=torch.bfloat16)))
    # fp32 gate, sigmoid and their product, then fp32 up with gate and product, then the product of both
    assert inside(run, real) == fake
    assert fake.returned_bytes == MIB // 2
    assert fake.peak_bytes >= 3 * MIB


@pytest.mark.slow
def test_without_a_gpu_three_steps_run_and_no_number_is_made_up() -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "benchmarks/h200_memory.py")]
    done = subprocess.run([*command, "--cpu-check"], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("phases init, first_forward_backward, first_optimizer, forward_backward, optimizer") == 3
    assert done.stdout.count("no memory is measured") == 3
    refused = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert (refused.returncode, refused.stdout) == (2, "")


def test_a_plan_that_fails_or_is_past_a_limit_does_not_pass(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    script = load("h200_memory")
    estimate = {"init": {"allocated": 99, "reserved": 200, "device": 300}}
    measured = {"init": {"allocated": 100, "reserved": 200, "device": 310, "requested": 98}}
    results = {"a": {"estimate": estimate, "phases": measured}}
    rows = script.table(results, {("a", "init"): 2})
    assert [rows[0][key] for key in ("allocated_error", "reserved_error", "with_scratch_error")] == pytest.approx([-0.01, 0, 0.01])
    assert set(rows[0]) == set(script.HEADS)
    assert script.passed(results, rows)
    assert not script.passed({**results, "b": {"failure": "out of memory"}}, rows)
    measured["init"]["allocated"] = 96
    assert not script.passed(results, script.table(results, {}))
    monkeypatch.setattr(script, "alone", lambda *_, **__: {"failure": "out of memory"})
    assert script.measure_all(["a", "b"], 10, None, None) == 1
