"""The kernel that inverts a tile's triangular system."""

import triton
import triton.language as tl

from megakernels._common.tiles import dot, narrow
from megakernels.ops.gated_delta.kernel_tiles import SIDE, tile_of


@triton.jit  # type: ignore[untyped-decorator]
def block_places(corner, Q: tl.constexpr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Addresses of a block [N, N] of a system [Q, Q], from that of its first element."""
    each = tl.arange(0, N)
    return corner + each[:, None] * Q + each[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def invert_diagonal(system, Q: tl.constexpr):  # type: ignore[no-untyped-def]
    """Replaces the blocks on the diagonal of L by those of (I + L)⁻¹, row by row from the rows above."""
    blocks: tl.constexpr = Q // SIDE
    block, row, column = tl.arange(0, blocks)[:, None, None], tl.arange(0, SIDE)[None, :, None], tl.arange(0, SIDE)[None, None, :]
    at = system + (block * SIDE + row) * Q + block * SIDE + column
    lower = tl.load(at).to(tl.float32)
    found = tl.where(row == column, 1.0, 0.0) + tl.zeros([blocks, SIDE, SIDE], dtype=tl.float32)
    for each in range(1, SIDE):
        of_row = tl.sum(tl.where(row == each, lower, 0.0), 1)
        taken = tl.sum(of_row[:, :, None] * found, 1)
        found = tl.where(row == each, found - taken[:, None, :], found)
    tl.debug_barrier()  # all threads have read the blocks
    tl.store(at, found)


@triton.jit  # type: ignore[untyped-decorator]
def merge_blocks(system, Q: tl.constexpr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Makes the inverses of the diagonal's blocks of 2 N rows from those of N: −(I + L₁₁)⁻¹ L₁₀ (I + L₀₀)⁻¹ below each pair."""
    for begin in tl.static_range(0, Q, 2 * N):
        corner = system + begin * (Q + 1)
        upper = tl.load(block_places(corner, Q=Q, N=N)).to(tl.float32)
        lower = tl.load(block_places(corner + N * (Q + 1), Q=Q, N=N)).to(tl.float32)
        at = block_places(corner + N * Q, Q=Q, N=N)
        between = tl.load(at).to(tl.float32)
        found = -dot(dot(lower, between), upper)
        tl.debug_barrier()
        tl.store(at, found)


@triton.jit  # type: ignore[untyped-decorator]
def delta_solve_kernel(  # type: ignore[no-untyped-def]
    systems, inverses, num_positions, num_heads, save_every, first_segment, tiles,
    Q: tl.constexpr,
):  # fmt: skip
    """One tile and head: (I + L)⁻¹ of its system L, in fp32 in its place, and rounded.

    By forward substitution: powers of L, of which a series would be made, may be far larger than the inverse.
    """
    index, head, batch = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    first, stop = tile_of(index, first_segment, tiles, save_every, num_positions, Q=Q)
    if first >= stop:
        return
    slot = (batch * tl.num_programs(0) + index) * num_heads + head
    system = systems + slot * Q * Q
    invert_diagonal(system, Q=Q)
    if Q >= 2 * SIDE:
        tl.debug_barrier()  # every thread reads what the others have written
        merge_blocks(system, Q=Q, N=SIDE)
    if Q >= 4 * SIDE:
        tl.debug_barrier()
        merge_blocks(system, Q=Q, N=2 * SIDE)
    tl.debug_barrier()
    found = tl.load(block_places(system, Q=Q, N=Q)).to(tl.float32)
    tl.store(block_places(inverses + slot * Q * Q, Q=Q, N=Q), narrow(found, inverses.dtype.element_ty))
