"""What Mamba-2's scan holds inside its Triton kernels.

Forward the last state; backward the gradients of the saved states, beside steps and running sums or parts of dt's gradient.
"""

from __future__ import annotations

from megaplan.blocks.dims import Dims
from megaplan.blocks.scratch import Inside, lane_of, narrowed
from megaplan.dtypes import DType
from megaplan.families.mamba.section import Mamba2

SCAN_WIDTH = {DType.BF16: 128, DType.FP16: 128, DType.FP32: 32}
"""Of a head and of a state, at most, by dtype."""
SCAN_TILE = {DType.BF16: 64, DType.FP16: 64, DType.FP32: 16}
"""Positions of a tile."""
SCAN_BLOCK = 64
"""Columns of a head at a time."""
SMALLEST_SIDE = 16
"""Of a tile."""


def scan_inside(dims: Dims, mamba: Mamba2, heads: int, groups: int, parameters: DType) -> Inside | None:
    """Of Mamba-2's scan.

    Args:
        dims: Local sizes.
        mamba: The model's section.
        heads: Of this rank.
        groups: Of this rank.
        parameters: Dtype of the parameters' gradients.

    Returns:
        None where the kernels do not take these sizes.
    """
    width, state, dtype = mamba.head_dim, mamba.state_dim, dims.dtype
    if max(width, state) > SCAN_WIDTH[dtype]:
        return None
    run = lane_of(dims, heads, groups)
    num_chunks = -(-run.positions // mamba.chunk_size)
    tile = min(SCAN_TILE[dtype], max(SMALLEST_SIDE, _power_of_2(mamba.chunk_size)))
    num_blocks = -(-width // min(SCAN_BLOCK, max(SMALLEST_SIDE, _power_of_2(width))))
    num_tiles = num_chunks * -(-min(mamba.chunk_size, run.positions) // tile)

    last = dims.stat_dtype.bytes * dims.batch * run.heads * width * state
    states = dtype.bytes * dims.batch * num_chunks * run.heads * width * state
    x = dtype.bytes * dims.batch * run.positions * run.heads * width
    keys = 2 * dtype.bytes * dims.batch * run.positions * run.groups * state  # B and C
    per_step = dims.stat_dtype.bytes * dims.batch * run.positions * run.heads
    shares = dims.stat_dtype.bytes * 3 * num_blocks * dims.batch * num_tiles * run.heads
    of_parameters = 3 * parameters.bytes * run.heads
    highest = max(
        num_blocks * per_step + narrowed(dtype, per_step) + shares - keys - of_parameters,
        shares + narrowed(parameters, dims.stat_dtype.bytes * run.heads) - keys,
        3 * per_step,
    )
    if dims.cp == 1:
        return Inside(last, last + states + highest)
    made = x + dtype.bytes * dims.batch * run.positions * run.heads + keys + of_parameters
    copied = run.copied_states(dims, num_chunks, states) + run.copied_starts
    return Inside(x + states + run.copied_starts, made + states + highest + copied)


def _power_of_2(size: int) -> int:
    return 1 << (size - 1).bit_length()
