"""The backward kernel that sums the gradients of B or C over the heads of a group, and of their biases over positions."""

import triton
import triton.language as tl

from megakernels.ops.mamba3.kernel_halves import cos_sin, load_parted, store_pairs
from megakernels.ops.mamba3.kernel_tiles import over_positions, rows_of


@triton.jit  # type: ignore[untyped-decorator]
def mamba3_group_kernel(  # type: ignore[no-untyped-def]
    grad_rows, cosines, sines, grad_keys, shares, num_positions, num_heads, heads_per_group, rank_count: tl.constexpr, _head_width,
    state_width: tl.constexpr, num_angles: tl.constexpr, save_every, _num_rows, num_shares, offset, num_segments, first_segment, count,
    tiles, pieces,
    M: tl.constexpr, Q: tl.constexpr, R: tl.constexpr, S: tl.constexpr, SPAN: tl.constexpr, NEIGHBOURS: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """Up to SPAN tiles of a segment of one sequence and group, from the gradients of rotated rows that `mamba3_pair_kernel` describes.

    `shares` from `offset` on has the gradients of the heads' biases, sums over the rows of all these tiles.
    """
    piece, local = tl.program_id(0) % pieces, tl.program_id(0) // pieces
    segment, group, batch = first_segment + local, tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    num_groups = num_heads // heads_per_group
    begin = segment * save_every
    position, rank, valid = rows_of(begin + piece * SPAN * Q, tl.minimum(begin + save_every, num_positions), rank_count, M=SPAN * M, R=R)
    ranks, row = tl.arange(0, R), tl.arange(0, SPAN * M)
    tile_row = ((batch * count + local) * tiles + piece * SPAN + row // M) * num_heads + group * heads_per_group
    at_rows = grad_rows + (tile_row * M + row % M) * (2 * S)
    at_biases = shares + ((batch * num_segments + segment) * pieces + piece) * num_heads * num_shares + offset + ranks * state_width
    at = grad_keys + (((batch * num_positions + position) * rank_count + rank) * num_groups + group) * state_width
    for HALF in tl.static_range(2):
        total, more_total = tl.zeros([SPAN * M, S // 2], dtype=tl.float32), tl.zeros([SPAN * M, S // 2], dtype=tl.float32)
        for index in tl.range(heads_per_group, disable_licm=True):
            head = group * heads_per_group + index
            one, other = load_parted(at_rows + index * (M * 2 * S), valid, S=S, HALF=HALF)
            if HALF < TURNS:
                cos, sin = cos_sin(cosines, sines, batch, head, position, valid, num_positions, num_heads, num_angles, S=S, HALF=HALF)
                one, other = one * cos + other * sin, other * cos - one * sin
            total += one
            more_total += other
            of_bias, more_of_bias = over_positions(one, R=R), over_positions(other, R=R)
            at_bias = at_biases + head * num_shares
            store_pairs(at_bias, of_bias, more_of_bias, ranks < rank_count, state_width, S=S, NEIGHBOURS=NEIGHBOURS, HALF=HALF)
        store_pairs(at, total, more_total, valid, state_width, S=S, NEIGHBOURS=NEIGHBOURS, HALF=HALF)
