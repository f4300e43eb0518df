"""The scan's backward kernels for the gradients of B and C, which the heads of a group share."""

import triton
import triton.language as tl

from megakernels._common.tiles import dot, narrow
from megakernels.ops.ssd.kernel_tiles import edges_of, load_rows, part_place, span_of, store_rows, sums_of


@triton.jit  # type: ignore[untyped-decorator]
def ssd_edge_kernel(  # type: ignore[no-untyped-def]
    rows, keys, tables, starts, boundary, edges, reads, num_positions, chunk_size: tl.constexpr, tiles_per_chunk: tl.constexpr,
    num_heads: tl.constexpr, heads_per_group: tl.constexpr, num_rows, head_width: tl.constexpr, state_width: tl.constexpr, first_chunk,
    rows_stride_b, rows_stride_t: tl.constexpr, rows_stride_h: tl.constexpr,
    keys_stride_b, keys_stride_t: tl.constexpr, keys_stride_g: tl.constexpr,
    Q: tl.constexpr, P: tl.constexpr, S: tl.constexpr, SPAN: tl.constexpr, HAS_STARTS: tl.constexpr, PRECISE: tl.constexpr,
    QUERIES: tl.constexpr,
):  # fmt: skip
    """The gradient of C (QUERIES) through the state before one tile, or of B through the state after it, of up to SPAN heads of a group.

    `edges` [B, tiles of the segment, G, parts, Q, S] is the sum over these heads. `rows` is grad_y and `boundary` the states before the
    tiles; for B they are x and the gradients of the states after them. The sum of `reads` [blocks, B, H, T] over this position
    and later ones of the tile, with QUERIES, is the gradient of a log decay by what they read from the state.

    The left operand of the product is made in the loop and stays in registers. For B the loop is not pipelined (`num_stages` 1): triton
    3.6.0 would write those registers again while products that read them are in flight (`_common.hazards`). For C each iteration reads the
    result of a second product, and its wait covers both.
    """
    batch, group, part, local_tile, _chunk, _tile, first, stop = part_place(
        first_chunk, tiles_per_chunk, chunk_size, num_positions, heads_per_group, Q=Q, SPAN=SPAN
    )
    if first >= stop:
        return
    dtype: tl.constexpr = rows.dtype.element_ty
    num_blocks = tl.cdiv(head_width, P)
    ss, local = tl.arange(0, S), tl.arange(0, Q)
    if QUERIES:
        queries = load_rows(keys, (batch, group, first, stop), (keys_stride_b, keys_stride_t, keys_stride_g), ss, state_width, Q=Q)
    found = tl.zeros([Q, S], dtype=tl.float32)
    count = tl.minimum(heads_per_group - part * SPAN, SPAN) * num_blocks
    for member in range(count):
        head, block = group * heads_per_group + part * SPAN + member // num_blocks, member % num_blocks
        here = batch, head, first, stop
        ps = block * P + tl.arange(0, P)
        wide = load_rows(rows, here, (rows_stride_b, rows_stride_t, rows_stride_h), ps, head_width, Q=Q).to(tl.float32)
        at = ((batch * tl.num_programs(0) + local_tile) * num_heads + head) * num_blocks + block
        state = tl.load(boundary + at * P * S + tl.arange(0, P)[:, None] * S + ss[None, :])
        tile_sums = sums_of(tables, here, num_positions, num_heads, num_rows, Q=Q, PRECISE=PRECISE)
        steps = tile_sums[0]
        from_start, to_end, _across = edges_of(starts, tile_sums, here, num_positions, Q=Q, HAS_STARTS=HAS_STARTS, PRECISE=PRECISE)
        scaled = wide * (from_start if QUERIES else steps * to_end)[:, None]
        found += dot(narrow(scaled, dtype), state)
        if QUERIES:
            read = tl.sum(scaled * dot(queries, tl.trans(state)), 1)
            place = ((block * tl.num_programs(2) + batch) * num_heads + head) * num_positions + first
            tl.store(reads + place + local, read, mask=local < stop - first)
    at = ((batch * tl.num_programs(0) + local_tile) * tl.num_programs(1) + tl.program_id(1)) * Q * S
    tl.store(edges + at + local[:, None] * S + ss[None, :], found)


@triton.jit  # type: ignore[untyped-decorator]
def ssd_group_kernel(  # type: ignore[no-untyped-def]
    keys, pairs, edges, gradient, num_positions, chunk_size: tl.constexpr, tiles_per_chunk: tl.constexpr, state_width: tl.constexpr,
    parts: tl.constexpr, first_chunk,
    keys_stride_b, keys_stride_t: tl.constexpr, keys_stride_g: tl.constexpr,
    Q: tl.constexpr, S: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """The gradient of C (QUERIES) or of B of one tile and group, from the parts of its heads."""
    local_tile, group, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    chunk, tile = first_chunk + local_tile // tiles_per_chunk, local_tile % tiles_per_chunk
    first, stop = span_of(chunk, tile, chunk_size, num_positions, Q=Q)
    if first >= stop:
        return
    num_groups = tl.num_programs(1)
    ss, local = tl.arange(0, S), tl.arange(0, Q)
    overlaps, found = tl.zeros([Q, Q], dtype=tl.float32), tl.zeros([Q, S], dtype=tl.float32)
    row = ((batch * tl.num_programs(0) + local_tile) * num_groups + group) * parts
    for part in range(parts):
        overlaps += tl.load(pairs + (row + part) * Q * Q + local[:, None] * Q + local[None, :]).to(tl.float32)
        found += tl.load(edges + (row + part) * Q * S + local[:, None] * S + ss[None, :]).to(tl.float32)
    others = load_rows(keys, (batch, group, first, stop), (keys_stride_b, keys_stride_t, keys_stride_g), ss, state_width, Q=Q)
    rounded = narrow(overlaps, keys.dtype.element_ty)
    found += dot(tl.trans(rounded), others) if QUERIES else dot(rounded, others)
    store_rows(gradient, found, batch, group, first, stop, num_positions, num_groups, ss, state_width)
