"""Dense matrix products: the smooth maximum of a shape-dependent compute time and a memory time."""

from math import ceil
from typing import Any

from megaplan.cost.step.ledger import BACKWARD, FORWARD, Ledger, Product
from megaplan.cost.step.workload import TimedStep

TILE_ROWS, TILE_COLUMNS = 256, 128
ELEMENT_BYTES = {"bf16": 2.0, "fp8": 1.0, "int8": 1.0, "mxfp8": 1.03125, "nvfp4": 0.5625}
"""Bytes of an operand's element with its share of the block scales: one byte per 32 elements of mxfp8, one per 16 of nvfp4."""
CAST_BYTES = 4.0
"""Bytes that a cast moves per element: one read in bf16, one write for the product, and a transposed one for the weight gradient."""
SUM_BYTES = 6.0
"""Bytes per element of a sum in bf16: two operands are read and one is written."""
JOIN = 1.7
"""Exponent of the smooth maximum of compute and memory time."""


def quality(rows: float, columns: float, num_sms: int) -> float:
    """Useful share, from 0 to 1, of the work after padding to tiles of 256 × 128 and to full waves of the multiprocessors."""
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
        exponent: e, weight of partial tiles and waves.
        half_depth: k0, the K with half of the rate.

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
    """Add a linear [rows, depth] · [depth, columns]: forward, input gradient, weight gradient, and casts of its input and gradient.

    A frozen linear has no weight gradient and no casts for it.

    Args:
        ledger: Ledger of the block.
        work: The step.
        rows: Number of tokens.
        columns: Width of the result.
        depth: Width of the input.
        again: Times that backward runs the forward product again.
        low: True if the product is in the recipe's dtype, False if it is in bf16.
        count: Number of equal linears.
        trained: True if the weight has a gradient.
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
    """Add the products X Aᵀ and (X Aᵀ) Bᵀ and the sum with the linear's result; backward adds to the input's gradient.

    If tensor parallelism shards the linear, X Aᵀ is gathered or reduced over the group.
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
