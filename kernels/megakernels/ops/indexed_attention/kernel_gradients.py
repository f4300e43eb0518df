"""Kernels of the indexer's own gradients, a chunk of queries at a time.

`index_mass_kernel` sums the attention of all heads per key. `index_difference_kernel` makes of it the gradient of the scores, a row per
query. `index_key_kernel` and `index_query_kernel` take that to the keys, and to the queries and weights, and compute the overlaps again.

Source: arXiv:2512.02556, section 2.1: the gradient of Σ_h KL(p_h ‖ c) is H c − Σ_h p_h.
"""

import triton
import triton.language as tl

from megakernels._common.tiles import LOG2_E, dot, narrow
from megakernels.ops.attention.kernel_tiles import starts_up_to, stored
from megakernels.ops.indexed_attention.kernel_index import first_seen


@triton.jit  # type: ignore[untyped-decorator]
def index_mass_kernel(  # type: ignore[no-untyped-def]
    q, k, starts, lse, masses, num_queries, num_keys, offset, piece_first, first, num_rows, num_columns, num_heads, key_length, num_ranks,
    window, scale,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h,
    WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, R: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_STARTS: tl.constexpr, ZIG_ZAG: tl.constexpr,
):  # fmt: skip
    """Tiles of masses, fp32 [B, num_rows, num_columns]: Σ_h exp(scale · q_h · k_h − lse_h), of keys that are not chosen too.

    Tiles of which no query sees a key are not written.
    """
    first_key, first_row, batch = tl.program_id(0) * N, tl.program_id(1) * M, tl.program_id(2).to(tl.int64)
    within = first_row + tl.arange(0, M)
    there = within < num_rows
    own = offset + within
    sees = first_seen(
        first + within, starts + batch * num_queries, own, there, piece_first, window, HAS_WINDOW=HAS_WINDOW, HAS_STARTS=HAS_STARTS
    )
    begin = tl.min(tl.where(there, sees, num_keys), 0)
    if (first_key < first + tl.minimum(first_row + M, num_rows)) & (first_key + N > begin):
        at = first_key + tl.arange(0, N)
        known = (at < num_keys)[:, None]
        column = tl.arange(0, D)
        rest = D + tl.arange(0, R if R else 16)
        near_keys = k + batch * k_stride_b + stored(at, key_length, num_ranks, ZIG_ZAG=ZIG_ZAG)[:, None] * k_stride_t
        near = q + batch * q_stride_b + own.to(tl.int64)[:, None] * q_stride_t
        total = tl.zeros([M, N], dtype=tl.float32)
        for head in range(num_heads):
            of_queries = near + head * tl.cast(q_stride_h, tl.int64)
            of_keys = near_keys + head * tl.cast(k_stride_h, tl.int64)
            queries = tl.load(of_queries + column[None, :], mask=there[:, None] & (column < WIDTH)[None, :], other=0.0)
            keys = tl.load(of_keys + column[None, :], mask=known & (column < WIDTH)[None, :], other=0.0)
            logits = dot(queries, tl.trans(keys))
            if R:
                queries_rest = tl.load(of_queries + rest[None, :], mask=there[:, None] & (rest < WIDTH)[None, :], other=0.0)
                keys_rest = tl.load(of_keys + rest[None, :], mask=known & (rest < WIDTH)[None, :], other=0.0)
                logits += dot(queries_rest, tl.trans(keys_rest))
            sums = tl.load(lse + (batch * num_heads + head) * num_queries + own, mask=there, other=float("inf")).to(tl.float32)
            total += tl.exp2(logits * (scale * LOG2_E) - (sums * LOG2_E)[:, None])
        target = masses + (batch * num_rows + within)[:, None] * num_columns + at[None, :]
        tl.store(target, total, mask=there[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def index_difference_kernel(  # type: ignore[no-untyped-def]
    scores, masses, starts, index_lse, bits, num_queries, offset, piece_first, first, num_rows, num_columns, num_words, window, loss_factor,
    M: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_STARTS: tl.constexpr,
):  # fmt: skip
    """Gradient of the scores of one query, in place of the masses: loss_factor · (c · Σ mass / Σ c − mass), 0 where a key is not chosen.

    c is the softmax of the scores over the chosen keys. Σ mass is the number of heads and Σ c is one, up to the rounding of the
    log-sum-exps, which would scale whole rows. It is written wherever the gradient kernels read: for all tiles of N keys that a tile of M
    queries sees.
    """
    within, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = batch * num_queries + offset + within
    head = within // M * M
    there = tl.full([1], True, dtype=tl.int1)
    begin = first_seen(
        first + head + tl.zeros([1], dtype=tl.int32),
        starts,
        row - within + head + tl.zeros([1], dtype=tl.int32),
        there,
        piece_first,
        window,
        HAS_WINDOW=HAS_WINDOW,
        HAS_STARTS=HAS_STARTS,
    )
    low = tl.max(begin, 0) // N * N
    high = tl.cdiv(first + tl.minimum(head + M, num_rows), N) * N
    sums = tl.load(index_lse + row).to(tl.float32)
    near = (batch * num_rows + within) * num_columns
    mass = 0.0
    mean = 0.0
    for block in range(low, high, BLOCK):
        at = block + tl.arange(0, BLOCK)
        words = tl.load(bits + row * num_words + at // 32, mask=at < high, other=0)
        takes = ((words >> (at % 32)) & 1) != 0
        mass += tl.sum(tl.where(takes, tl.load(masses + near + at, mask=takes, other=0.0).to(tl.float32), 0.0), 0)
        mean += tl.sum(tl.where(takes, tl.exp(tl.load(scores + near + at, mask=takes, other=0.0).to(tl.float32) - sums), 0.0), 0)
    share = mass / mean
    for block in range(low, high, BLOCK):
        at = block + tl.arange(0, BLOCK)
        words = tl.load(bits + row * num_words + at // 32, mask=at < high, other=0)
        takes = ((words >> (at % 32)) & 1) != 0
        softmax = tl.exp(tl.load(scores + near + at, mask=takes, other=0.0).to(tl.float32) - sums)
        difference = softmax * share - tl.load(masses + near + at, mask=takes, other=0.0).to(tl.float32)
        tl.store(masses + near + at, tl.where(takes, loss_factor * difference, 0.0), mask=at < high)


@triton.jit  # type: ignore[untyped-decorator]
def index_query_kernel(  # type: ignore[no-untyped-def]
    queries, keys, weights, starts, differences, grad_weights, num_queries, num_keys, offset, piece_first, first, num_rows, num_columns,
    key_length, num_ranks, window, factor,
    WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, DTYPE: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_STARTS: tl.constexpr, ZIG_ZAG: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of rotated queries of one index head, in their place, and of their weights."""
    head, batch = tl.program_id(0), tl.program_id(2).to(tl.int64)
    num_heads = tl.num_programs(0)
    first_row = (tl.num_programs(1) - 1 - tl.program_id(1)) * M  # queries that see the most keys are processed first
    within = first_row + tl.arange(0, M)
    there = within < num_rows
    row = batch * num_queries + offset + within
    sees = first_seen(first + within, starts, row, there, piece_first, window, HAS_WINDOW=HAS_WINDOW, HAS_STARTS=HAS_STARTS)
    low = tl.min(tl.where(there, sees, num_keys), 0) // N * N
    high = first + tl.minimum(first_row + M, num_rows)
    column = tl.arange(0, D)
    own = queries + (row * num_heads + head)[:, None] * WIDTH + column[None, :]
    wanted = there[:, None] & (column < WIDTH)[None, :]
    queries_of_head = tl.load(own, mask=wanted, other=0.0)
    weight = tl.load(weights + row * num_heads + head, mask=there, other=0.0).to(tl.float32) * factor
    found = tl.zeros([M, D], dtype=tl.float32)
    of_weight = tl.zeros([M], dtype=tl.float32)
    for key in range(low, high, N):
        at = key + tl.arange(0, N)
        place = stored(at, key_length, num_ranks, ZIG_ZAG=ZIG_ZAG)
        near = keys + (batch * num_keys + place)[:, None] * WIDTH + column[None, :]
        made_keys = tl.load(near, mask=(at < num_keys)[:, None] & (column < WIDTH)[None, :], other=0.0).to(tl.float32)
        overlap = tl.maximum(dot(queries_of_head, tl.trans(made_keys)), 0.0)
        grad = tl.load(differences + (batch * num_rows + within)[:, None] * num_columns + at[None, :], mask=there[:, None], other=0.0).to(
            tl.float32
        )
        of_weight += tl.sum(grad * overlap, 1)
        grad_overlap = tl.where(overlap > 0.0, grad * weight[:, None], 0.0)
        found += dot(narrow(grad_overlap, DTYPE), narrow(made_keys, DTYPE))
    tl.store(own, found, mask=wanted)
    tl.store(grad_weights + row * num_heads + head, narrow(of_weight * factor, grad_weights.dtype.element_ty), mask=there)


@triton.jit  # type: ignore[untyped-decorator]
def index_key_kernel(  # type: ignore[no-untyped-def]
    queries, keys, weights, starts, differences, grad_keys, num_queries, num_keys, offset, piece_first, first, num_rows, num_columns,
    num_heads, key_length, num_ranks, window, factor,
    WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, DTYPE: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_STARTS: tl.constexpr, ZIG_ZAG: tl.constexpr,
):  # fmt: skip
    """Adds the part of the chunk's queries, over all index heads, to a tile of the keys' gradient."""
    batch = tl.program_id(1).to(tl.int64)
    first_key = tl.program_id(0) * N  # keys that the most queries see are processed first
    at = first_key + tl.arange(0, N)
    column = tl.arange(0, D)
    place = stored(at, key_length, num_ranks, ZIG_ZAG=ZIG_ZAG)
    wanted = (at < num_keys)[:, None] & (column < WIDTH)[None, :]
    offsets = (batch * num_keys + place)[:, None] * WIDTH + column[None, :]
    made_keys = tl.load(keys + offsets, mask=wanted, other=0.0)
    last_key = tl.minimum(first_key + N, num_keys) - 1
    low = tl.maximum(first_key - first, 0) // M * M
    high = num_rows
    if HAS_WINDOW:
        high = tl.minimum(high, tl.maximum(last_key + window - first, 0))
    if HAS_STARTS:
        high = tl.minimum(high, starts_up_to(starts + batch * num_queries + offset, last_key - piece_first, num_rows))
    steps = tl.cdiv(tl.maximum(high - low, 0), M)
    found = tl.load(grad_keys + offsets, mask=wanted, other=0.0).to(tl.float32)
    for step in range(steps * num_heads):
        head = step % num_heads
        within = low + (step // num_heads) * M + tl.arange(0, M)
        there = within < num_rows
        row = batch * num_queries + offset + within
        own = queries + (row * num_heads + head)[:, None] * WIDTH + column[None, :]
        queries_of_head = tl.load(own, mask=there[:, None] & (column < WIDTH)[None, :], other=0.0).to(tl.float32)
        overlap = dot(made_keys, tl.trans(queries_of_head))
        grad = tl.load(differences + (batch * num_rows + within)[None, :] * num_columns + at[:, None], mask=there[None, :], other=0.0).to(
            tl.float32
        )
        weight = tl.load(weights + row * num_heads + head, mask=there, other=0.0).to(tl.float32) * factor
        grad_overlap = tl.where(overlap > 0.0, grad * weight[None, :], 0.0)
        found += dot(narrow(grad_overlap, DTYPE), narrow(queries_of_head, DTYPE))
    tl.store(grad_keys + offsets, found, mask=wanted)
