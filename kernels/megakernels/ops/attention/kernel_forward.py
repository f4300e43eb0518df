"""The forward kernel of attention: one program per tile of queries and head, which loops over the keys that they see.

Online softmax in powers of two: per row, `largest` is the largest logit so far and `total` the sum of 2^(logit − largest).

Source: Dao, arXiv:2307.08691, algorithm 1.
"""

import triton
import triton.language as tl

from megakernels._common.tiles import dot, narrow
from megakernels.ops.attention.kernel_tiles import added_scores, bent, chosen, query_tile, stored, visible

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit  # type: ignore[untyped-decorator]
def attention_forward_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0915  branches are of the compiler's
    q, k, v, starts, bits, classes, relations, out, lse, num_queries, num_keys, piece_length, first_a, first_b, key_length, num_ranks,
    shared, window, num_words, scale_log2, cap_log2,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h, v_stride_b, v_stride_t, v_stride_h,
    WIDTH: tl.constexpr, VALUE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, R: tl.constexpr, V: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_STARTS: tl.constexpr, ZIG_ZAG: tl.constexpr, HAS_BITS: tl.constexpr, CAPPED: tl.constexpr,
    HAS_RELATIONS: tl.constexpr,
):  # fmt: skip
    """Tiles of out [B, T, H, VALUE] and lse [B, H, T]. With bits [B, T, num_words] a query sees the keys that it chose."""
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
    group = (head // shared).to(tl.int64)
    k += batch * k_stride_b + group * k_stride_h
    v += batch * v_stride_b + group * v_stride_h

    classes += batch * num_keys
    factor = scale_log2  # the factor from scores to exponents of 2, unless scores are changed before
    if CAPPED or HAS_RELATIONS:
        factor = 1.0
    largest = tl.full([M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([M], dtype=tl.float32)
    made = tl.zeros([M, V], dtype=tl.float32)
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
            if CAPPED:
                logits = cap_log2 * bent(logits * (scale_log2 / cap_log2), EXACT=q.dtype.element_ty == tl.float32)
            elif HAS_RELATIONS:
                logits *= scale_log2
            if HAS_RELATIONS:
                logits += added_scores(classes, relations, at, num_keys, head, num_heads)[None, :]
            if HAS_BITS:
                logits = tl.where(chosen(bits + (batch * num_queries + row) * num_words, there, key, N=N), logits, float("-inf"))
            elif phase != 1:
                seen = visible(at[None, :], position[:, None], start[:, None], window, HAS_WINDOW=HAS_WINDOW, HAS_STARTS=HAS_STARTS)
                logits = tl.where(seen, logits, float("-inf"))
            above = tl.maximum(largest, tl.max(logits, 1) * factor)
            shift = tl.where(above == float("-inf"), 0.0, above) if phase == 0 else above
            weights = tl.exp2(logits * factor - shift[:, None])
            fade = tl.exp2(largest - shift)
            total = total * fade + tl.sum(weights, 1)
            values = tl.load(v + place[:, None] * v_stride_t + value[None, :], mask=known & (value < VALUE)[None, :], other=0.0)
            made = made * fade[:, None] + dot(narrow(weights, v.dtype.element_ty), values)
            largest = above
    made /= total[:, None]
    target = out + ((batch * num_queries + row) * num_heads + head)[:, None] * VALUE + value[None, :]
    tl.store(target, narrow(made, out.dtype.element_ty), mask=there[:, None] & (value < VALUE)[None, :])
    tl.store(lse + (batch * num_heads + head) * num_queries + row, (largest + tl.log2(total)) * LN2, mask=there)
