"""Kernels of the indexer: its keys and queries, index scores, and the keys that a query chooses.

Index scores are fp32 products of three TF32 ones, as near the reference's as fp32 allows: a relu's side and the order of scores follow from
them. Forward and backward run the same kernel on the same rows, so that scores compare with a saved threshold as in the forward.
"""

import triton
import triton.language as tl

from megakernels._common.tiles import dot, narrow
from megakernels.ops.attention.kernel_tiles import stored

FIRST_BIT = tl.constexpr(-2147483648)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def angles(cos, sin, row, column, wanted, half, angle_stride_t, angle_stride_c):  # type: ignore[no-untyped-def]
    """Cosines and sines [R, D] of the angles in these rows of cos and sin; 1 and 0 for columns that are not rotated."""
    rotated = wanted & (column < 2 * half)[None, :]
    place = row[:, None] * angle_stride_t + (tl.where(column < half, column, column - half) * angle_stride_c)[None, :]
    cosine = tl.load(cos + place, mask=rotated, other=1.0).to(tl.float32)
    return cosine, tl.load(sin + place, mask=rotated, other=0.0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def turned(  # type: ignore[no-untyped-def]
    x, row, column, angle_row, cos, sin, there, half, angle_stride_t, angle_stride_c, WIDTH: tl.constexpr, BACK: tl.constexpr
):
    """Rows of x [_, WIDTH] in fp32 with the first 2 · half columns rotated, half-split; by the opposite angle if BACK.

    Args:
        x: Pointer to the rows.
        row: Numbers of the rows that are read [R].
        column: Columns [D].
        angle_row: Rows of cos and sin [R].
        cos: fp32 [_, half].
        sin: The same.
        there: Mask of the rows that exist.
        half: Half of the rotated columns.
        angle_stride_t: Strides of cos and sin.
        angle_stride_c: The same.
        WIDTH: Columns of a row.
        BACK: True to turn back.
    """
    wanted = there[:, None] & (column < WIDTH)[None, :]
    near = x + row[:, None] * WIDTH
    plain = tl.load(near + column[None, :], mask=wanted, other=0.0).to(tl.float32)
    rotated = column < 2 * half
    other = tl.where(column < half, column + half, column - half)
    partner = tl.load(near + other[None, :], mask=wanted & rotated[None, :], other=0.0).to(tl.float32)
    cosine, sine = angles(cos, sin, angle_row, column, wanted, half, angle_stride_t, angle_stride_c)
    sign = tl.where((column < half) != BACK, -1.0, 1.0)
    return plain * cosine + partner * sine * sign[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def index_turn_kernel(  # type: ignore[no-untyped-def]
    x, cos, sin, turned_x, num_rows, num_positions, num_heads, half,
    angle_stride_t, angle_stride_c,
    WIDTH: tl.constexpr, R: tl.constexpr, D: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """X [B, T, I, WIDTH] rotated by the angles of its positions, in the dtype of `turned_x`."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    column = tl.arange(0, D)
    there = row < num_rows
    position = (row // num_heads) % num_positions
    found = turned(x, row, column, position, cos, sin, there, half, angle_stride_t, angle_stride_c, WIDTH=WIDTH, BACK=BACK)
    target = turned_x + row[:, None] * WIDTH + column[None, :]
    tl.store(target, narrow(found, turned_x.dtype.element_ty), mask=there[:, None] & (column < WIDTH)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def normed(x, row, column, there, eps, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Mean and 1 / σ [R, 1] of rows of x [_, WIDTH]."""
    wanted = there[:, None] & (column < WIDTH)[None, :]
    plain = tl.load(x + row[:, None] * WIDTH + column[None, :], mask=wanted, other=0.0).to(tl.float32)
    mean = tl.sum(plain, 1) / WIDTH
    centred = tl.where(wanted, plain - mean[:, None], 0.0)
    return mean[:, None], 1.0 / tl.sqrt_rn(tl.sum(centred * centred, 1) / WIDTH + eps)[:, None]


@triton.jit  # type: ignore[untyped-decorator]
def index_keys_kernel(  # type: ignore[no-untyped-def]
    x, scale, bias, cos, sin, keys, num_rows, num_positions, half,
    angle_stride_t, angle_stride_c,
    eps,
    WIDTH: tl.constexpr, R: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Keys, fp32 [B, T, WIDTH]: the layer norm of x, rotated by the angles of its positions."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    column = tl.arange(0, D)
    there = row < num_rows
    mean, rstd = normed(x, row, column, there, eps, WIDTH=WIDTH)
    rotated = column < 2 * half
    other = tl.where(column < half, column + half, tl.where(rotated, column - half, column))
    wanted = there[:, None] & (column < WIDTH)[None, :]
    known, paired = column < WIDTH, (column < WIDTH) & rotated
    near = x + row[:, None] * WIDTH
    plain = tl.load(near + column[None, :], mask=wanted, other=0.0).to(tl.float32)
    plain = (plain - mean) * rstd * tl.load(scale + column, mask=known, other=0.0).to(tl.float32)[None, :]
    plain += tl.load(bias + column, mask=known, other=0.0).to(tl.float32)[None, :]
    partner = tl.load(near + other[None, :], mask=wanted & rotated[None, :], other=0.0).to(tl.float32)
    partner = (partner - mean) * rstd * tl.load(scale + other, mask=paired, other=0.0).to(tl.float32)[None, :]
    partner += tl.load(bias + other, mask=paired, other=0.0).to(tl.float32)[None, :]
    cosine, sine = angles(cos, sin, row % num_positions, column, wanted, half, angle_stride_t, angle_stride_c)
    found = plain * cosine + partner * sine * tl.where(column < half, -1.0, 1.0)[None, :]
    tl.store(keys + row[:, None] * WIDTH + column[None, :], found, mask=wanted)


@triton.jit  # type: ignore[untyped-decorator]
def index_keys_backward_kernel(  # type: ignore[no-untyped-def]
    grad_keys, x, scale, cos, sin, grad_x, parts, num_rows, num_positions, half,
    angle_stride_t, angle_stride_c,
    eps,
    WIDTH: tl.constexpr, R: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Gradient of x; the program's parts of those of scale and bias, fp32 [2, programs, WIDTH]."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, D)
    known = column < WIDTH
    scales = tl.load(scale + column, mask=known, other=0.0).to(tl.float32)[None, :]
    of_scale = tl.zeros([D], dtype=tl.float32)
    of_bias = tl.zeros([D], dtype=tl.float32)
    for block in range(program, tl.cdiv(num_rows, R), programs):
        row = tl.cast(block, tl.int64) * R + tl.arange(0, R)
        there = row < num_rows
        wanted = there[:, None] & known[None, :]
        mean, rstd = normed(x, row, column, there, eps, WIDTH=WIDTH)
        plain = tl.load(x + row[:, None] * WIDTH + column[None, :], mask=wanted, other=0.0).to(tl.float32)
        made = tl.where(wanted, (plain - mean) * rstd, 0.0)
        grad = turned(
            grad_keys, row, column, row % num_positions, cos, sin, there, half, angle_stride_t, angle_stride_c, WIDTH=WIDTH, BACK=True
        )
        of_scale += tl.sum(grad * made, 0)
        of_bias += tl.sum(grad, 0)
        scaled = grad * scales
        along = tl.sum(scaled * made, 1)[:, None] / WIDTH
        found = rstd * (scaled - tl.sum(scaled, 1)[:, None] / WIDTH - made * along)
        tl.store(grad_x + row[:, None] * WIDTH + column[None, :], narrow(found, grad_x.dtype.element_ty), mask=wanted)
    tl.store(parts + program * WIDTH + column, of_scale, mask=known)
    tl.store(parts + (programs + program) * WIDTH + column, of_bias, mask=known)


@triton.jit  # type: ignore[untyped-decorator]
def first_seen(  # type: ignore[no-untyped-def]
    position, starts, row, there, piece_first, window, HAS_WINDOW: tl.constexpr, HAS_STARTS: tl.constexpr
):
    """The first key that each query sees; document starts are counted from the first position of the queries' piece."""
    begin = tl.zeros_like(position)
    if HAS_STARTS:
        begin = tl.maximum(piece_first + tl.load(starts + row, mask=there, other=0), 0)
    if HAS_WINDOW:
        begin = tl.maximum(begin, position - window + 1)
    return begin


@triton.jit  # type: ignore[untyped-decorator]
def index_score_kernel(  # type: ignore[no-untyped-def]
    queries, keys, weights, starts, scores, num_queries, num_keys, offset, piece_first, first, num_rows, num_columns, num_heads, key_length,
    num_ranks, window, factor,
    WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, R: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_STARTS: tl.constexpr, ZIG_ZAG: tl.constexpr,
):  # fmt: skip
    """Tiles of scores, fp32 [B, num_rows, num_columns], of the queries from row `offset` on, at position `first`: Σ_i w_i relu(a_i · b).

    Tiles of which no query sees a key are not written.
    """
    first_key, first_row, batch = tl.program_id(0) * N, tl.program_id(1) * M, tl.program_id(2).to(tl.int64)
    within = first_row + tl.arange(0, M)
    there = within < num_rows
    row = batch * num_queries + offset + within
    sees = first_seen(first + within, starts, row, there, piece_first, window, HAS_WINDOW=HAS_WINDOW, HAS_STARTS=HAS_STARTS)
    begin = tl.min(tl.where(there, sees, num_keys), 0)
    if (first_key < first + tl.minimum(first_row + M, num_rows)) & (first_key + N > begin):
        at = first_key + tl.arange(0, N)
        column = tl.arange(0, D)
        rest = D + tl.arange(0, R if R else 16)
        near_keys = keys + (batch * num_keys + stored(at, key_length, num_ranks, ZIG_ZAG=ZIG_ZAG))[:, None] * WIDTH
        known = (at < num_keys)[:, None]
        made_keys = tl.load(near_keys + column[None, :], mask=known & (column < WIDTH)[None, :], other=0.0)
        if R:
            made_rest = tl.load(near_keys + rest[None, :], mask=known & (rest < WIDTH)[None, :], other=0.0)
        total = tl.zeros([M, N], dtype=tl.float32)
        for head in range(num_heads):
            near = queries + (row * num_heads + head)[:, None] * WIDTH
            queries_of_head = tl.load(near + column[None, :], mask=there[:, None] & (column < WIDTH)[None, :], other=0.0)
            overlap = dot(queries_of_head, tl.trans(made_keys))
            if R:
                queries_rest = tl.load(near + rest[None, :], mask=there[:, None] & (rest < WIDTH)[None, :], other=0.0)
                overlap += dot(queries_rest, tl.trans(made_rest))
            weight = tl.load(weights + row * num_heads + head, mask=there, other=0.0).to(tl.float32) * factor
            total += tl.maximum(overlap, 0.0) * weight[:, None]
        target = scores + (batch * num_rows + within)[:, None] * num_columns + at[None, :]
        tl.store(target, total, mask=there[:, None])


@triton.jit
def ordered(scores, seen):  # type: ignore[no-untyped-def]
    """Scores as int32 of the same order; less than any of them where a key is not seen."""
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)
    return tl.where(seen, bits ^ ((bits >> 31) & MAGNITUDE), FIRST_BIT)


@triton.jit  # type: ignore[untyped-decorator]
def index_select_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0915  branches are of the compiler's
    scores, starts, thresholds, index_lse, bits, num_queries, offset, piece_first, first, num_rows, num_columns, num_words, window, top_k,
    R: tl.constexpr, BLOCK: tl.constexpr, DIGIT: tl.constexpr, HELD: tl.constexpr, SEARCH: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_STARTS: tl.constexpr,
):  # fmt: skip
    """Bits of the top_k keys of largest score, of equal ones those that come first; R queries.

    With SEARCH it finds and stores the thresholds, from the highest to the lowest digit of the ordered scores, and the log-sum-exps of the
    scores of the chosen keys. A row is HELD where one block has all its keys.
    """
    within = tl.program_id(0) * R + tl.arange(0, R)
    batch = tl.program_id(1).to(tl.int64)
    there = within < num_rows
    position = first + within
    row = batch * num_queries + offset + within
    begin = first_seen(position, starts, row, there, piece_first, window, HAS_WINDOW=HAS_WINDOW, HAS_STARTS=HAS_STARTS)
    low = tl.min(tl.where(there, begin, num_columns), 0) // 128 * 128
    high = tl.minimum(tl.max(tl.where(there, position, 0), 0) + 1, num_columns)
    near = scores + (batch * num_rows + within)[:, None] * num_columns
    lane = tl.arange(0, BLOCK)
    at = low + lane
    seen = (there[:, None] & (at[None, :] >= begin[:, None])) & (at[None, :] <= position[:, None])
    held = tl.load(near + at[None, :], mask=seen, other=0.0).to(tl.float32)
    place = ordered(held, seen)
    if SEARCH:
        found = tl.full([R], FIRST_BIT, dtype=tl.int32)  # the search compares scores in an ordered encoding without its first bit
        for step in range(32 // DIGIT):
            shift = 32 - DIGIT * (step + 1)
            digit = tl.zeros([R], dtype=tl.int32)
            for number in tl.static_range(1, 1 << DIGIT):
                candidate = found + (tl.full([R], number, dtype=tl.int32) << shift)
                count = tl.zeros([R], dtype=tl.int32)
                if HELD:
                    count += tl.sum((place >= candidate[:, None]).to(tl.int32), 1)
                else:
                    for block in range(low, high, BLOCK):
                        here = block + lane
                        sees = (there[:, None] & (here[None, :] >= begin[:, None])) & (here[None, :] <= position[:, None])
                        others = ordered(tl.load(near + here[None, :], mask=sees, other=0.0).to(tl.float32), sees)
                        count += tl.sum((others >= candidate[:, None]).to(tl.int32), 1)
                digit += (count >= top_k).to(tl.int32)
            found += digit << shift
        threshold = tl.where(found == FIRST_BIT, float("-inf"), (found ^ ((found >> 31) & MAGNITUDE)).to(tl.float32, bitcast=True))
        tl.store(thresholds + row, threshold, mask=there)
    else:
        threshold = tl.load(thresholds + row, mask=there, other=0.0).to(tl.float32)
    above = tl.zeros([R], dtype=tl.int32)
    largest = tl.full([R], float("-inf"), dtype=tl.float32)
    for block in range(low, high, BLOCK):
        here = block + lane
        sees = (there[:, None] & (here[None, :] >= begin[:, None])) & (here[None, :] <= position[:, None])
        values = held if HELD else tl.load(near + here[None, :], mask=sees, other=0.0).to(tl.float32)
        above += tl.sum((sees & (values > threshold[:, None])).to(tl.int32), 1)
        largest = tl.maximum(largest, tl.max(tl.where(sees, values, float("-inf")), 1))
    wanted = top_k - above
    equals = tl.zeros([R], dtype=tl.int32)
    total = tl.zeros([R], dtype=tl.float32)
    largest = tl.where(there, largest, 0.0)
    for block in range(low, high, BLOCK):
        here = block + lane
        sees = (there[:, None] & (here[None, :] >= begin[:, None])) & (here[None, :] <= position[:, None])
        values = held if HELD else tl.load(near + here[None, :], mask=sees, other=0.0).to(tl.float32)
        equal = (sees & (values == threshold[:, None])).to(tl.int32)
        rank = equals[:, None] + tl.cumsum(equal, 1)
        takes = (sees & (values > threshold[:, None])) | ((equal != 0) & (rank <= wanted[:, None]))
        equals += tl.sum(equal, 1)
        total += tl.sum(tl.where(takes, tl.exp(values - largest[:, None]), 0.0), 1)
        lanes = tl.reshape(takes.to(tl.int32), [R, BLOCK // 32, 32]) << tl.arange(0, 32)[None, None, :]
        words = block // 32 + tl.arange(0, BLOCK // 32)
        target = bits + row[:, None] * num_words + words[None, :]
        tl.store(target, tl.sum(lanes, 2).to(tl.int32), mask=there[:, None] & (words < num_words)[None, :])
    if SEARCH:
        tl.store(index_lse + row, largest + tl.log(total), mask=there)
