"""The scan's kernels of steps and states: tables, what each chunk adds, the walk over chunks, and the states of tiles."""

import triton
import triton.language as tl

from megakernels._common.tiles import LOG2_E, dot, narrow
from megakernels.ops.ssd.kernel_tiles import edges_of, falls_of, load_rows, span_of, steps_of, sums_of


@triton.jit  # type: ignore[untyped-decorator]
def ssd_table_kernel(  # type: ignore[no-untyped-def]
    dt, A_log, dt_bias, tables, num_positions, chunk_size: tl.constexpr, tiles_per_chunk: tl.constexpr, num_heads: tl.constexpr, num_rows,
    dt_stride_b, dt_stride_t: tl.constexpr, dt_stride_h: tl.constexpr,
    dt_min, dt_max,
    H: tl.constexpr, Q: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """Steps and running sums of one tile of positions and H heads. Sums are fp64 until they are stored."""
    tile, batch = tl.program_id(0), tl.program_id(2).to(tl.int64)
    head = tl.program_id(1) * H + tl.arange(0, H)
    in_h = head < num_heads
    first, stop = span_of(tile // tiles_per_chunk, tile % tiles_per_chunk, chunk_size, num_positions, Q=Q)
    position = first + tl.arange(0, Q)
    valid = in_h[:, None] & (position < stop)[None, :]
    at = dt + batch * dt_stride_b + head.to(tl.int64)[:, None] * dt_stride_h + position.to(tl.int64)[None, :] * dt_stride_t
    bias = tl.load(dt_bias + head, mask=in_h, other=0.0).to(tl.float32)
    rate = -tl.exp(tl.load(A_log + head, mask=in_h, other=0.0).to(tl.float32))
    step, _slope = steps_of(tl.load(at, mask=valid, other=0.0).to(tl.float32) + bias[:, None], dt_min, dt_max)
    wide = tl.cumsum(tl.where(valid, step * rate[:, None], 0.0).to(tl.float64), 1) * LOG2_E
    sums = wide.to(tl.float32)
    out = tables + (batch * num_heads + head[:, None]) * num_positions + position[None, :]
    tl.store(out, step, mask=valid)
    tl.store(out + num_rows, sums, mask=valid)
    if PRECISE:
        tl.store(out + 2 * num_rows, (wide - sums.to(tl.float64)).to(tl.float32), mask=valid)


@triton.jit  # type: ignore[untyped-decorator]
def ssd_chunk_kernel(  # type: ignore[no-untyped-def]
    rows, keys, tables, starts, states, last, through, num_positions, num_chunks, chunk_size: tl.constexpr, num_heads: tl.constexpr,
    heads_per_group: tl.constexpr, num_rows, head_width: tl.constexpr, state_width: tl.constexpr,
    rows_stride_b, rows_stride_t: tl.constexpr, rows_stride_h: tl.constexpr,
    keys_stride_b, keys_stride_t: tl.constexpr, keys_stride_g: tl.constexpr,
    Q: tl.constexpr, P: tl.constexpr, S: tl.constexpr, HAS_STARTS: tl.constexpr, PRECISE: tl.constexpr, GRADIENTS: tl.constexpr,
):  # fmt: skip
    """The sum that one chunk adds to the state after it, from x and B; with `GRADIENTS` to the gradient of the state before it.

    It is stored where that state or gradient will be: for the next chunk, or with `GRADIENTS` the previous one, and for the outermost chunk
    in `last`. `through` [B, chunks, H] is the decay across the chunk.
    """
    chunk, batch = tl.program_id(0), tl.program_id(2).to(tl.int64)
    num_blocks = tl.cdiv(head_width, P)
    head, block = (tl.program_id(1) // num_blocks).to(tl.int64), tl.program_id(1) % num_blocks
    group = head // heads_per_group
    ps, ss = block * P + tl.arange(0, P), tl.arange(0, S)
    begin, _stop = span_of(chunk, 0, chunk_size, num_positions, Q=Q)
    end = tl.minimum(begin + chunk_size, num_positions)
    num_tiles = tl.cdiv(end - begin, Q)
    local = tl.arange(0, Q)
    document = begin - 1  # of the chunk's last position
    if HAS_STARTS:
        document = tl.load(starts + batch * num_positions + end - 1)
    beyond = tl.full([], 0.0, tl.float32)  # log decay across the tiles between this one and the state
    found = tl.zeros([P, S], dtype=tl.float32)
    for index in range(num_tiles):
        tile = index if GRADIENTS else num_tiles - 1 - index
        first = begin + tile * Q
        stop = tl.minimum(first + Q, end)
        here = batch, head, first, stop
        steps, sums, rests, total, rest = sums_of(tables, here, num_positions, num_heads, num_rows, Q=Q, PRECISE=PRECISE)
        if GRADIENTS:
            scale = tl.exp2(sums + beyond)
            if HAS_STARTS:
                seen = tl.load(starts + batch * num_positions + first + local, mask=local < stop - first, other=0)
                scale = tl.where(seen < begin, scale, 0.0)
        else:
            scale = steps * tl.exp2(falls_of(total, rest, sums, rests, PRECISE=PRECISE) + beyond)
            if HAS_STARTS:
                scale = tl.where(first + local >= document, scale, 0.0)
        beyond += total
        values = load_rows(rows, here, (rows_stride_b, rows_stride_t, rows_stride_h), ps, head_width, Q=Q)
        of_group = load_rows(keys, (batch, group, first, stop), (keys_stride_b, keys_stride_t, keys_stride_g), ss, state_width, Q=Q)
        found += dot(tl.trans(narrow(values.to(tl.float32) * scale[:, None], rows.dtype.element_ty)), of_group)
    within = ps[:, None] * state_width + ss[None, :]
    in_state = (ps < head_width)[:, None] & (ss < state_width)[None, :]
    size = head_width * state_width
    other = chunk - 1 if GRADIENTS else chunk + 1
    if (other >= 0) & (other < num_chunks):
        place = ((batch * num_chunks + other) * num_heads + head) * size
        tl.store(states + place + within, narrow(found, states.dtype.element_ty), mask=in_state)
    else:
        tl.store(last + (batch * num_heads + head) * size + within, found, mask=in_state)
    across = tl.where(document < begin, tl.exp2(beyond), 0.0)
    tl.store(through + (batch * num_chunks + chunk) * num_heads + head, across)  # the same of every block


@triton.jit  # type: ignore[untyped-decorator]
def ssd_pass_kernel(  # type: ignore[no-untyped-def]
    outer, states, last, through, num_chunks, num_heads: tl.constexpr, size,
    COLUMNS: tl.constexpr, HAS_OUTER: tl.constexpr, GRADIENTS: tl.constexpr,
):  # fmt: skip
    """The states before all chunks of one sequence and head from what each chunk adds, in place; COLUMNS elements of a state.

    From `outer` to `last`: the initial state to the final one, with `GRADIENTS` backwards, the gradients of the states after all chunks.
    """
    row, batch = tl.program_id(0).to(tl.int64), tl.program_id(0).to(tl.int64) // num_heads
    head = row % num_heads
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < size
    carried = tl.zeros([COLUMNS], dtype=tl.float32)
    if HAS_OUTER:
        carried = tl.load(outer + row * size + column, mask=mask, other=0.0).to(tl.float32)
    for index in range(num_chunks):
        chunk = num_chunks - 1 - index if GRADIENTS else index
        place = (batch * num_chunks + chunk) * num_heads + head
        inner = tl.where(index + 1 < num_chunks, size, 0)  # the outermost chunk's addition is in `last`
        further = num_heads * size if not GRADIENTS else -num_heads * size
        added = tl.load(states + place * size + further + column, mask=column < inner, other=0.0).to(tl.float32)
        added += tl.load(last + row * size + column, mask=mask & (column >= inner), other=0.0).to(tl.float32)
        tl.store(states + place * size + column, narrow(carried, states.dtype.element_ty), mask=mask)
        carried = tl.load(through + place).to(tl.float32) * carried + added
    tl.store(last + row * size + column, carried, mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def ssd_state_kernel(  # type: ignore[no-untyped-def]
    rows, keys, tables, starts, states, tile_states, tile_gradients, passed, num_positions, num_chunks, chunk_size: tl.constexpr,
    tiles_per_chunk: tl.constexpr, num_heads: tl.constexpr, heads_per_group: tl.constexpr, num_rows, head_width: tl.constexpr,
    state_width: tl.constexpr, first_chunk,
    rows_stride_b, rows_stride_t: tl.constexpr, rows_stride_h: tl.constexpr,
    keys_stride_b, keys_stride_t: tl.constexpr, keys_stride_g: tl.constexpr,
    Q: tl.constexpr, P: tl.constexpr, S: tl.constexpr, HAS_STARTS: tl.constexpr, PRECISE: tl.constexpr, GRADIENTS: tl.constexpr,
):  # fmt: skip
    """The state before each tile of one chunk and head: `tile_states` [B, chunks of the segment, tiles, H, blocks, P, S].

    With `GRADIENTS` the gradients of the states after them, of the same shape, and from both `passed` [blocks, B, tiles, H]: the gradient
    of a factor of the state that crosses the tile.
    """
    index, batch = tl.program_id(0), tl.program_id(2).to(tl.int64)
    chunk, count = first_chunk + index, tl.num_programs(0)
    num_blocks = tl.cdiv(head_width, P)
    head, block = (tl.program_id(1) // num_blocks).to(tl.int64), tl.program_id(1) % num_blocks
    group = head // heads_per_group
    ps, ss = block * P + tl.arange(0, P), tl.arange(0, S)
    begin, _stop = span_of(chunk, 0, chunk_size, num_positions, Q=Q)
    end = tl.minimum(begin + chunk_size, num_positions)
    num_tiles = tl.cdiv(end - begin, Q)
    in_state = (ps < head_width)[:, None] & (ss < state_width)[None, :]
    place = ((batch * num_chunks + chunk) * num_heads + head) * head_width * state_width
    state = tl.load(states + place + ps[:, None] * state_width + ss[None, :], mask=in_state, other=0.0).to(tl.float32)
    whole = tl.arange(0, P)[:, None] * S + ss[None, :]
    for turn in range(num_tiles):
        tile = num_tiles - 1 - turn if GRADIENTS else turn
        first = begin + tile * Q
        stop = tl.minimum(first + Q, end)
        here = batch, head, first, stop
        tile_sums = sums_of(tables, here, num_positions, num_heads, num_rows, Q=Q, PRECISE=PRECISE)
        steps = tile_sums[0]
        from_start, to_end, across = edges_of(starts, tile_sums, here, num_positions, Q=Q, HAS_STARTS=HAS_STARTS, PRECISE=PRECISE)
        values = load_rows(rows, here, (rows_stride_b, rows_stride_t, rows_stride_h), ps, head_width, Q=Q)
        of_group = load_rows(keys, (batch, group, first, stop), (keys_stride_b, keys_stride_t, keys_stride_g), ss, state_width, Q=Q)
        at = ((((batch * count + index) * tiles_per_chunk + tile) * num_heads + head) * num_blocks + block) * P * S + whole
        state_there = narrow(state, rows.dtype.element_ty)
        state *= across
        if GRADIENTS:
            tl.store(tile_gradients + at, state_there)
            product = tl.sum(tl.sum(state * tl.load(tile_states + at).to(tl.float32), 1), 0)
            of_tile = (block * tl.num_programs(2) + batch) * num_chunks * tiles_per_chunk + chunk * tiles_per_chunk + tile
            tl.store(passed + of_tile * num_heads + head, product)
            scale = from_start
        else:
            tl.store(tile_states + at, state_there)
            scale = steps * to_end
        state += dot(tl.trans(narrow(values.to(tl.float32) * scale[:, None], rows.dtype.element_ty)), of_group)
