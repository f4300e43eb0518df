"""What the gated delta rule holds inside its Triton kernels.

Slots of some segments, one per tile and head: decayed queries and keys, scores, systems and their inverses, and running sums where each row
of a state has a decay. Forward also the last state; backward states before and after each tile, written values and their gradients, and the
parts of the parameters' gradients.
"""

from __future__ import annotations

from megaplan.blocks.dims import Dims
from megaplan.blocks.scratch import Inside, lane_of
from megaplan.dtypes import DType
from megaplan.families.linear_attention.section import GatedDeltaNet, KimiDeltaAttention

LARGEST_WIDTHS = {DType.BF16: (128, 256), DType.FP16: (128, 256), DType.FP32: (64, 64)}
"""Of a key and of a value, at most, by dtype."""
LARGEST_TILE = {DType.BF16: 64, DType.FP16: 64, DType.FP32: 16}
"""Positions of a tile."""
SMALLEST_SIDE = 16
"""Of a tile."""
PART_BYTES = 2**29
"""Of the slots of as many segments as fit, and at least one."""


def delta_inside(dims: Dims, linear: GatedDeltaNet | KimiDeltaAttention, heads: int, key_heads: int, parameters: DType) -> Inside | None:
    """Of the gated delta rule.

    Args:
        dims: Local sizes.
        linear: The model's section.
        heads: Of values, of this rank.
        key_heads: Of this rank.
        parameters: Dtype of the parameters' gradients.

    Returns:
        None where the kernels do not take these sizes.
    """
    keys, values, dtype, batch = linear.key_dim, linear.value_dim, dims.dtype, dims.batch
    widest, widest_value = LARGEST_WIDTHS[dtype]
    if keys > widest or values > widest_value:
        return None
    rows, wide = isinstance(linear, KimiDeltaAttention), dims.stat_dtype.bytes
    run = lane_of(dims, heads, key_heads)
    segments = -(-run.positions // linear.save_every)
    tile = min(LARGEST_TILE[dtype], max(SMALLEST_SIDE, _power_of_2(min(linear.chunk_size, linear.save_every))))
    tiles = -(-min(linear.save_every, run.positions) // tile)
    forward, backward = _slot_bytes(tile, max(SMALLEST_SIDE, _power_of_2(keys)), max(SMALLEST_SIDE, _power_of_2(values)), dtype, rows)
    of_segment = batch * run.heads * tiles
    slots, slots_backward = (each * min(segments, max(1, PART_BYTES // each)) for each in (of_segment * forward, of_segment * backward))

    last = wide * batch * run.heads * keys * values
    decays = keys if rows else 1
    of_parameters, summed = parameters.bytes * run.heads * (1 + decays), wide * run.heads * (1 + decays)
    shares = summed * batch * segments * tiles
    highest = shares + max(slots_backward - of_parameters, summed)
    if dims.cp == 1:
        return Inside(last + slots, last + highest)
    y, states = dtype.bytes * batch * run.positions * run.heads * values, segments * last
    queries = 2 * dtype.bytes * batch * run.positions * run.groups * keys  # and keys
    made = queries + y + dtype.bytes * batch * run.positions * run.heads * (1 + decays) + of_parameters
    copied = run.copied_starts + run.copied_states(dims, segments, states)
    return Inside(y + states + run.copied_starts + slots, made + highest + copied)


def _slot_bytes(tile: int, keys: int, values: int, dtype: DType, rows: bool) -> tuple[int, int]:
    """Forward and backward, of padded widths."""
    sums = DType.FP32.bytes
    own, summed = 3 * tile * keys + 2 * tile * tile, tile * tile + tile + keys
    decays = (2 if dtype is DType.FP32 else 1) * tile * keys if rows else 0
    summed += decays
    more, more_summed = 2 * keys * values + 2 * tile * values, tile + decays
    forward = own * dtype.bytes + summed * sums
    return forward, forward + more * dtype.bytes + more_summed * sums


def _power_of_2(size: int) -> int:
    return 1 << (size - 1).bit_length()
