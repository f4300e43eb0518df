"""Sizes supported by the scan's kernels, their tiles, and their scratch bytes; needs no triton."""

from typing import NamedTuple

import torch
from torch import Tensor

from megakernels._common.blocks import SMALLEST_DOT, block_of
from megakernels._common.cost import Cost
from megakernels._common.scratch import SUMS_BYTES, KernelBytes, copies_bytes, narrowed_bytes
from megakernels.ops.ssd.inputs import Scan

LARGEST_WIDTH = {torch.bfloat16: 128, torch.float16: 128, torch.float32: 32}
"""Maximum widths of a head and of a state; wider ones use the reference. An fp32 product stores each operand as two TF32 values."""
LARGEST_TILE = {torch.bfloat16: 64, torch.float16: 64, torch.float32: 16}
"""Positions of a tile."""
LARGEST_BLOCK = 64
"""Columns of a head per program."""


def accepts(scan: Scan) -> bool:
    """Whether the kernels support these sizes and dtypes; products need one dtype."""
    x, B, C = scan.x, scan.B, scan.C
    return x.dtype == B.dtype == C.dtype and max(x.shape[3], B.shape[3]) <= LARGEST_WIDTH[x.dtype]


def tile_sides(chunk_size: int, head_width: int, state_width: int, dtype: torch.dtype) -> dict[str, int]:
    """Positions, columns of a head and of a state."""
    positions = min(LARGEST_TILE[dtype], block_of(chunk_size, SMALLEST_DOT))
    return {"Q": positions, "P": min(LARGEST_BLOCK, block_of(head_width, SMALLEST_DOT)), "S": block_of(state_width, SMALLEST_DOT)}


def forward_bytes(state: Tensor | None, scan: Scan) -> KernelBytes:
    """Bytes of `kernel.forward` with the same operands."""
    x, _, A_log, B, C, D, dt_bias, starts, chunk_size, _, _ = scan
    batch, num_positions, num_heads, width = x.shape
    last = batch * num_heads * width * B.shape[3]
    states = batch * -(-num_positions // chunk_size) * num_heads * width * B.shape[3] * x.element_size()
    dense = [each for each in (A_log, D, dt_bias, starts, state) if each is not None]
    return KernelBytes(x.nbytes + states, SUMS_BYTES * last, copies_bytes(dense if last else (), rows=(x, B, C)))


def backward_bytes(grad_state: Tensor | None, grad_y: Tensor, scan: Scan, states: Tensor) -> KernelBytes:
    """Bytes of `kernel.backward` with the same operands.

    The gradients of the states are followed by those of x, dt and the parameters, in parts that are summed, and then by those of B and C,
    in addition to steps and running sums. The peak is the largest of these.
    """
    x, dt, A_log, B, C, D, dt_bias, starts, chunk_size, _, _ = scan
    batch, num_positions, num_heads, width = x.shape
    sides = tile_sides(chunk_size, width, B.shape[3], x.dtype)
    num_blocks = -(-width // sides["P"])
    num_tiles = states.shape[1] * -(-min(chunk_size, num_positions) // sides["Q"])
    results, later = sum(each.nbytes for each in (x, dt, A_log, B, C, D, dt_bias)), B.nbytes + C.nbytes
    per_step = SUMS_BYTES * dt.numel()
    shares = SUMS_BYTES * 3 * num_blocks * batch * num_tiles * num_heads
    peaks = (
        copies_bytes(() if grad_state is None else (grad_state,)) - results,
        num_blocks * per_step + narrowed_bytes(dt, per_step) + shares - later - sum(each.nbytes for each in (A_log, D, dt_bias)),
        shares + narrowed_bytes(dt_bias, SUMS_BYTES * num_heads) - later,
        3 * per_step if x.numel() and B.shape[3] else 0,
    )
    dense = [each for each in (A_log, dt_bias, states, starts) if each is not None]
    own = grad_y.numel() * x.element_size() if grad_y.dtype != x.dtype else copies_bytes(rows=(grad_y,))
    last = SUMS_BYTES * batch * num_heads * width * B.shape[3]
    return KernelBytes(results, last, states.nbytes + copies_bytes(dense, rows=(x, B, C)) + own + max(peaks))


def forward_cost(_state: Tensor | None, scan: Scan) -> Cost:
    """Cost of `kernel.forward`: per tile, head and block of columns the scores, their product with x, and two products with the state."""
    tiles = _tiles(scan)
    per_tile = 2 * tiles.Q * (tiles.Q * (tiles.S + tiles.P) + 2 * tiles.S * tiles.P)
    return Cost({scan.x.dtype: tiles.num * tiles.heads * tiles.blocks * per_tile})


def backward_cost(_grad_last: Tensor | None, _grad_y: Tensor, scan: Scan, _states: Tensor) -> Cost:
    """Cost of `kernel.backward`.

    The state-gradient kernel has one product with a state per tile. The backward kernel has one per other tile of its chunk and two of its
    own, the scores, two products of the size of x, and a sum over pairs in fp32. Each of the two group kernels has one product with the
    state and, per pair of tiles of a chunk, one per head and one per group.
    """
    tiles = _tiles(scan)
    with_state, scores, values = (2 * tiles.Q * inner for inner in (tiles.S * tiles.P, tiles.Q * tiles.S, tiles.Q * tiles.P))
    per_head = tiles.num * tiles.heads * tiles.blocks
    own = per_head * (with_state * (1 + (tiles.per_chunk - 1) + 2) + scores + 2 * values)
    pairs = tiles.num * (tiles.per_chunk + 1) // 2
    shared = per_head * with_state + pairs * (tiles.heads * tiles.blocks * values + scan.B.shape[2] * scores)
    sums = per_head * 2 * tiles.Q**3
    found = {scan.x.dtype: own + 2 * shared}
    found[torch.float32] = found.get(torch.float32, 0) + sums
    return Cost(found)


class _Tiles(NamedTuple):
    """Number of tiles of all sequences and of a chunk, of heads and of column blocks per head, and the sides of a tile."""

    num: int
    per_chunk: int
    heads: int
    blocks: int
    Q: int
    P: int
    S: int


def _tiles(scan: Scan) -> _Tiles:
    batch, num_positions, num_heads, width = scan.x.shape
    sides = tile_sides(scan.chunk_size, width, scan.B.shape[3], scan.x.dtype)
    per_chunk = -(-min(scan.chunk_size, num_positions) // sides["Q"])
    num_chunks = -(-num_positions // scan.chunk_size)
    return _Tiles(batch * num_chunks * per_chunk, per_chunk, num_heads, -(-width // sides["P"]), **sides)
