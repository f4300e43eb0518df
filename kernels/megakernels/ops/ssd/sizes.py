"""Sizes supported by the scan's kernels, their tiles, and their scratch bytes; needs no triton."""

from typing import NamedTuple

import torch
from torch import Tensor

from megakernels._common.blocks import SMALLEST_DOT, block_of
from megakernels._common.cost import Cost
from megakernels._common.scratch import SUMS_BYTES, KernelBytes, copies_bytes
from megakernels.ops.ssd.inputs import Scan

LARGEST_WIDTH = {torch.bfloat16: 128, torch.float16: 128, torch.float32: 32}
"""Maximum widths of a head and of a state; wider ones use the reference. An fp32 product stores each operand as two TF32 values."""
LARGEST_TILE = {torch.bfloat16: 64, torch.float16: 64, torch.float32: 16}
"""Positions of a tile."""
LARGEST_BLOCK = 64
"""Columns of a head per program."""
HEADS_PER_PART = 16
"""Heads of a group whose gradients of B and C one program of the backward sums."""
SEGMENT_BYTES = 2**28
"""Of the states before every tile, their gradients and the parts of those of B and C, which are stored for as many chunks as fit, and at
least one."""


class Extents(NamedTuple):
    """Sizes of a launch.

    Attributes:
        sides: Positions of a tile, columns of a head and of a state: powers of two.
        tiles: Tiles of a chunk.
        chunks: Chunks of a sequence.
        blocks: Blocks of a head's columns.
        parts: Parts of a group's heads.
        tables: Values per position and head that the kernels over tiles read.
        rows: Values per position, head and block of columns that the backward's kernels over tiles write.
        at_once: Chunks whose tiles are stored at once.
        stored: Elements of what the backward stores per chunk, for all sequences and heads: states and their gradients in the input's
            dtype, pairs and edges in fp32.
    """

    sides: dict[str, int]
    tiles: int
    chunks: int
    blocks: int
    parts: int
    tables: int
    rows: int
    at_once: int
    stored: tuple[int, int, int, int]


def accepts(scan: Scan) -> bool:
    """Whether the kernels support these sizes and dtypes; products need one dtype."""
    x, B, C = scan.x, scan.B, scan.C
    return x.dtype == B.dtype == C.dtype and max(x.shape[3], B.shape[3]) <= LARGEST_WIDTH[x.dtype]


def tile_sides(chunk_size: int, head_width: int, state_width: int, dtype: torch.dtype) -> dict[str, int]:
    """Positions, columns of a head and of a state."""
    positions = min(LARGEST_TILE[dtype], block_of(chunk_size, SMALLEST_DOT))
    return {"Q": positions, "P": min(LARGEST_BLOCK, block_of(head_width, SMALLEST_DOT)), "S": block_of(state_width, SMALLEST_DOT)}


