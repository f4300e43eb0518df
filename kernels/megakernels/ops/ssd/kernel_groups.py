"""The scan's backward kernels for the gradients of B and C, which the heads of a group share."""

import triton
import triton.language as tl

from megakernels._common.tiles import dot, narrow
from megakernels.ops.ssd.kernel_tiles import edges_of, rows_at, span_of, store_rows, sums_of


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
    3.6.0 would write those registers again while products that read them are in flight (`_common.hazards`). For C each turn reads the
    result of a second product, and that wait is for both.
    """
    local_tile, batch = tl.program_id(0), tl.program_id(2).to(tl.int64)
    parts = tl.cdiv(heads_per_group, SPAN)
    group, part = (tl.program_id(1) // parts).to(tl.int64), tl.program_id(1) % parts
    chunk, tile = first_chunk + local_tile // tiles_per_chunk, local_tile % tiles_per_chunk
    first, stop = span_of(chunk, tile, chunk_size, num_positions, Q=Q)
    if first >= stop:
        return
    dtype: tl.constexpr = rows.dtype.element_ty
    num_blocks = tl.cdiv(head_width, P)
    ss, local = tl.arange(0, S), tl.arange(0, Q)
    if QUERIES:
        keys_at, in_keys = rows_at(keys, batch, group, first, stop, keys_stride_b, keys_stride_t, keys_stride_g, ss, state_width, Q=Q)
        queries = tl.load(keys_at, mask=in_keys, other=0.0)
    found = tl.zeros([Q, S], dtype=tl.float32)
    count = tl.minimum(heads_per_group - part * SPAN, SPAN) * num_blocks
    for member in range(count):
        head, block = group * heads_per_group + part * SPAN + member // num_blocks, member % num_blocks
        ps = block * P + tl.arange(0, P)
        at, mask = rows_at(rows, batch, head, first, stop, rows_stride_b, rows_stride_t, rows_stride_h, ps, head_width, Q=Q)
        wide = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        at = ((batch * tl.num_programs(0) + local_tile) * num_heads + head) * num_blocks + block
        state = tl.load(boundary + at * P * S + tl.arange(0, P)[:, None] * S + ss[None, :])
        steps, sums, rests, total, rest = sums_of(
            tables, batch, head, first, stop, num_positions, num_heads, num_rows, Q=Q, PRECISE=PRECISE
        )
        from_start, to_end, _across = edges_of(
            starts, sums, rests, total, rest, batch, first, stop, num_positions, Q=Q, HAS_STARTS=HAS_STARTS, PRECISE=PRECISE
        )
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
    at, mask = rows_at(keys, batch, group, first, stop, keys_stride_b, keys_stride_t, keys_stride_g, ss, state_width, Q=Q)
    others = tl.load(at, mask=mask, other=0.0)
    rounded = narrow(overlaps, keys.dtype.element_ty)
    found += dot(tl.trans(rounded), others) if QUERIES else dot(rounded, others)
    store_rows(gradient, found, batch, group, first, stop, num_positions, num_groups, ss, state_width)
