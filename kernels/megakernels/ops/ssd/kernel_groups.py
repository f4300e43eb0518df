"""The scan's backward kernels for the gradients of B and C, which the heads of a group share."""

import triton
import triton.language as tl

from megakernels._common.tiles import dot, narrow
from megakernels.ops.ssd.kernel_tiles import sequence_tile, steps_of, sums_of


@triton.jit  # type: ignore[untyped-decorator]
def ssd_sums_kernel(  # type: ignore[no-untyped-def]
    dt,
    A_log,
    dt_bias,
    steps,
    sums,
    rests,
    num_positions,
    chunk_size,
    num_heads,
    dt_stride_b,
    dt_stride_t,
    dt_stride_h,
    dt_min,
    dt_max,
    Q: tl.constexpr,
):
    """Steps Δ and running sums of Δ a from the chunk's first position, rounded and rest, [B, H, T] each, of one chunk and head."""
    chunk, head, batch = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    begin = chunk * chunk_size
    stop = tl.minimum(begin + chunk_size, num_positions)
    before = tl.full([], 0.0, tl.float64)
    for first in range(begin, stop, Q):
        position = first + tl.arange(0, Q)
        valid = position < stop
        _raw, step, rate = steps_of(dt, dt_bias, A_log, batch, head, position, valid, dt_stride_b, dt_stride_t, dt_stride_h, dt_min, dt_max)
        place = (batch * num_heads + head) * num_positions + position
        tl.store(steps + place, step, mask=valid)
        rounded, rest, before = sums_of(step, rate, before)
        tl.store(sums + place, rounded, mask=valid)
        tl.store(rests + place, rest, mask=valid)


