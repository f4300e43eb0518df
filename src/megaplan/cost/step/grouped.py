"""Grouped products of routed experts: all local experts in one launch."""

from __future__ import annotations

from typing import Any

from megaplan.cost.step.gemm import ELEMENT_BYTES, JOIN
from megaplan.cost.step.ledger import BACKWARD, FORWARD, GroupedProduct, Ledger
from megaplan.cost.step.workload import ExpertShape, StepWorkload


def grouped_seconds(
    flops: Any,
    weight_bytes: Any,
    row_bytes: Any,
    rows: Any,
    depth: Any,
    rate: Any,
    bandwidth: Any,
    share: Any,
    half_rows: Any,
    half_depth: Any,
    weight_share: Any,
) -> Any:
    """Seconds of grouped products: ((F / (R · s · m/(m + m0) · K/(K + k0)))^1.7 + ((Bw/w + Br) / W)^1.7)^(1/1.7).

    Args:
        flops: F, of all local experts.
        weight_bytes: Bw, weights read, or gradients read and written.
        row_bytes: Br, rows read and written.
        rows: m, rows of one expert.
        depth: K.
        rate: R, reached FLOPs per second of a large dense product.
        bandwidth: W, reached bytes per second of memory.
        share: s, of the dense rate that grouped kernels reach at most; never above 1.
        half_rows: m0, the rows at which half of that is reached.
        half_depth: k0, as in a dense product.
        weight_share: w, of the memory rate at which weights stream.

    Source: the form fitted to MooreThreads/SimuMax's group_matmul table, B200.
    """
    compute = flops / (rate * share * rows / (rows + half_rows) * depth / (depth + half_depth))
    return (compute**JOIN + ((weight_bytes / weight_share + row_bytes) / bandwidth) ** JOIN) ** (1 / JOIN)


MULTIPLES = {"fp8": 16, "mxfp8": 32, "nvfp4": 32}
"""Rows that products of a dtype take together (`moe_router_padding_for_quantization` of Megatron-Core)."""


def filled_up(work: StepWorkload, shape: ExpertShape) -> float:
    """Rows that experts compute over routed rows: of a fixed capacity, or filled up on every rank to whole multiples.

    They are filled up by half a multiple on average.
    """
    multiple = MULTIPLES.get(work.software.dtype, 1) if work.software.padded_rows else 1
    routed = work.tokens / work.mesh.tp * shape.top_k / shape.num
    return shape.padding * (1 + (multiple - 1) / 2 / routed)


def grouped_linear(
    ledger: Ledger,
    work: StepWorkload,
    rows: float,
    per_expert: float,
    experts: float,
    columns: float,
    depth: float,
    again: float,
    casts: tuple[bool, bool] = (True, True),
) -> None:
    """One linear of every local expert: forward, input and weight gradient, and casts.

    Args:
        ledger: Where to.
        work: The step.
        rows: Routed rows of this rank.
        per_expert: Rows of one expert.
        experts: Local experts.
        columns: Width of the result.
        depth: Width of the input.
        again: Times that backward runs the forward product again.
        casts: Whether its input, and its gradient, are cast by kernels of their own.
    """
    dtype = work.software.dtype
    flops, weights, moved = 2.0 * rows * columns * depth, experts * columns * depth, 2.0 * rows * (columns + depth)
    size = ELEMENT_BYTES[dtype]
    forward = GroupedProduct(FORWARD, dtype, flops, size * weights, moved, per_expert, depth, 1.0)
    ledger.grouped.append(forward)
    if again:
        ledger.grouped.append(forward._replace(run=BACKWARD, times=again))
    ledger.grouped.append(forward._replace(run=BACKWARD, depth=columns))
    if work.model.adapters is None:
        ledger.grouped.append(forward._replace(run=BACKWARD, weight_bytes=8.0 * weights, depth=per_expert))
    if dtype != "bf16":
        ledger.move(FORWARD, 4.0 * rows * depth * casts[0], f"cast.rows.{dtype}")
        ledger.move(BACKWARD, 4.0 * rows * columns * casts[1], f"cast.rows.{dtype}")
