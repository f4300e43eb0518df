"""The backward kernel that sums the gradients of B or C over the heads of a group, and of their biases over positions."""

import triton
import triton.language as tl

from megakernels._common.tiles import widen
from megakernels.ops.mamba3.kernel_tiles import add_halves, cos_sin, load_part, over_positions, rows_of, store_halves


@triton.jit  # type: ignore[untyped-decorator]
def mamba3_group_kernel(  # type: ignore[no-untyped-def]
    grad_rows,
    cosines,
    sines,
    grad_keys,
    shares,
    num_positions,
    num_heads,
    heads_per_group,
    rank_count,
    _head_width,
    state_width,
    num_angles,
    save_every,
    _num_rows,
    num_shares,
    offset,
    num_segments,
    first_segment,
    count,
    tiles,
    pieces,
    M: tl.constexpr,
    Q: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    SPAN: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    ROTATES: tl.constexpr,
):
    """Up to SPAN tiles of a segment of one sequence and group, from the gradients of rotated rows that `mamba3_query_kernel` describes.

    `shares` from `offset` on has the gradients of the heads' biases.
    """
    piece, local = tl.program_id(0) % pieces, tl.program_id(0) // pieces
    segment, group, batch = first_segment + local, tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    num_groups = num_heads // heads_per_group
    ranks = tl.arange(0, R)
    begin = segment * save_every
    stop = tl.minimum(begin + save_every, num_positions)
    for tile in range(piece * SPAN, tl.minimum(piece * SPAN + SPAN, tl.cdiv(stop - begin, Q))):
        position, rank, valid = rows_of(begin + tile * Q, stop, rank_count, M=M, R=R)
        total_one, total_other = tl.zeros([M, S], dtype=tl.float32), tl.zeros([M, S], dtype=tl.float32)
        for index in tl.range(heads_per_group, disable_licm=True):
            head = group * heads_per_group + index
            row = (((batch * count + local) * tiles + tile) * num_heads + head) * M + tl.arange(0, M)
            one = widen(load_part(grad_rows + row * (2 * S), valid, S=S, HALF=0))
            other = widen(load_part(grad_rows + row * (2 * S), valid, S=S, HALF=1))
            if ROTATES:
                cos, sin = cos_sin(cosines, sines, batch, head, position, valid, num_positions, num_heads, num_angles, S=S)
                one, other = one * cos + other * sin, other * cos - one * sin
            total_one += one
            total_other += other
            share = shares + (((batch * num_segments + segment) * pieces + piece) * num_heads + head) * num_shares + offset
            add_halves(
                share + ranks * state_width,
                over_positions(one, R=R),
                over_positions(other, R=R),
                ranks < rank_count,
                state_width,
                S=S,
                NEIGHBOURS=NEIGHBOURS,
            )
        row = ((batch * num_positions + position) * rank_count + rank) * num_groups + group
        store_halves(grad_keys + row * state_width, total_one, total_other, valid, state_width, S=S, NEIGHBOURS=NEIGHBOURS)
        tl.debug_barrier()  # the next tile adds to what other threads of the program have written