@triton.jit  # type: ignore[untyped-decorator]
def ssd_group_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0912, PLR0915  branches are of the compiler's
    own,
    other,
    keys,
    boundary,
    steps,
    sums,
    rests,
    starts,
    gradient,
    num_positions,
    num_chunks,
    chunk_size,
    tiles_per_chunk,
    num_heads,
    heads_per_group,
    head_width,
    state_width,
    own_stride_b,
    own_stride_t,
    own_stride_h,
    other_stride_b,
    other_stride_t,
    other_stride_h,
    keys_stride_b,
    keys_stride_t,
    keys_stride_g,
    Q: tl.constexpr,
    P: tl.constexpr,
    S: tl.constexpr,
    QUERIES: tl.constexpr,
    HAS_STARTS: tl.constexpr,
):
    """The gradient of C (QUERIES) or of B, of one tile and group: pairs of positions in the chunk, and the state at its edge.

    With j ≤ i a pair in the chunk, c the running sum and g the gradient of y, the gradient of C_i is, over the heads,

        Σ_j (g_i · x_j) Δ_j exp(c_i − c_j) B_j + exp(c_i) g_iᵀ h,

    h the state at the chunk's start, and that of B_j is

        Σ_i (g_i · x_j) Δ_j exp(c_i − c_j) C_i + exp(c_last − c_j) Δ_j x_jᵀ h',

    h' the gradient of the state at its end. For C the tile's rows are g and the others x; for B vice versa. The sum over heads is
    computed before the product with B or C, which they share.
    """
    tile, group, batch = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    chunk, tile_of_chunk = tile // tiles_per_chunk, tile % tiles_per_chunk
    begin = chunk * chunk_size
    stop = tl.minimum(begin + chunk_size, num_positions)
    first = begin + tile_of_chunk * Q
    position = first + tl.arange(0, Q)
    valid = position < stop
    ss = tl.arange(0, S)
    in_s = ss < state_width
    document = batch * num_positions
    seen = tl.zeros_like(position)
    begun = 0  # the document of the chunk's last position
    if HAS_STARTS:
        seen = tl.load(starts + document + position, mask=valid, other=0)
        begun = tl.load(starts + document + stop - 1)
    found = tl.zeros([Q, S], dtype=tl.float32)
    for member in range(heads_per_group):
        head = group * heads_per_group + member
        of_head = (batch * num_heads + head) * num_positions
        sum = tl.load(sums + of_head + position, mask=valid, other=0.0).to(tl.float32)
        if QUERIES:
            scale = tl.exp(sum)
            reaches = valid & (seen < begin) if HAS_STARTS else valid
        else:
            step = tl.load(steps + of_head + position, mask=valid, other=0.0).to(tl.float32)
            fall = tl.load(sums + of_head + stop - 1).to(tl.float32) - sum
            fall += tl.load(rests + of_head + stop - 1).to(tl.float32) - tl.load(rests + of_head + position, mask=valid, other=0.0).to(
                tl.float32
            )
            reaches = valid & (position >= begun) if HAS_STARTS else valid
            scale = step * tl.exp(tl.where(reaches, fall, 0.0))
        scale = tl.where(reaches, scale, 0.0)
        for column in range(0, head_width, P):
            ps = column + tl.arange(0, P)
            in_p = ps < head_width
            at, mask = sequence_tile(own + head * own_stride_h, batch, position, own_stride_b, own_stride_t, ps, valid, in_p)
            rows = narrow(tl.load(at, mask=mask, other=0.0).to(tl.float32) * scale[:, None], own.dtype.element_ty)
            place = ((batch * num_chunks + chunk) * num_heads + head) * head_width * state_width
            at = boundary + place + ps[:, None] * state_width + ss[None, :]
            found += dot(rows, tl.load(at, mask=in_p[:, None] & in_s[None, :], other=0.0))
    if QUERIES:
        others_begin, others_stop = begin, tl.minimum(first + Q, stop)
    else:
        others_begin, others_stop = first, stop
    for first_there in range(others_begin, others_stop, Q):
        there = first_there + tl.arange(0, Q)
        exists = there < stop
        if QUERIES:
            visible = (position[:, None] >= there[None, :]) & valid[:, None] & (there[None, :] >= seen[:, None])
        else:
            visible = (there[None, :] >= position[:, None]) & exists[None, :]
            if HAS_STARTS:
                from_there = tl.load(starts + document + there, mask=exists, other=0)
                visible = visible & (position[:, None] >= from_there[None, :])
        pairs = tl.zeros([Q, Q], dtype=tl.float32)
        for member in range(heads_per_group):
            head = group * heads_per_group + member
            of_head = (batch * num_heads + head) * num_positions
            sum = tl.load(sums + of_head + position, mask=valid, other=0.0).to(tl.float32)
            sum_there = tl.load(sums + of_head + there, mask=exists, other=0.0).to(tl.float32)
            rest = tl.load(rests + of_head + position, mask=valid, other=0.0).to(tl.float32)
            rest_there = tl.load(rests + of_head + there, mask=exists, other=0.0).to(tl.float32)
            fall = (sum[:, None] - sum_there[None, :]) + (rest[:, None] - rest_there[None, :])
            decay = tl.exp(tl.where(visible, fall if QUERIES else -fall, float("-inf")))
            if QUERIES:
                decay *= tl.load(steps + of_head + there, mask=exists, other=0.0).to(tl.float32)[None, :]
            else:
                decay *= tl.load(steps + of_head + position, mask=valid, other=0.0).to(tl.float32)[:, None]
            for column in range(0, head_width, P):
                ps = column + tl.arange(0, P)
                in_p = ps < head_width
                at, mask = sequence_tile(own + head * own_stride_h, batch, position, own_stride_b, own_stride_t, ps, valid, in_p)
                rows = tl.load(at, mask=mask, other=0.0)
                at, mask = sequence_tile(other + head * other_stride_h, batch, there, other_stride_b, other_stride_t, ps, exists, in_p)
                pairs += decay * dot(rows, tl.trans(tl.load(at, mask=mask, other=0.0)))
        at, mask = sequence_tile(keys + group * keys_stride_g, batch, there, keys_stride_b, keys_stride_t, ss, exists, in_s)
        found += dot(narrow(pairs, keys.dtype.element_ty), tl.load(at, mask=mask, other=0.0))
    at = (batch * num_positions + position)[:, None] * (tl.num_programs(1) * state_width) + group * state_width + ss[None, :]
    tl.store(gradient + at, narrow(found, gradient.dtype.element_ty), mask=valid[:, None] & in_s[None, :])
