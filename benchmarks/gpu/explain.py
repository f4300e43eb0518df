"""Difference between one plan's peak on a GPU and the trace of the same phase, size by size."""

from typing import Any

from gpu.blocks import compared_with_trace
from gpu.measure import How, find_case, train_plan

from megaplan.columns import Phase
from megaplan.spec.host import device_of
from megarun.trace.run import trace_alone

SHOWN_SIZES = 30


def explain(name: str) -> int:
    """Train two steps with the allocator's history, trace the same plan, print both."""
    lines: list[dict[str, Any]] = []
    train_plan(name, How(num_steps=2, explain=True), lines.append)
    found = lines[0]
    phase = max(found["phases"], key=lambda phase: found["phases"][phase]["allocated"])
    job = find_case(name).job
    rows = trace_alone(job, 0, device_of(job.spec.device).gemm_workspace.value).rows[Phase(phase)]
    measured, estimate = found["phases"][phase]["allocated"], found["estimate"][phase]["allocated"]
    print(f"{name}: peak in {phase}, measured {measured:,} B, estimate {estimate:,} B")
    for row in compared_with_trace(found["blocks"], rows)[:SHOWN_SIZES]:
        print(f"{row.excess_bytes:+18,} B: {row.num_measured} measured, {row.num_traced} traced of {row.block_bytes:,} B")
        for text in (*(f"gpu   {place}" for place in row.places[:4]), *(f"trace {text}" for text in row.rows[:4])):
            print(f"    {text}")
    return 0
