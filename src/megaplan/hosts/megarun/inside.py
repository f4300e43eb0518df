"""What the scans' Triton kernels hold inside themselves, in bytes: beside operands and results, at the highest moment of each direction.

The operations state the same to whoever traces them (`megakernels.scratch_bytes`). Where a model's sizes stay with plain torch, nothing is
counted, as of any plain torch.

In M, forward the last state; backward the gradients of the saved states, beside steps and running sums or parts of dt's gradient. In R,
backward a segment's states, made again, and the parts of q's and k's gradients. Under CP both are done a lane of heads and a piece of
positions at a time, and what is made is copied to where the whole lies.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from megaplan.columns import Column
from megaplan.dtypes import DType
from megaplan.hosts.megarun.dims import Dims
from megaplan.hosts.megarun.hand_off import PIECES, num_lanes
from megaplan.hosts.megarun.parts import Shapes, storages
from megaplan.spec.models import Mamba2, MatrixRecurrence

INSIDE, INSIDE_BACKWARD = "inside", "inside_backward"
"""Names of the storages that stand for it."""

SCAN_WIDTH = {DType.BF16: 128, DType.FP16: 128, DType.FP32: 32}
"""Of a head and of a state, at most, by dtype."""
SCAN_TILE = {DType.BF16: 64, DType.FP16: 64, DType.FP32: 16}
"""Positions of a tile."""
SCAN_BLOCK = 64
"""Columns of a head at a time."""
SMALLEST_SIDE = 16
"""Of a tile."""
LARGEST_KEYS, LARGEST_VALUES = 128, 16
"""Sides of a state of R."""
PARTS_BYTES = 64 << 20
"""For the parts of the gradients of q and k in R."""


class Inside(NamedTuple):
    """Bytes inside one run of an operation, forward and backward."""

    forward: int
    backward: int


class _Lane(NamedTuple):
    """What one run sees: positions, heads and groups, of how many lanes, and the document starts that are copied, being a view."""

    positions: int
    heads: int
    groups: int
    lanes: int
    copied_starts: int

    def copied_states(self, dims: Dims, num_states: int, nbytes: int) -> int:
        """Bytes of saved states that are copied, a piece's and lane's part of them, unless that part is one run of memory."""
        return nbytes if dims.batch > 1 or (self.lanes > 1 and num_states > 1) else 0


def _lane(dims: Dims, heads: int, groups: int) -> _Lane:
    if dims.cp == 1:
        return _Lane(dims.tokens, heads, groups, 1, 0)
    lanes, positions = num_lanes(groups, dims.cp), dims.tokens // PIECES
    starts = dims.batch * positions * DType.INT32.bytes if dims.packed and dims.batch > 1 else 0
    return _Lane(positions, heads // lanes, groups // lanes, lanes, starts)


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
    run = _lane(dims, heads, groups)
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
        num_blocks * per_step + _narrowed(dtype, per_step) + shares - keys - of_parameters,
        shares + _narrowed(parameters, dims.stat_dtype.bytes * run.heads) - keys,
        3 * per_step,
    )
    if dims.cp == 1:
        return Inside(last, last + states + highest)
    made = x + dtype.bytes * dims.batch * run.positions * run.heads + keys + of_parameters
    copied = run.copied_states(dims, num_chunks, states) + run.copied_starts
    return Inside(x + states + run.copied_starts, made + states + highest + copied)


def recurrence_inside(dims: Dims, recurrent: MatrixRecurrence, heads: int, parameters: DType) -> Inside | None:
    """Of the M²RNN recurrence; arguments and result as of `scan_inside`."""
    keys, values, save_every = recurrent.key_dim, recurrent.value_dim, recurrent.save_every
    if keys > LARGEST_KEYS or values > LARGEST_VALUES:
        return None
    run, wide = _lane(dims, heads, heads), dims.stat_dtype.bytes
    num_segments = -(-run.positions // save_every)
    span = max(1, PARTS_BYTES // (2 * wide * dims.batch * save_every * run.heads * keys))
    before = max(0, num_segments - span)  # segments before the span that is walked first
    longest = max(run.positions - before * save_every, min(span, before) * save_every)

    state = wide * dims.batch * run.heads * keys * values
    part = 2 * wide * dims.batch * longest * keys
    sums = [run.heads * prod(shape) for shape in ((values, values), (values,), (), ())]  # elements of the parameters
    gradients = [parameters.bytes * count for count in sums]
    walking = 2 * save_every * state + run.heads * part + max(part, run.copied_starts) - sum(gradients)
    summing = (_narrowed(parameters, wide * count) - sum(gradients[index + 1 :]) for index, count in enumerate(sums))
    highest = wide * dims.batch * sum(sums) + max(walking, 0, *summing)
    if dims.cp == 1:
        return Inside(0, state + highest)
    y, states = dims.dtype.bytes * dims.batch * run.positions * run.heads * values, (num_segments + 1) * state
    made = y + dims.dtype.bytes * dims.batch * run.positions * (run.heads + 2 * keys) + sum(gradients)
    copied = run.copied_states(dims, num_segments + 1, states)
    return Inside(y + states + max(0, run.copied_starts - state), made + highest + copied)


def inside_storages(dims: Dims, inside: Inside | None) -> Shapes:
    """The storages that stand for what an operation holds, counted in elements of activations; none for plain torch."""
    if inside is None:
        return {}
    counts = {INSIDE: (inside.forward // dims.dtype.bytes,), INSIDE_BACKWARD: (inside.backward // dims.dtype.bytes,)}
    return storages(dims.dtype, Column.WORKSPACE, counts)


def _narrowed(result: DType, sum_bytes: int) -> int:
    """A sum in fp32 that is there beside the result it is rounded to; where it is the result, nothing."""
    return 0 if result is DType.FP32 else sum_bytes


def _power_of_2(size: int) -> int:
    return 1 << (size - 1).bit_length()
