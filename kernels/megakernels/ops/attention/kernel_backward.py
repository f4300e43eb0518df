"""The backward kernels of attention. Both compute the weights again from the saved log-sum-exp.

`attention_query_kernel` loops over the keys of a tile of queries. This kernel makes the gradient of q, and δ = Σ ∂L/∂out ⊙ out for the
other kernel. `attention_key_kernel` loops over the queries that see a tile of keys, of every head that shares them. This kernel makes the
gradients of k and v.

Source: Dao, arXiv:2307.08691, algorithm 2, in two kernels so that no sum needs atomics.
"""

import triton
import triton.language as tl

from megakernels._common.tiles import LOG2_E, dot, narrow
from megakernels.ops.attention.kernel_tiles import added_scores, bent, chosen, queries_of, query_tile, stored, visible


@triton.jit  # type: ignore[untyped-decorator]
def attention_query_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0915  branches are of the compiler's
    grad_out, q, k, v, starts, bits, classes, relations, out, lse, delta, grad_q, num_queries, num_keys, piece_length, first_a, first_b,
    key_length, num_ranks, shared, window, num_words, scale, cap,
    grad_stride_b, grad_stride_t, grad_stride_h, q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h,
    v_stride_b, v_stride_t, v_stride_h,
    WIDTH: tl.constexpr, VALUE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, R: tl.constexpr, V: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_STARTS: tl.constexpr, ZIG_ZAG: tl.constexpr, HAS_BITS: tl.constexpr, CAPPED: tl.constexpr,
    HAS_RELATIONS: tl.constexpr,
):  # fmt: skip
    """Tiles of grad_q [B, T, H, WIDTH] and delta [B, H, T]."""
    head, batch = tl.program_id(0), tl.program_id(2).to(tl.int64)
    num_heads = tl.num_programs(0)
    row, there, position, start, begin, whole, whole_end, end = query_tile(
        starts + batch * num_queries,
        piece_length,
        first_a,
        first_b,
        num_keys,
        window,
        M=M,
        N=N,
        HAS_WINDOW=HAS_WINDOW,
        HAS_STARTS=HAS_STARTS,
    )
    column = tl.arange(0, D)
    rest = D + tl.arange(0, R if R else 16)
    value = tl.arange(0, V)

    own = q + batch * q_stride_b + head * tl.cast(q_stride_h, tl.int64) + row[:, None] * q_stride_t
    queries = tl.load(own + column[None, :], mask=there[:, None] & (column < WIDTH)[None, :], other=0.0)
    if R:
        queries_rest = tl.load(own + rest[None, :], mask=there[:, None] & (rest < WIDTH)[None, :], other=0.0)
    valued = there[:, None] & (value < VALUE)[None, :]
    near_grads = grad_out + batch * grad_stride_b + head * tl.cast(grad_stride_h, tl.int64) + row[:, None] * grad_stride_t
    grads = tl.load(near_grads + value[None, :], mask=valued, other=0.0)
    made = tl.load(out + ((batch * num_queries + row) * num_heads + head)[:, None] * VALUE + value[None, :], mask=valued, other=0.0).to(
        tl.float32
    )
    inner = tl.sum(grads.to(tl.float32) * made, 1)
    statistics = (batch * num_heads + head) * num_queries + row
    tl.store(delta + statistics, inner, mask=there)
    sums = tl.load(lse + statistics, mask=there, other=float("inf")).to(tl.float32) * LOG2_E
    group = (head // shared).to(tl.int64)
    k += batch * k_stride_b + group * k_stride_h
    v += batch * v_stride_b + group * v_stride_h

    found = tl.zeros([M, D], dtype=tl.float32)
    found_rest = tl.zeros([M, R if R else 16], dtype=tl.float32)
    for phase in tl.static_range(0 if HAS_WINDOW or HAS_STARTS or HAS_BITS else 1, 1 if HAS_BITS else 3):
        low = begin if phase == 0 else (whole if phase == 1 else whole_end)
        high = end if HAS_BITS else (whole if phase == 0 else (whole_end if phase == 1 else end))
        for key in range(low, high, N):
            at = key + tl.arange(0, N)
            place = stored(at, key_length, num_ranks, ZIG_ZAG=ZIG_ZAG)
            near = k + place[:, None] * k_stride_t
            known = (at < num_keys)[:, None] if phase != 1 else tl.full([N, 1], True, dtype=tl.int1)
            keys = tl.load(near + column[None, :], mask=known & (column < WIDTH)[None, :], other=0.0)
            logits = dot(queries, tl.trans(keys))
            if R:
                keys_rest = tl.load(near + rest[None, :], mask=known & (rest < WIDTH)[None, :], other=0.0)
                logits += dot(queries_rest, tl.trans(keys_rest))
            scores = logits * (scale * LOG2_E)
            if CAPPED:
                bend = bent(logits * (scale / cap), EXACT=q.dtype.element_ty == tl.float32)
                scores = bend * (cap * LOG2_E)
            if HAS_RELATIONS:
                scores += added_scores(classes + batch * num_keys, relations, at, num_keys, head, num_heads)[None, :]
            weights = tl.exp2(scores - sums[:, None])
            if HAS_BITS:
                weights = tl.where(chosen(bits + (batch * num_queries + row) * num_words, there, key, N=N), weights, 0.0)
            elif phase != 1:
                seen = visible(at[None, :], position[:, None], start[:, None], window, HAS_WINDOW=HAS_WINDOW, HAS_STARTS=HAS_STARTS)
                weights = tl.where(seen, weights, 0.0)
            values = tl.load(v + place[:, None] * v_stride_t + value[None, :], mask=known & (value < VALUE)[None, :], other=0.0)
            inner_grads = dot(grads, tl.trans(values))
            grad_scores = weights * (inner_grads - inner[:, None])
            if CAPPED:
                grad_scores *= 1.0 - bend * bend
            grad_logits = narrow(grad_scores, k.dtype.element_ty)
            found += dot(grad_logits, keys)
            if R:
                found_rest += dot(grad_logits, keys_rest)
    target = grad_q + ((batch * num_queries + row) * num_heads + head)[:, None] * WIDTH
    tl.store(target + column[None, :], narrow(found * scale, grad_q.dtype.element_ty), mask=there[:, None] & (column < WIDTH)[None, :])
    if R:
        narrowed = narrow(found_rest * scale, grad_q.dtype.element_ty)
        tl.store(target + rest[None, :], narrowed, mask=there[:, None] & (rest < WIDTH)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def attention_key_kernel(  # type: ignore[no-untyped-def]  # noqa: C901, PLR0912, PLR0915  branches are of the compiler's
    grad_out, q, k, v, starts, bits, classes, relations, lse, delta, grad_k, grad_v, grad_added, num_queries, num_keys, piece_length,
    first_a, first_b, key_length, num_ranks, shared, window, num_words, scale, cap,
    grad_stride_b, grad_stride_t, grad_stride_h, q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h,
    v_stride_b, v_stride_t, v_stride_h,
    WIDTH: tl.constexpr, VALUE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, R: tl.constexpr, V: tl.constexpr,
    NUM_PIECES: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_STARTS: tl.constexpr, ZIG_ZAG: tl.constexpr, HAS_BITS: tl.constexpr,
    CAPPED: tl.constexpr, HAS_RELATIONS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """Tiles of grad_k [B, S, G, WIDTH], of grad_v [B, S, G, VALUE], or of both: N keys, the queries M at a time.

    With ADDED it computes tiles of grad_added [B, H, S] instead: the gradient of the term that a head adds to the scores of keys.
    """
    group, batch = tl.program_id(0), tl.program_id(2).to(tl.int64)
    num_groups = tl.num_programs(0)
    if ADDED:  # a program for each head
        group, num_groups = group // shared, num_groups // shared
    num_heads = num_groups * shared
    first_key = tl.program_id(1) * N  # keys that the most queries see are processed first
    at = first_key + tl.arange(0, N)
    known = (at < num_keys)[:, None]
    place = stored(at, key_length, num_ranks, ZIG_ZAG=ZIG_ZAG)
    column = tl.arange(0, D)
    rest = D + tl.arange(0, R if R else 16)
    value = tl.arange(0, V)
    near = k + batch * k_stride_b + group * tl.cast(k_stride_h, tl.int64) + place[:, None] * k_stride_t
    keys = tl.load(near + column[None, :], mask=known & (column < WIDTH)[None, :], other=0.0)
    if R:
        keys_rest = tl.load(near + rest[None, :], mask=known & (rest < WIDTH)[None, :], other=0.0)
    near_values = v + batch * v_stride_b + group * tl.cast(v_stride_h, tl.int64) + place[:, None] * v_stride_t
    values = tl.load(near_values + value[None, :], mask=known & (value < VALUE)[None, :], other=0.0)

    found = tl.zeros([N, D], dtype=tl.float32)
    found_rest = tl.zeros([N, R if R else 16], dtype=tl.float32)
    found_values = tl.zeros([N, V], dtype=tl.float32)
    last_key = tl.minimum(first_key + N, num_keys) - 1
    of_keys = tl.zeros([N], dtype=tl.float32)
    heads, first_head = shared, group * shared
    if ADDED:
        heads, first_head = 1, tl.program_id(0)
    for piece in tl.static_range(NUM_PIECES):
        first = first_a if piece == 0 else first_b
        starts_of_piece = starts + batch * num_queries + piece * piece_length
        begin, whole, whole_end, end = queries_of(
            first_key, last_key, first, piece_length, starts_of_piece, window, M=M, HAS_WINDOW=HAS_WINDOW, HAS_STARTS=HAS_STARTS
        )
        for phase in tl.static_range(1 if HAS_BITS else 3):
            low = begin if phase == 0 else (whole if phase == 1 else whole_end)
            high = end if HAS_BITS else (whole if phase == 0 else (whole_end if phase == 1 else end))
            high = tl.minimum(high, end)
            steps = tl.cdiv(tl.maximum(high - low, 0), M)
            for step in range(steps * heads):
                head = first_head + step // steps
                within = low + (step % steps) * M + tl.arange(0, M)
                there = within < piece_length if phase != 1 else tl.full([M], True, dtype=tl.int1)
                row = (piece * piece_length + within).to(tl.int64)
                near_queries = q + batch * q_stride_b + head * tl.cast(q_stride_h, tl.int64) + row[:, None] * q_stride_t
                queries = tl.load(near_queries + column[None, :], mask=there[:, None] & (column < WIDTH)[None, :], other=0.0)
                logits = dot(keys, tl.trans(queries))
                if R:
                    queries_rest = tl.load(near_queries + rest[None, :], mask=there[:, None] & (rest < WIDTH)[None, :], other=0.0)
                    logits += dot(keys_rest, tl.trans(queries_rest))
                statistics = (batch * num_heads + head) * num_queries + row
                sums = tl.load(lse + statistics, mask=there, other=float("inf")).to(tl.float32) * LOG2_E
                scores = logits * (scale * LOG2_E)
                if CAPPED:
                    bend = bent(logits * (scale / cap), EXACT=q.dtype.element_ty == tl.float32)
                    scores = bend * (cap * LOG2_E)
                if HAS_RELATIONS:
                    scores += added_scores(classes + batch * num_keys, relations, at, num_keys, head, num_heads)[:, None]
                weights = tl.exp2(scores - sums[None, :])
                if HAS_BITS:
                    near_words = bits + (batch * num_queries + row) * num_words
                    weights = tl.where(chosen(near_words, there, first_key, N=N, KEYS_FIRST=True), weights, 0.0)
                elif phase != 1:
                    start = tl.zeros([M], dtype=tl.int32)
                    if HAS_STARTS:
                        start = first + tl.load(starts_of_piece + within, mask=there, other=0)
                    position = (first + within)[None, :]
                    seen = visible(at[:, None], position, start[None, :], window, HAS_WINDOW=HAS_WINDOW, HAS_STARTS=HAS_STARTS)
                    weights = tl.where(there[None, :] & seen, weights, 0.0)
                near_grads = grad_out + batch * grad_stride_b + head * tl.cast(grad_stride_h, tl.int64) + row[:, None] * grad_stride_t
                grads = tl.load(near_grads + value[None, :], mask=there[:, None] & (value < VALUE)[None, :], other=0.0)
                if VALUES:
                    found_values += dot(narrow(weights, v.dtype.element_ty), grads)
                if KEYS or ADDED:
                    inner_grads = dot(values, tl.trans(grads))
                    inner = tl.load(delta + statistics, mask=there, other=0.0).to(tl.float32)
                    grad_scores = weights * (inner_grads - inner[None, :])
                    if ADDED:
                        of_keys += tl.sum(grad_scores, 1)
                    if KEYS:
                        if CAPPED:
                            grad_scores *= 1.0 - bend * bend
                        grad_logits = narrow(grad_scores, q.dtype.element_ty)
                        found += dot(grad_logits, queries)
                        if R:
                            found_rest += dot(grad_logits, queries_rest)
    target = (batch * num_keys + place) * num_groups + group
    if KEYS:
        near_grad = grad_k + target[:, None] * WIDTH
        tl.store(near_grad + column[None, :], narrow(found * scale, grad_k.dtype.element_ty), mask=known & (column < WIDTH)[None, :])
        if R:
            narrowed = narrow(found_rest * scale, grad_k.dtype.element_ty)
            tl.store(near_grad + rest[None, :], narrowed, mask=known & (rest < WIDTH)[None, :])
    if ADDED:
        tl.store(grad_added + (batch * num_heads + first_head) * num_keys + at, of_keys, mask=at < num_keys)
    if VALUES:
        near_grad = grad_v + target[:, None] * VALUE + value[None, :]
        tl.store(near_grad, narrow(found_values, grad_v.dtype.element_ty), mask=known & (value < VALUE)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def attention_relation_kernel(  # type: ignore[no-untyped-def]
    grad_added, classes, grad_relations, num_sequences, num_keys, num_relations, num_heads, N: tl.constexpr, R: tl.constexpr
):
    """R classes of a head of grad_relations [num_relations, H]: sums of grad_added over the keys of each, in their order."""
    head = tl.program_id(0)
    kinds = tl.program_id(1) * R + tl.arange(0, R)
    total = tl.zeros([R], dtype=tl.float32)
    for batch in range(num_sequences):
        sequence = tl.cast(batch, tl.int64)
        near = grad_added + (sequence * num_heads + head) * num_keys
        for first in range(0, num_keys, N):
            at = first + tl.arange(0, N)
            kind = tl.load(classes + sequence * num_keys + at, mask=at < num_keys, other=-1)
            found = tl.load(near + at, mask=at < num_keys, other=0.0).to(tl.float32)
            total += tl.sum(tl.where(kind[None, :] == kinds[:, None], found[None, :], 0.0), 1)
    target = grad_relations + kinds * num_heads + head
    tl.store(target, narrow(total, grad_relations.dtype.element_ty), mask=kinds < num_relations)
