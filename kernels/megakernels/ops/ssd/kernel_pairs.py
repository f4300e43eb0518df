"""The scan's backward kernel over the pairs of positions of a tile, which the heads of a group share."""

import triton
import triton.language as tl

from megakernels._common.tiles import dot, narrow
from megakernels.ops.ssd.kernel_tiles import decays_of, edges_of, load_rows, span_of, store_rows, sums_of


@triton.jit  # type: ignore[untyped-decorator]
def ssd_pair_kernel(  # type: ignore[no-untyped-def]
    grad_y,
    x,
    B,
    C,
    D,
    tables,
    starts,
    tile_gradients,
    grad_x,
    pairs,
    of_steps,
    of_decays,
    skips,
    num_positions,
    num_chunks,
    chunk_size,
    tiles_per_chunk,
    num_heads,
    heads_per_group,
    num_rows,
    head_width,
    state_width,
    first_chunk,
    grad_stride_b,
    grad_stride_t,
    grad_stride_h,
    x_stride_b,
    x_stride_t,
    x_stride_h,
    B_stride_b,
    B_stride_t,
    B_stride_g,
    C_stride_b,
    C_stride_t,
    C_stride_g,
    Q: tl.constexpr,
    P: tl.constexpr,
    S: tl.constexpr,
    SPAN: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    PRECISE: tl.constexpr,
):
    """Gradients of x of one tile and up to SPAN heads of a group, and what the other gradients need of them.

    `pairs` [B, tiles of the segment, G, parts, Q, Q] is the sum over these heads of the gradients of overlaps B_j · C_i, keys in rows.
    Per position, head and block of columns [blocks, B, H, T]: `of_steps` is the gradient of a step that only scales x, and `of_decays` that
    of a log decay within the tile: pairs across it, and what earlier positions add to the state after the tile. The sum of exactly these
    avoids cancellation. `skips` [blocks, B, tiles, H] is a tile's gradient of D.
    """
    local_tile, batch = tl.program_id(0), tl.program_id(2).to(tl.int64)
    parts = tl.cdiv(heads_per_group, SPAN)
    group, part = (tl.program_id(1) // parts).to(tl.int64), tl.program_id(1) % parts
    chunk, tile = first_chunk + local_tile // tiles_per_chunk, local_tile % tiles_per_chunk
    first, stop = span_of(chunk, tile, chunk_size, num_positions, Q=Q)
    if first >= stop:
        return
    dtype: tl.constexpr = x.dtype.element_ty
    num_blocks = tl.cdiv(head_width, P)
    ss, local = tl.arange(0, S), tl.arange(0, Q)
    keys = load_rows(B, batch, group, first, stop, B_stride_b, B_stride_t, B_stride_g, ss, state_width, Q=Q)
    queries = load_rows(C, batch, group, first, stop, C_stride_b, C_stride_t, C_stride_g, ss, state_width, Q=Q)
    found = tl.zeros([Q, Q], dtype=tl.float32)
    count = tl.minimum(heads_per_group - part * SPAN, SPAN) * num_blocks
    for member in range(count):
        head, block = group * heads_per_group + part * SPAN + member // num_blocks, member % num_blocks
        ps = block * P + tl.arange(0, P)
        grads = load_rows(grad_y, batch, head, first, stop, grad_stride_b, grad_stride_t, grad_stride_h, ps, head_width, Q=Q)
        values = load_rows(x, batch, head, first, stop, x_stride_b, x_stride_t, x_stride_h, ps, head_width, Q=Q)
        at = ((batch * tl.num_programs(0) + local_tile) * num_heads + head) * num_blocks + block
        grad_state = tl.load(tile_gradients + at * P * S + tl.arange(0, P)[:, None] * S + ss[None, :])
        steps, sums, rests, total, rest = sums_of(
            tables, batch, head, first, stop, num_positions, num_heads, num_rows, Q=Q, PRECISE=PRECISE
        )
        _from_start, to_end, _across = edges_of(
            starts, sums, rests, total, rest, batch, first, stop, num_positions, Q=Q, HAS_STARTS=HAS_STARTS, PRECISE=PRECISE
        )
        decay = decays_of(
            starts, sums, rests, batch, first, stop, num_positions, Q=Q, HAS_STARTS=HAS_STARTS, PRECISE=PRECISE, KEYS=True
        )
        mixing = dot(keys, tl.trans(queries)) * decay
        of_pairs = dot(values, tl.trans(grads)) * steps[:, None]
        found += of_pairs * decay
        later = tl.cumsum(of_pairs * mixing, 1, reverse=True)  # of each key, the pairs with this query or a later one
        across_pairs = tl.sum(tl.where(local[None, :] > local[:, None], later, 0.0), 0)
        wide, grad = values.to(tl.float32), grads.to(tl.float32)
        through_state = to_end[:, None] * dot(keys, tl.trans(grad_state))
        kept = steps * tl.sum(through_state * wide, 1)
        grad_u = through_state + dot(narrow(mixing, dtype), grads)
        skip = tl.load(D + head).to(tl.float32)
        store_rows(grad_x, steps[:, None] * grad_u + skip * grad, batch, head, first, stop, num_positions, num_heads, ps, head_width, Q=Q)
        place = ((block * tl.num_programs(2) + batch) * num_heads + head) * num_positions + first + local
        tl.store(of_steps + place, tl.sum(grad_u * wide, 1), mask=local < stop - first)
        tl.store(of_decays + place, across_pairs + (tl.cumsum(kept, 0) - kept), mask=local < stop - first)
        of_tile = ((block * tl.num_programs(2) + batch) * num_chunks + chunk) * tiles_per_chunk + tile
        tl.store(skips + of_tile * num_heads + head, tl.sum(tl.sum(grad * wide, 1), 0))
    at = ((batch * tl.num_programs(0) + local_tile) * tl.num_programs(1) + tl.program_id(1)) * Q * Q
    tl.store(pairs + at + local[:, None] * Q + local[None, :], found)
