"""The scan's forward kernel of outputs."""

import triton
import triton.language as tl

from megakernels._common.tiles import dot, narrow
from megakernels.ops.ssd.kernel_tiles import decays_of, edges_of, load_rows, span_of, store_rows, sums_of


@triton.jit  # type: ignore[untyped-decorator]
def ssd_output_kernel(  # type: ignore[no-untyped-def]
    x, B, C, D, tables, starts, states, y, num_positions, num_chunks, chunk_size: tl.constexpr, num_heads: tl.constexpr,
    heads_per_group: tl.constexpr, num_rows, head_width: tl.constexpr, state_width: tl.constexpr,
    x_stride_b, x_stride_t: tl.constexpr, x_stride_h: tl.constexpr, B_stride_b, B_stride_t: tl.constexpr, B_stride_g: tl.constexpr,
    C_stride_b, C_stride_t: tl.constexpr, C_stride_g: tl.constexpr,
    Q: tl.constexpr, P: tl.constexpr, S: tl.constexpr, HAS_STARTS: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """The outputs of one chunk and head, P of the head's columns, tile by tile from the state before the chunk."""
    chunk, batch = tl.program_id(0), tl.program_id(2).to(tl.int64)
    num_blocks = tl.cdiv(head_width, P)
    head, block = (tl.program_id(1) // num_blocks).to(tl.int64), tl.program_id(1) % num_blocks
    group = head // heads_per_group
    dtype: tl.constexpr = x.dtype.element_ty
    ps, ss = block * P + tl.arange(0, P), tl.arange(0, S)
    begin, _stop = span_of(chunk, 0, chunk_size, num_positions, Q=Q)
    end = tl.minimum(begin + chunk_size, num_positions)
    skip = tl.load(D + head).to(tl.float32)
    in_state = (ps < head_width)[:, None] & (ss < state_width)[None, :]
    place = ((batch * num_chunks + chunk) * num_heads + head) * head_width * state_width
    state = tl.load(states + place + ps[:, None] * state_width + ss[None, :], mask=in_state, other=0.0).to(tl.float32)
    for tile in tl.range(tl.cdiv(end - begin, Q), disable_licm=True):
        first = begin + tile * Q
        stop = tl.minimum(first + Q, end)
        here = batch, head, first, stop
        tile_sums = sums_of(tables, here, num_positions, num_heads, num_rows, Q=Q, PRECISE=PRECISE)
        steps = tile_sums[0]
        from_start, to_end, across = edges_of(starts, tile_sums, here, num_positions, Q=Q, HAS_STARTS=HAS_STARTS, PRECISE=PRECISE)
        decay = decays_of(starts, tile_sums, here, num_positions, Q=Q, HAS_STARTS=HAS_STARTS, PRECISE=PRECISE, KEYS=False)
        values = load_rows(x, here, (x_stride_b, x_stride_t, x_stride_h), ps, head_width, Q=Q)
        keys = load_rows(B, (batch, group, first, stop), (B_stride_b, B_stride_t, B_stride_g), ss, state_width, Q=Q)
        queries = load_rows(C, (batch, group, first, stop), (C_stride_b, C_stride_t, C_stride_g), ss, state_width, Q=Q)
        found = from_start[:, None] * dot(queries, tl.trans(narrow(state, dtype)))
        mixing = dot(queries, tl.trans(keys)) * (decay * steps[None, :])
        found += dot(narrow(mixing, dtype), values)
        found += skip * values.to(tl.float32)
        store_rows(y, found, batch, head, first, stop, num_positions, num_heads, ps, head_width)
        written = narrow(values.to(tl.float32) * (to_end * steps)[:, None], dtype)
        state = across * state + dot(tl.trans(written), keys)