def extents(scan: Scan) -> Extents:
    """The sizes of a launch for these inputs."""
    batch, num_positions, num_heads, width = scan.x.shape
    num_groups, state_width = scan.B.shape[2:]
    sides = tile_sides(scan.chunk_size, width, state_width, scan.x.dtype)
    tiles, chunks = -(-min(scan.chunk_size, max(1, num_positions)) // sides["Q"]), -(-num_positions // scan.chunk_size)
    blocks, parts = -(-width // sides["P"]), -(-num_heads // num_groups // HEADS_PER_PART) if num_groups else 0
    of_states, of_parts = batch * tiles * num_heads * blocks * sides["P"] * sides["S"], batch * tiles * num_groups * parts * sides["Q"]
    stored = of_states, of_states, of_parts * sides["Q"], of_parts * sides["S"]
    of_chunk = max(1, _stored_bytes(stored, scan.x.element_size()))
    at_once = min(chunks, max(1, SEGMENT_BYTES // of_chunk))
    tables, rows = (3, 4) if scan.x.dtype == torch.float32 else (2, 3)
    return Extents(sides, tiles, chunks, blocks, parts, tables, rows, at_once, stored)


def _stored_bytes(stored: tuple[int, int, int, int], element_size: int) -> int:
    return element_size * (stored[0] + stored[1]) + SUMS_BYTES * (stored[2] + stored[3])


def forward_bytes(state: Tensor | None, scan: Scan) -> KernelBytes:
    """Bytes of `kernel.forward` with the same operands."""
    x, _, A_log, B, C, D, dt_bias, starts, *_ = scan
    (batch, _, num_heads, width), sizes = x.shape, extents(scan)
    last = batch * num_heads * width * B.shape[3]
    states = sizes.chunks * last * x.element_size()
    dense = [each for each in (A_log, D, dt_bias, starts) if each is not None]
    copies = copies_bytes(dense, rows=(x, B, C))
    if last:
        copies += copies_bytes(() if state is None else (state,)) + _table_bytes(scan, sizes)
    return KernelBytes(x.nbytes + states, SUMS_BYTES * last, copies)


def _table_bytes(scan: Scan, sizes: Extents) -> int:
    """Of the tables, and of the decays across chunks, which go before outputs are made but are smaller than those."""
    return SUMS_BYTES * (sizes.tables * scan.dt.numel() + scan.x.shape[0] * sizes.chunks * scan.x.shape[2])


def backward_bytes(grad_state: Tensor | None, grad_y: Tensor, scan: Scan, states: Tensor) -> KernelBytes:
    """Bytes of `kernel.backward` with the same operands."""
    x, dt, A_log, B, C, D, dt_bias, starts, *_ = scan
    (batch, _, num_heads, width), sizes = x.shape, extents(scan)
    results = sum(each.nbytes for each in (x, dt, A_log, B, C, D, dt_bias))
    last = SUMS_BYTES * batch * num_heads * width * B.shape[3]
    of_tiles = SUMS_BYTES * batch * sizes.chunks * sizes.tiles * num_heads
    shares = 3 * of_tiles
    between = 0
    if last:
        walked = copies_bytes(() if grad_state is None else (grad_state,)) + SUMS_BYTES * batch * sizes.chunks * num_heads
        segments = sizes.at_once * _stored_bytes(sizes.stored, x.element_size())
        segments += sizes.blocks * (sizes.rows * SUMS_BYTES * dt.numel() + 2 * of_tiles)
        between = states.nbytes + SUMS_BYTES * sizes.tables * dt.numel() + max(walked, segments)
    dense = [each for each in (A_log, D, dt_bias, states, starts) if each is not None]
    own = grad_y.numel() * x.element_size() if grad_y.dtype != x.dtype else copies_bytes(rows=(grad_y,))
    scratch = copies_bytes(dense, rows=(x, B, C)) + own + shares + max(between, 3 * SUMS_BYTES * num_heads)
    return KernelBytes(results, last, scratch)


def forward_cost(_state: Tensor | None, scan: Scan) -> Cost:
    """Cost of `kernel.forward`.

    Per tile, head and block of columns: two products with a state in the first kernel and in the second, the scores, and their product
    with x.
    """
    tiles = _tiles(scan)
    return Cost({scan.x.dtype: tiles.num * tiles.blocks * (3 * tiles.with_state + tiles.scores + tiles.values)})


def backward_cost(_grad_last: Tensor | None, grad_y: Tensor, scan: Scan, states: Tensor) -> Cost:
    """Cost of `kernel.backward`.

    Per tile, head and block of columns, products with a state: one each for the gradients of the chunks' states, for the tiles' states and
    their gradients, for x and B, and two for C; two products of x's size. Per tile and 16 heads of a group the scores, twice, and per tile
    and group one product with B and one with C. Launches over a part of the chunks are given the inputs whole.
    """
    tiles, sizes, num_heads, num_groups = _tiles(scan), extents(scan), scan.x.shape[2], scan.B.shape[2]
    own = tiles.num * tiles.blocks * (7 * tiles.with_state + 2 * tiles.values)
    shared = tiles.num // max(1, num_heads) * num_groups * (2 * sizes.parts + 2) * tiles.scores
    launches = -(-sizes.chunks // max(1, sizes.at_once))
    rows = 5 * scan.x.nbytes + 4 * grad_y.nbytes + 5 * scan.B.nbytes + 5 * scan.C.nbytes + 2 * states.nbytes
    per_step = SUMS_BYTES * scan.dt.numel() * (6 * sizes.tables + 4 * sizes.blocks)
    return Cost({scan.x.dtype: own + shared}, untouched_bytes=max(0, launches - 1) * (rows + per_step))


class _Tiles(NamedTuple):
    """Tiles of all sequences and heads, blocks of columns, and FLOPs of a tile's products: with a state, of scores, with x."""

    num: int
    blocks: int
    with_state: int
    scores: int
    values: int


def _tiles(scan: Scan) -> _Tiles:
    sizes = extents(scan)
    Q, P, S = (sizes.sides[key] for key in "QPS")
    num = scan.x.shape[0] * sizes.chunks * sizes.tiles * scan.x.shape[2]
    return _Tiles(num, sizes.blocks, 2 * Q * P * S, 2 * Q * Q * S, 2 * Q * Q * P)
