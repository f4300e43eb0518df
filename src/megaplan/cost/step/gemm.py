"""Dense matrix products: a compute time that depends on shape, a memory time, and a smooth maximum of both."""

from __future__ import annotations

from math import ceil
from typing import Any

from megaplan.cost.step.ledger import BACKWARD, FORWARD, Ledger, Product
from megaplan.cost.step.workload import TimedStep

TILE_ROWS, TILE_COLUMNS = 256, 128
ELEMENT_BYTES = {"bf16": 2.0, "fp8": 1.0, "mxfp8": 1.03125, "nvfp4": 0.5625}
"""Of an operand, its block scales included: one byte a 32 elements of mxfp8, one a 16 of nvfp4."""
CAST_BYTES = 4.0
"""Of an element that is cast: read in bf16, and written for the product and, transposed, for the weight gradient."""
SUM_BYTES = 6.0
"""Of an element of a sum in bf16: two read, one written."""
JOIN = 1.7
"""Exponent of the smooth maximum of compute and memory time."""


def quality(rows: float, columns: float, num_sms: int) -> float:
    """Share of the work that whole tiles of 256 × 128 and whole waves over the multiprocessors are; 0 to 1."""
    down, across = ceil(rows / TILE_ROWS), ceil(columns / TILE_COLUMNS)
    waves = down * across / num_sms
    return waves / ceil(waves) * (rows / (down * TILE_ROWS)) * (columns / (across * TILE_COLUMNS))


def product_seconds(flops: Any, moved: Any, shape: Any, depth: Any, rate: Any, bandwidth: Any, exponent: Any, half_depth: Any) -> Any:
    """Seconds of M·N·K: ((F / (R · q^e · K/(K + k0)))^1.7 + (B / W)^1.7)^(1/1.7).

    Args:
        flops: F = 2·M·N·K.
        moved: B, bytes of operands and result.
        shape: q, see `quality`.
        depth: K.
        rate: R, reached FLOPs per second of large products under load.
        bandwidth: W, reached bytes per second of memory.
        exponent: e, how much partial tiles and waves cost.
        half_depth: k0, the K at which half the rate is reached.

    Source: the form fitted to MooreThreads/SimuMax's operation tables, A100 and B200.
    """
    compute = flops / (rate * shape**exponent * depth / (depth + half_depth))
    return (compute**JOIN + (moved / bandwidth) ** JOIN) ** (1 / JOIN)


def linear(
    ledger: Ledger,
    work: TimedStep,
    rows: float,
    columns: float,
    depth: float,
    *,
    again: float = 0.0,
    low: bool = True,
    count: float = 1.0,
    trained: bool = True,
) -> None:
    """A linear [rows, depth] · [depth, columns]: forward, input gradient, weight gradient, and casts of its input and gradient.

    A frozen one has no weight gradient, so neither its input nor its gradient is cast for one.

    Args:
        ledger: Where to.
        work: The step.
        rows: Tokens.
        columns: Width of the result.
        depth: Width of the input.
        again: Times that backward runs the forward product again.
        low: True if it multiplies in the recipe's dtype, else in bf16.
        count: Linears like this.
        trained: True if its weight has a gradient.
    """
    dtype = (work.software.linear_dtype or work.software.dtype) if low else "bf16"
    size = ELEMENT_BYTES[dtype]
    num_sms, flops = work.machine.num_sms, 2.0 * rows * columns * depth
    inputs, weights, results = rows * depth, columns * depth, rows * columns
    forward = Product(FORWARD, dtype, flops, size * (inputs + weights) + 2 * results, quality(rows, columns, num_sms), depth, count)
    ledger.products.append(forward)
    if again:
        ledger.products.append(forward._replace(run=BACKWARD, times=count * again))
    moved = size * (results + weights) + 2 * inputs
    ledger.products.append(Product(BACKWARD, dtype, flops, moved, quality(rows, depth, num_sms), columns, count))
    if trained:
        moved = size * (results + inputs) + 8.0 * weights
        ledger.products.append(Product(BACKWARD, dtype, flops, moved, quality(columns, depth, num_sms), rows, count))
    if dtype != "bf16":
        cast = CAST_BYTES if trained else CAST_BYTES - 1.0
        ledger.move(FORWARD, cast * inputs * count, f"cast.{dtype}")
        ledger.move(BACKWARD, cast * results * count, f"cast.{dtype}")


def adapter(ledger: Ledger, work: TimedStep, rows: float, columns: float, depth: float, again: float) -> None:
    """X Aᵀ, its product with Bᵀ, and the sum with the linear's result; backward the sum with the input's gradient.

    Of a linear that tensor parallelism cuts, the narrow stream is gathered or summed over the group.
    """
    assert work.spec.lora is not None
    rank, tp = work.spec.lora.rank, work.mesh.tp
    linear(ledger, work, rows, rank, depth, again=again, low=False)
    linear(ledger, work, rows, columns, rank, again=again, low=False)
    ledger.move(FORWARD, SUM_BYTES * rows * columns)
    ledger.move(BACKWARD, SUM_BYTES * rows * (depth + again * columns))
    if tp > 1:
        for run in (FORWARD, BACKWARD):
            ledger.transfer(run, "tensor", 2.0 * rows * rank * (tp - 1) / tp, 1)
