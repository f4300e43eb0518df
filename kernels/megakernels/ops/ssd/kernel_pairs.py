"""The scan's backward kernels over the pairs of positions of a tile: gradients of x, and of overlaps, which the heads of a group share."""

import triton
import triton.language as tl

from megakernels._common.tiles import dot, narrow
from megakernels.ops.ssd.kernel_tiles import decays_of, edges_of, load_rows, part_place, store_rows, sums_of


@triton.jit  # type: ignore[untyped-decorator]
def ssd_pair_kernel(  # type: ignore[no-untyped-def]
    grad_y, x, B, C, tables, starts, pairs, of_decays, across, skips, num_positions, num_chunks, chunk_size: tl.constexpr,
    tiles_per_chunk: tl.constexpr, num_heads: tl.constexpr, heads_per_group: tl.constexpr, num_rows, head_width: tl.constexpr,
    state_width: tl.constexpr, first_chunk,
    grad_stride_b, grad_stride_t: tl.constexpr, grad_stride_h: tl.constexpr, x_stride_b, x_stride_t: tl.constexpr, x_stride_h: tl.constexpr,
    B_stride_b, B_stride_t: tl.constexpr, B_stride_g: tl.constexpr, C_stride_b, C_stride_t: tl.constexpr, C_stride_g: tl.constexpr,
    Q: tl.constexpr, P: tl.constexpr, S: tl.constexpr, SPAN: tl.constexpr, HAS_STARTS: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """The pairs of positions of one tile, of up to SPAN heads of a group.

    `pairs` [B, tiles of the segment, G, parts, Q, Q] is the sum over these heads of the gradients of overlaps B_j · C_i, keys in rows.
    `of_decays` [blocks, B, H, T], summed over earlier positions of the tile, is the gradient of a log decay by the pairs across it, as the
    pairs of earlier keys less those of earlier queries. With `PRECISE` only the pairs across it are summed, into `across`: the difference
    has the rounding of sums over all pairs. `skips` [blocks, B, tiles, H] is a tile's gradient of D.
    """
    batch, group, part, local_tile, chunk, tile, first, stop = part_place(
        first_chunk, tiles_per_chunk, chunk_size, num_positions, heads_per_group, Q=Q, SPAN=SPAN
    )
    if first >= stop:
        return
    num_blocks = tl.cdiv(head_width, P)
    ss, local = tl.arange(0, S), tl.arange(0, Q)
    keys = load_rows(B, (batch, group, first, stop), (B_stride_b, B_stride_t, B_stride_g), ss, state_width, Q=Q)
    queries = load_rows(C, (batch, group, first, stop), (C_stride_b, C_stride_t, C_stride_g), ss, state_width, Q=Q)
    overlaps = dot(keys, tl.trans(queries))
    found = tl.zeros([Q, Q], dtype=tl.float32)
    count = tl.minimum(heads_per_group - part * SPAN, SPAN) * num_blocks
    for member in tl.range(count, disable_licm=True):
        head, block = group * heads_per_group + part * SPAN + member // num_blocks, member % num_blocks
        here = batch, head, first, stop
        ps = block * P + tl.arange(0, P)
        place = ((block * tl.num_programs(2) + batch) * num_heads + head) * num_positions + first
        grads = load_rows(grad_y, here, (grad_stride_b, grad_stride_t, grad_stride_h), ps, head_width, Q=Q)
        values = load_rows(x, here, (x_stride_b, x_stride_t, x_stride_h), ps, head_width, Q=Q)
        tile_sums = sums_of(tables, here, num_positions, num_heads, num_rows, Q=Q, PRECISE=PRECISE)
        steps = tile_sums[0]
        decay = decays_of(starts, tile_sums, here, num_positions, Q=Q, HAS_STARTS=HAS_STARTS, PRECISE=PRECISE, KEYS=True)
        products = dot(values, tl.trans(grads))
        own = tl.sum(tl.sum(tl.where(local[None, :] == local[:, None], products, 0.0), 1), 0)
        of_pairs = products * (decay * steps[:, None])
        found += of_pairs
        strict = tl.where(local[None, :] > local[:, None], of_pairs * overlaps, 0.0)
        if PRECISE:
            later = tl.where(local[None, :] > local[:, None], tl.cumsum(strict, 1, reverse=True), 0.0)
            tl.store(across + place + local, tl.sum(later, 0), mask=local < stop - first)
        else:
            tl.store(of_decays + place + local, tl.sum(strict, 1) - tl.sum(strict, 0), mask=local < stop - first)
        of_tile = ((block * tl.num_programs(2) + batch) * num_chunks + chunk) * tiles_per_chunk + tile
        tl.store(skips + of_tile * num_heads + head, own)
    at = ((batch * tl.num_programs(0) + local_tile) * tl.num_programs(1) + tl.program_id(1)) * Q * Q
    tl.store(pairs + at + local[:, None] * Q + local[None, :], found)


@triton.jit  # type: ignore[untyped-decorator]
def ssd_value_kernel(  # type: ignore[no-untyped-def]
    grad_y, x, B, C, D, tables, starts, tile_gradients, grad_x, of_steps, of_decays, num_positions, chunk_size: tl.constexpr,
    tiles_per_chunk: tl.constexpr, num_heads: tl.constexpr, heads_per_group: tl.constexpr, num_rows, head_width: tl.constexpr,
    state_width: tl.constexpr, first_chunk,
    grad_stride_b, grad_stride_t: tl.constexpr, grad_stride_h: tl.constexpr, x_stride_b, x_stride_t: tl.constexpr, x_stride_h: tl.constexpr,
    B_stride_b, B_stride_t: tl.constexpr, B_stride_g: tl.constexpr, C_stride_b, C_stride_t: tl.constexpr, C_stride_g: tl.constexpr,
    Q: tl.constexpr, P: tl.constexpr, S: tl.constexpr, SPAN: tl.constexpr, HAS_STARTS: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """Gradients of x of one tile and up to SPAN heads of a group.

    `of_steps` [blocks, B, H, T] is the gradient of a step that only scales x. A position's contribution to the state after the tile is
    added to `of_decays`, which `ssd_pair_kernel` wrote.
    """
    batch, group, part, local_tile, _chunk, _tile, first, stop = part_place(
        first_chunk, tiles_per_chunk, chunk_size, num_positions, heads_per_group, Q=Q, SPAN=SPAN
    )
    if first >= stop:
        return
    dtype: tl.constexpr = x.dtype.element_ty
    num_blocks = tl.cdiv(head_width, P)
    ss, local = tl.arange(0, S), tl.arange(0, Q)
    keys = load_rows(B, (batch, group, first, stop), (B_stride_b, B_stride_t, B_stride_g), ss, state_width, Q=Q)
    queries = load_rows(C, (batch, group, first, stop), (C_stride_b, C_stride_t, C_stride_g), ss, state_width, Q=Q)
    overlaps = dot(keys, tl.trans(queries))
    count = tl.minimum(heads_per_group - part * SPAN, SPAN) * num_blocks
    for member in tl.range(count, disable_licm=True):
        head, block = group * heads_per_group + part * SPAN + member // num_blocks, member % num_blocks
        here = batch, head, first, stop
        ps = block * P + tl.arange(0, P)
        place = ((block * tl.num_programs(2) + batch) * num_heads + head) * num_positions + first
        grads = load_rows(grad_y, here, (grad_stride_b, grad_stride_t, grad_stride_h), ps, head_width, Q=Q)
        values = load_rows(x, here, (x_stride_b, x_stride_t, x_stride_h), ps, head_width, Q=Q)
        at = ((batch * tl.num_programs(0) + local_tile) * num_heads + head) * num_blocks + block
        grad_state = tl.load(tile_gradients + at * P * S + tl.arange(0, P)[:, None] * S + ss[None, :])
        tile_sums = sums_of(tables, here, num_positions, num_heads, num_rows, Q=Q, PRECISE=PRECISE)
        steps = tile_sums[0]
        _from_start, to_end, _across = edges_of(starts, tile_sums, here, num_positions, Q=Q, HAS_STARTS=HAS_STARTS, PRECISE=PRECISE)
        decay = decays_of(starts, tile_sums, here, num_positions, Q=Q, HAS_STARTS=HAS_STARTS, PRECISE=PRECISE, KEYS=True)
        wide = values.to(tl.float32)
        through_state = to_end[:, None] * dot(keys, tl.trans(grad_state))
        kept = steps * tl.sum(through_state * wide, 1)
        if not PRECISE:
            kept += tl.load(of_decays + place + local, mask=local < stop - first, other=0.0).to(tl.float32)
        tl.store(of_decays + place + local, kept, mask=local < stop - first)
        grad_u = through_state + dot(narrow(overlaps * decay, dtype), grads)
        tl.store(of_steps + place + local, tl.sum(grad_u * wide, 1), mask=local < stop - first)
        skip = tl.load(D + head).to(tl.float32)
        found = steps[:, None] * grad_u + skip * grads.to(tl.float32)
        store_rows(grad_x, found, batch, head, first, stop, num_positions, num_heads, ps, head_width)
