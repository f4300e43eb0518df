"""What the scans of Mamba hold inside their Triton kernels.

Forward the last state.
Mamba-1 backward: parts of the gradients of B and C, every second state of a segment, and sums for the parameters.
Mamba-2, in both: tables of every position and head, and a number of every chunk and head; backward also the
gradients of the saved states, states and their gradients before and after every tile of some chunks with sums over some heads for the
gradients of B and C, and parts of those of dt.
Mamba-3, in both: tables of every position and head, and states before every tile of some segments; backward also their gradients, those of
rotated rows and outputs of these tiles, and those of the angles of every position and head, and of every tile's start.
"""

from __future__ import annotations

from megaplan.blocks.dims import Dims
from megaplan.blocks.scratch import Inside, lane_of
from megaplan.dtypes import DType
from megaplan.families.mamba.section import Mamba1, Mamba2, Mamba3

SELECTIVE_WIDTH = 16
"""Mamba-1: numbers of a channel's state, at most."""
SELECTIVE_CHANNELS, WARP = 128, 32
"""Mamba-1: channels of a program of the backward, at most, and at least."""
SELECTIVE_GROUP = 2
"""Mamba-1: positions of which one state is kept while backward makes a segment's again."""

SCAN_WIDTH = {DType.BF16: 128, DType.FP16: 128, DType.FP32: 32}
"""Of a head and of a state, at most, by dtype."""
SCAN_TILE = {DType.BF16: 64, DType.FP16: 64, DType.FP32: 16}
"""Positions of a tile."""
SCAN_BLOCK = 64
"""Columns of a head at a time."""
SCAN_HEADS = 16
"""Mamba-2: heads of a group that are summed at once."""
SCAN_SEGMENT_BYTES = 2**28
"""Mamba-2: of states, their gradients and the sums over heads, of as many chunks as fit, and at least one."""
SMALLEST_SIDE = 16
"""Of a tile."""

TRAPEZOIDAL_WIDTHS = {DType.BF16: (64, 128), DType.FP16: (64, 128), DType.FP32: (32, 32)}
"""Mamba-3: of a head and of a state, at most, by dtype."""
TRAPEZOIDAL_RANK = 4
"""Mamba-3: ranks, at most."""
TRAPEZOIDAL_ROWS = {DType.BF16: 64, DType.FP16: 64, DType.FP32: 16}
"""Mamba-3: rows of a tile, ranks of positions."""
TILES_PER_SHARE = 4
"""Mamba-3: tiles whose gradients of parameters are summed at once."""
STATES_BYTES = 2**30
"""Mamba-3: of states, their gradients, and those of rows and outputs, of as many segments as fit, and at least one."""
NUM_TABLES = 4
"""Mamba-3: values per position and head that its kernels read, beside cosines and sines."""
STEP_TILE = 16
"""Mamba-3: positions whose gradients of dt are summed for dt_bias at once."""


def kernels_accept(mamba: Mamba1 | Mamba2 | Mamba3, dtype: DType) -> bool:
    """Whether the Triton kernels take the scan's sizes with inputs of `dtype`; the reference runs where they do not."""
    if isinstance(mamba, Mamba1):
        return mamba.state_dim <= SELECTIVE_WIDTH
    if isinstance(mamba, Mamba2):
        return max(mamba.head_dim, mamba.state_dim) <= SCAN_WIDTH[dtype]
    widest, widest_state = TRAPEZOIDAL_WIDTHS[dtype]
    return mamba.head_dim <= widest and 1 < mamba.state_dim <= widest_state and mamba.mimo_rank <= TRAPEZOIDAL_RANK


