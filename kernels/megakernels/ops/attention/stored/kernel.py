"""The kernels of attention's backward with stored scores.

`attention_delta_kernel` makes δ = Σ ∂L/∂out ⊙ out. `attention_score_kernel` makes tiles of weights and of score gradients, each once.
`attention_product_query_kernel` multiplies the score gradients with keys, `attention_product_key_kernel` them with queries, and weights
with the gradients of outputs.

A program that makes scores has no sums over a loop, so that two or three programs share a multiprocessor: exponentials and stores of one
overlap products of the others. No program adds to another's result.
"""

import triton
import triton.language as tl

from megakernels._common.tiles import LOG2_E, dot, narrow
from megakernels.ops.attention.kernel_tiles import bent, starts_up_to, visible


@triton.jit  # type: ignore[untyped-decorator]
def attention_delta_kernel(  # type: ignore[no-untyped-def]
    grad_out, out, delta, num_queries, num_heads, grad_stride_b, grad_stride_t, grad_stride_h,
    VALUE: tl.constexpr, M: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Tiles of delta [B, H, T]."""
    head, batch = tl.program_id(0), tl.program_id(2).to(tl.int64)
    row = (tl.program_id(1) * M + tl.arange(0, M)).to(tl.int64)
    value = tl.arange(0, V)
    there = row < num_queries
    valued = there[:, None] & (value < VALUE)[None, :]
    near = grad_out + batch * grad_stride_b + head * tl.cast(grad_stride_h, tl.int64) + row[:, None] * grad_stride_t
    grads = tl.load(near + value[None, :], mask=valued, other=0.0).to(tl.float32)
    made = tl.load(out + ((batch * num_queries + row) * num_heads + head)[:, None] * VALUE + value[None, :], mask=valued, other=0.0)
    tl.store(delta + (batch * num_heads + head) * num_queries + row, tl.sum(grads * made.to(tl.float32), 1), mask=there)


@triton.jit  # type: ignore[untyped-decorator]
def stored_tile(tile, band, HAS_WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """The tile of queries and that of keys of a stored tile; that of keys is below 0 for one that does not exist."""
    if HAS_WINDOW:
        of_queries = tile // band
        of_keys = of_queries - tile % band
    else:
        of_queries = ((tl.sqrt(8.0 * tile.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
        of_queries = tl.where(of_queries * (of_queries + 1) // 2 > tile, of_queries - 1, of_queries)
        of_queries = tl.where((of_queries + 1) * (of_queries + 2) // 2 <= tile, of_queries + 1, of_queries)
        of_keys = tile - of_queries * (of_queries + 1) // 2
    return of_queries, of_keys


@triton.jit  # type: ignore[untyped-decorator]
def place_of(of_queries, of_keys, band, HAS_WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Number of the stored tile of a tile of queries and one of keys; `stored_tile` backwards."""
    if HAS_WINDOW:
        return of_queries * band + of_queries - of_keys
    else:  # noqa: RET505  one branch is compiled
        return of_queries * (of_queries + 1) // 2 + of_keys


@triton.jit(do_not_specialize=["first_batch", "first_head"])  # type: ignore[untyped-decorator]
def attention_score_kernel(  # type: ignore[no-untyped-def]
    grad_out, q, k, v, starts, lse, delta, weights_store, grads_store, num_queries, num_heads, shared, window, band, num_slots, scale, cap,
    first_batch, first_head,
    grad_stride_b, grad_stride_t, grad_stride_h, q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h,
    v_stride_b, v_stride_t, v_stride_h,
    WIDTH: tl.constexpr, VALUE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, C: tl.constexpr, S: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_STARTS: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Tiles [N, M] of the stored weights and score gradients [sequences, heads, num_slots, S keys, S queries] of a part of a batch."""
    local = tl.program_id(1)
    head, batch = first_head + local, (first_batch + tl.program_id(2)).to(tl.int64)
    group = (head // shared).to(tl.int64)
    parts: tl.constexpr = (S // M) * (S // N)
    tile, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    of_queries, of_keys = stored_tile(tile, band, HAS_WINDOW=HAS_WINDOW)
    exists = of_keys >= 0
    if HAS_STARTS:  # the first query of a tile has the lowest start
        exists &= tl.load(starts + batch * num_queries + of_queries * S) < (of_keys + 1) * S
    if exists:
        first_query, first_key = (part % (S // M)) * M, (part // (S // M)) * N
        row = of_queries * S + first_query + tl.arange(0, M)
        at = of_keys * S + first_key + tl.arange(0, N)
        there, known = row < num_queries, at < num_queries
        column = tl.arange(0, C)
        near_queries = q + batch * q_stride_b + head * tl.cast(q_stride_h, tl.int64) + row.to(tl.int64)[:, None] * q_stride_t
        near_keys = k + batch * k_stride_b + group * k_stride_h + at.to(tl.int64)[:, None] * k_stride_t
        logits = tl.zeros([N, M], dtype=tl.float32)
        for first in range(0, WIDTH, C):
            wide = (first + column < WIDTH)[None, :] if WIDTH % C else tl.full([1, C], True, dtype=tl.int1)
            keys = tl.load(near_keys + (first + column)[None, :], mask=known[:, None] & wide, other=0.0)
            queries = tl.load(near_queries + (first + column)[None, :], mask=there[:, None] & wide, other=0.0)
            logits += dot(keys, tl.trans(queries))
        near_grads = grad_out + batch * grad_stride_b + head * tl.cast(grad_stride_h, tl.int64) + row.to(tl.int64)[:, None] * grad_stride_t
        near_values = v + batch * v_stride_b + group * v_stride_h + at.to(tl.int64)[:, None] * v_stride_t
        inner_grads = tl.zeros([N, M], dtype=tl.float32)
        for first in range(0, VALUE, C):
            wide = (first + column < VALUE)[None, :] if VALUE % C else tl.full([1, C], True, dtype=tl.int1)
            values = tl.load(near_values + (first + column)[None, :], mask=known[:, None] & wide, other=0.0)
            grads = tl.load(near_grads + (first + column)[None, :], mask=there[:, None] & wide, other=0.0)
            inner_grads += dot(values, tl.trans(grads))
        statistics = (batch * num_heads + head) * num_queries + row
        sums = tl.load(lse + statistics, mask=there, other=float("inf")) * LOG2_E
        inner = tl.load(delta + statistics, mask=there, other=0.0)
        if CAPPED:
            bend = bent(logits * (scale / cap), EXACT=False)
            weights = tl.exp2(bend * (cap * LOG2_E) - sums[None, :])
        else:
            weights = tl.exp2(logits * (scale * LOG2_E) - sums[None, :])
        start = tl.zeros([M], dtype=tl.int32)
        if HAS_STARTS:
            start = tl.load(starts + batch * num_queries + row, mask=there, other=0)
        seen = visible(at[:, None], row[None, :], start[None, :], window, HAS_WINDOW=HAS_WINDOW, HAS_STARTS=HAS_STARTS)
        weights = tl.where(there[None, :] & seen, weights, 0.0)
        grad_scores = weights * (inner_grads - inner[None, :])
        if CAPPED:
            grad_scores *= 1.0 - bend * bend
        slot = (tl.program_id(2) * tl.num_programs(1) + local).to(tl.int64) * num_slots + tile
        inside = slot * (S * S) + (first_key + tl.arange(0, N))[:, None] * S + (first_query + tl.arange(0, M))[None, :]
        tl.store(weights_store + inside, narrow(weights, v.dtype.element_ty))
        tl.store(grads_store + inside, narrow(grad_scores, q.dtype.element_ty))


@triton.jit(do_not_specialize=["first_batch", "first_head"])  # type: ignore[untyped-decorator]
def attention_product_query_kernel(  # type: ignore[no-untyped-def]
    grads_store, k, starts, grad_q, num_queries, num_heads, shared, band, num_slots, scale, first_batch, first_head,
    k_stride_b, k_stride_t, k_stride_h,
    WIDTH: tl.constexpr, N: tl.constexpr, D: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_STARTS: tl.constexpr,
):  # fmt: skip
    """Tiles of grad_q [B, T, H, WIDTH]: S queries, the keys N at a time. Tiles with the most keys start first."""
    local = tl.program_id(0)
    head, batch = first_head + local, (first_batch + tl.program_id(2)).to(tl.int64)
    of_queries = tl.num_programs(1) - 1 - tl.program_id(1)
    column = tl.arange(0, D)
    rest = D + tl.arange(0, R if R else 16)
    near = k + batch * k_stride_b + (head // shared).to(tl.int64) * k_stride_h
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(of_queries - band + 1, 0)
    if HAS_STARTS:
        begin = tl.maximum(tl.load(starts + batch * num_queries + of_queries * S) // S, begin)
    tiles = grads_store + (tl.program_id(2) * tl.num_programs(0) + local).to(tl.int64) * num_slots * (S * S)
    found = tl.zeros([S, D], dtype=tl.float32)
    found_rest = tl.zeros([S, R if R else 16], dtype=tl.float32)
    for step in range(begin * (S // N), (of_queries + 1) * (S // N)):
        of_keys = step // (S // N)
        tile = tiles + place_of(of_queries, of_keys, band, HAS_WINDOW=HAS_WINDOW).to(tl.int64) * (S * S)
        within = (step % (S // N)) * N + tl.arange(0, N)
        grad_scores = tl.load(tile + within[:, None] * S + tl.arange(0, S)[None, :])
        at = (of_keys * S + within)[:, None]
        near_keys = near + at.to(tl.int64) * k_stride_t
        known = at < num_queries
        keys = tl.load(near_keys + column[None, :], mask=known & (column < WIDTH)[None, :], other=0.0)
        found += dot(tl.trans(grad_scores), keys)
        if R:
            keys_rest = tl.load(near_keys + rest[None, :], mask=known & (rest < WIDTH)[None, :], other=0.0)
            found_rest += dot(tl.trans(grad_scores), keys_rest)
    row = (of_queries * S + tl.arange(0, S)).to(tl.int64)
    target = grad_q + ((batch * num_queries + row) * num_heads + head)[:, None] * WIDTH
    there = (row < num_queries)[:, None]
    tl.store(target + column[None, :], narrow(found * scale, grad_q.dtype.element_ty), mask=there & (column < WIDTH)[None, :])
    if R:
        tl.store(target + rest[None, :], narrow(found_rest * scale, grad_q.dtype.element_ty), mask=there & (rest < WIDTH)[None, :])


@triton.jit(do_not_specialize=["first_batch", "first_group"])  # type: ignore[untyped-decorator]
def attention_product_key_kernel(  # type: ignore[no-untyped-def]
    store, q, starts, grad_k, num_queries, num_groups, shared, band, num_slots, scale, first_batch, first_group,
    q_stride_b, q_stride_t, q_stride_h,
    WIDTH: tl.constexpr, M: tl.constexpr, D: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_STARTS: tl.constexpr,
):  # fmt: skip
    """Tiles of grad_k [B, T, G, WIDTH]: S keys, the queries M at a time, of every head that shares them.

    Of stored weights and gradients of outputs it makes the gradient of v instead.
    """
    local = tl.program_id(0)
    group, batch = first_group + local, (first_batch + tl.program_id(2)).to(tl.int64)
    of_keys = tl.program_id(1)  # keys that the most queries see are processed first
    column = tl.arange(0, D)
    rest = D + tl.arange(0, R if R else 16)
    end = tl.cdiv(num_queries, S)
    if HAS_WINDOW:
        end = tl.minimum(end, of_keys + band)
    if HAS_STARTS:
        end = tl.minimum(end, tl.cdiv(starts_up_to(starts + batch * num_queries, of_keys * S + S - 1, num_queries), S))
    steps = (end - of_keys) * (S // M)
    found = tl.zeros([S, D], dtype=tl.float32)
    found_rest = tl.zeros([S, R if R else 16], dtype=tl.float32)
    for step in range(steps * shared):
        of_group = step // steps
        part = step % steps
        of_queries = of_keys + part // (S // M)
        within = (part % (S // M)) * M + tl.arange(0, M)
        head = ((tl.program_id(2) * tl.num_programs(0) + local) * shared + of_group).to(tl.int64)
        tile = store + (head * num_slots + place_of(of_queries, of_keys, band, HAS_WINDOW=HAS_WINDOW)) * (S * S)
        stored = tl.load(tile + tl.arange(0, S)[:, None] * S + within[None, :])
        row = (of_queries * S + within)[:, None]
        near = q + batch * q_stride_b + (group * shared + of_group) * tl.cast(q_stride_h, tl.int64) + row.to(tl.int64) * q_stride_t
        there = row < num_queries
        queries = tl.load(near + column[None, :], mask=there & (column < WIDTH)[None, :], other=0.0)
        found += dot(stored, queries)
        if R:
            queries_rest = tl.load(near + rest[None, :], mask=there & (rest < WIDTH)[None, :], other=0.0)
            found_rest += dot(stored, queries_rest)
    at = (of_keys * S + tl.arange(0, S)).to(tl.int64)
    target = grad_k + ((batch * num_queries + at) * num_groups + group)[:, None] * WIDTH
    known = (at < num_queries)[:, None]
    tl.store(target + column[None, :], narrow(found * scale, grad_k.dtype.element_ty), mask=known & (column < WIDTH)[None, :])
    if R:
        tl.store(target + rest[None, :], narrow(found_rest * scale, grad_k.dtype.element_ty), mask=known & (rest < WIDTH)[None, :])