def selective_inside(dims: Dims, mamba: Mamba1, channels: int, parameters: DType) -> Inside | None:
    """Of Mamba-1's scan over `channels` of this rank; other arguments and result as for Mamba-2's."""
    width, sums, batch = mamba.state_dim, dims.stat_dtype.bytes, dims.batch
    if not kernels_accept(mamba, dims.dtype):
        return None
    run = lane_of(dims, channels, channels)
    num_segments, groups = -(-run.positions // mamba.save_every), -(-min(mamba.save_every, run.positions) // SELECTIVE_GROUP)
    tile = min(SELECTIVE_CHANNELS, max(WARP, _power_of_2(run.heads)))
    blocks = -(-run.heads // tile)

    last, of_keys, of_parameters = (
        sums * each for each in (batch * run.heads * width, batch * run.positions * width, run.heads * (width + 2))
    )
    again = sums * batch * blocks * groups * tile * _power_of_2(width)
    held = 2 * blocks * of_keys + again + batch * of_parameters
    if dims.cp == 1:
        return Inside(last, last + held + max(of_keys, of_parameters))
    x, keys = (dims.dtype.bytes * batch * run.positions * each for each in (run.heads, width))
    made = 2 * x + 2 * keys + parameters.bytes * run.heads * (width + 2)
    copied = run.copied_states(dims, num_segments, num_segments * last) + run.copied_starts
    return Inside(x + num_segments * last + run.copied_starts, made + held + max(copied, of_keys, of_parameters))


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
    if not kernels_accept(mamba, dtype):
        return None
    run, batch, sums = lane_of(dims, heads, groups), dims.batch, dims.stat_dtype.bytes
    num_chunks = -(-run.positions // mamba.chunk_size)
    tile = min(SCAN_TILE[dtype], max(SMALLEST_SIDE, _power_of_2(mamba.chunk_size)))
    columns = min(SCAN_BLOCK, max(SMALLEST_SIDE, _power_of_2(width)))
    num_blocks, tiles = -(-width // columns), -(-min(mamba.chunk_size, run.positions) // tile)

    last = sums * batch * run.heads * width * state
    states = dtype.bytes * batch * num_chunks * run.heads * width * state
    x = dtype.bytes * batch * run.positions * run.heads * width
    keys = 2 * dtype.bytes * batch * run.positions * run.groups * state  # B and C
    per_step, per_chunk = (sums * batch * each * run.heads for each in (run.positions, num_chunks))
    of_parameters = 3 * parameters.bytes * run.heads
    tables, rows = (3, 4) if dtype == DType.FP32 else (2, 3)
    padded = max(SMALLEST_SIDE, _power_of_2(state))
    of_states = 2 * dtype.bytes * run.heads * num_blocks * columns * padded
    of_pairs = sums * run.groups * -(-run.heads // run.groups // SCAN_HEADS) * tile * (tile + padded)
    of_chunk = batch * tiles * (of_states + of_pairs)
    at_once = min(num_chunks, max(1, SCAN_SEGMENT_BYTES // of_chunk))
    forward = tables * per_step + per_chunk
    segments = at_once * of_chunk + num_blocks * (rows * per_step + 2 * tiles * per_chunk)
    behind = states + tables * per_step + segments + 3 * tiles * per_chunk
    if dims.cp == 1:
        return Inside(last + forward, last + behind)
    made = x + dtype.bytes * batch * run.positions * run.heads + keys + of_parameters
    copied = run.copied_states(dims, num_chunks, states) + run.copied_starts
    return Inside(x + states + run.copied_starts + forward, made + behind + copied)


def trapezoidal_inside(dims: Dims, mamba: Mamba3, heads: int, groups: int, parameters: DType) -> Inside | None:
    """Of Mamba-3's scan; arguments and result as for Mamba-2's."""
    width, state, rank, angles, dtype = mamba.head_dim, mamba.state_dim, mamba.mimo_rank, mamba.num_angles, dims.dtype
    if not kernels_accept(mamba, dtype):
        return None
    run, batch, sums = lane_of(dims, heads, groups), dims.batch, dims.stat_dtype.bytes
    rows, segments = batch * run.positions * run.heads, -(-run.positions // mamba.save_every)
    tile = max(SMALLEST_SIDE // _power_of_2(rank), _power_of_2(min(mamba.chunk_positions, mamba.save_every)))
    tile = min(tile, TRAPEZOIDAL_ROWS[dtype] // _power_of_2(rank))
    tiles = -(-min(mamba.save_every, run.positions) // tile)
    half = max(SMALLEST_SIDE, _power_of_2(-(-state // 2)))
    of_state, of_rows, of_outputs = 2 * width * half, 2 * tile * _power_of_2(rank) * half, tile * _power_of_2(rank) * width
    of_segment = dtype.bytes * batch * run.heads * tiles
    whole = of_segment * (2 * of_state + 2 * of_rows + of_outputs)
    at_once = min(segments, max(1, STATES_BYTES // whole))
    tables = rows * (NUM_TABLES * sums + 2 * angles * dtype.bytes)

    per_head = 2 * rank * state + (3 * rank * width if rank > 1 else 0) + 1
    keys = batch * run.positions * rank * run.groups * state
    last = sums * batch * run.heads * (width * state + angles)
    shares = batch * segments * -(-tiles // TILES_PER_SHARE) * run.heads * per_head
    always = sums * (rows * (angles + 3) + batch * segments * tiles * run.heads * angles + shares)
    turns = sums * batch * run.positions * angles  # gone before any state is stored
    forward, between = tables + max(turns, at_once * of_segment * of_state), at_once * whole
    summed = sums * batch * -(-run.positions // STEP_TILE) * run.heads + sums * run.heads * (per_head + 1)
    if dims.cp == 1:
        return Inside(last + forward, last + always + max(tables + max(turns, between), summed))

    viewed = angles > 0 and batch * run.heads > 1  # state and phase are parts of what is handed on
    of_last = sums * batch * run.heads * angles
    carried, phase = (last, of_last) if viewed else (0, 0)
    given = run.copied_starts + (sums * batch * run.heads if batch > 1 else 0)
    states = dtype.bytes * batch * segments * run.heads * width * state
    phases = segments * of_last
    copied = given + run.copied_states(dims, segments, states + phases)
    y = dtype.bytes * rows * width
    made = 2 * y + dtype.bytes * (2 * keys + 3 * rows + batch * run.positions * angles) + parameters.bytes * run.heads * (per_head + 1)
    highest = max(tables + max(turns, between + carried - phase), phase + of_last, summed)
    return Inside(y + states + phases + max(given + carried + forward, last), made + always + copied + highest)


def _power_of_2(size: int) -> int:
    return 1 << (size - 1).bit_length()
