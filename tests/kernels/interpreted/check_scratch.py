"""Scratch bytes of operations with kernels, compared with their stated ones: allocations are counted, kernels do not run."""

import math
from typing import Any

import pytest
import torch
from scratch_checks import BF16, DTYPES, FP32, PACKED, check, make_idle, starts_of
from torch import Tensor

from megakernels import scratch_bytes, use_kernels
from megakernels.ops.attention import facts as attention_facts
from megakernels.ops.attention import op as attention_op
from megakernels.ops.attention import pieces as attention_pieces
from megakernels.ops.attention.stored import facts as stored_facts
from megakernels.ops.indexed_attention import facts as indexed_sizes
from megakernels.ops.indexed_attention import op as indexed_op
from megakernels.ops.indexed_attention import pieces as indexed_pieces
from megakernels.ops.m2rnn import facts as m2rnn_sizes
from megakernels.ops.m2rnn import op as m2rnn_op
from megakernels.ops.m2rnn import piece as m2rnn_piece
from megakernels.ops.ssd import op as ssd_op
from megakernels.ops.ssd import piece as ssd_piece

NO_LIMITS = 0.0, math.inf
"""Limits of Mamba-2's steps."""


@pytest.fixture(autouse=True)
def _idle(monkeypatch: pytest.MonkeyPatch) -> None:
    make_idle(monkeypatch)


def ssd_inputs(shape: tuple[int, ...], dtypes: tuple[torch.dtype, torch.dtype]) -> list[Tensor]:
    """Parts of wider rows, as a block's split has them."""
    (batch, num_positions, heads, width, groups, state), (dtype, of_parameters) = shape, dtypes
    rows = torch.empty(batch, num_positions, heads * width + 2 * groups * state + heads, dtype=dtype)
    x, B, C, dt = rows.split((heads * width, groups * state, groups * state, heads), 2)
    x, B, C = x.unflatten(2, (heads, width)), B.unflatten(2, (groups, state)), C.unflatten(2, (groups, state))
    A_log, D, dt_bias = (torch.empty(heads, dtype=of_parameters) for _ in range(3))
    return [x, dt, A_log, B, C, D, dt_bias]


ATTENTION = [(2, 50, 4, 2, 16, 16), (1, 7, 3, 3, 5, 7), (2, 40, 8, 1, 200, 128), (1, 1, 1, 1, 1, 1)]
EACH_ATTENTION = pytest.mark.parametrize("shape", ATTENTION, ids=str)


NEITHER = None, None, None
"""No sinks, no classes, no relations."""
UNCAPPED = None, True
"""No cap, and causal."""


def attention_inputs(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """Parts of a wider projection."""
    batch, num_positions, heads, groups, width, value_width = shape
    parts = heads * width, groups * width, groups * value_width
    q, k, v = torch.empty(batch, num_positions, sum(parts), dtype=dtype).split(parts, 2)
    return [q.unflatten(2, (heads, width)), k.unflatten(2, (groups, width)), v.unflatten(2, (groups, value_width))]


@PACKED
@EACH_ATTENTION
def test_attention(shape: tuple[int, ...], packed: bool) -> None:
    """Backward one number per query and head, and the gradients that are not needed."""
    batch, num_positions, heads, _, _, value_width = shape
    inputs, starts = attention_inputs(shape, BF16), starts_of(batch, num_positions, packed)
    assert check(attention_op._attention, *inputs, starts, 0.3, 9, *NEITHER, *UNCAPPED) == 0
    out, lse = torch.empty(batch, num_positions, heads, value_width, dtype=BF16), torch.empty(batch, heads, num_positions)
    behind = out, *inputs, starts, *NEITHER, out, lse, 0.3, None, *UNCAPPED
    delta = 4 * batch * heads * num_positions
    assert check(attention_op._attention_backward, *behind, [*[True] * 3, False, False]) == delta
    assert check(attention_op._attention_backward, *behind, [True, False, True, False, False]) == delta + inputs[1].nbytes


@PACKED
@pytest.mark.parametrize(("widths", "cap"), [((200, 128), None), ((24, 16), 2.0)], ids=str)
@pytest.mark.parametrize("parts", [1, 2, 100])
def test_attention_that_stores_scores(
    widths: tuple[int, int], cap: float | None, parts: int, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Backward also the tiles of the part of the batch that is made at once; a window leaves fewer, and sinks need no more."""
    inputs, starts = attention_inputs((2, 520, 4, 2, *widths), BF16), starts_of(2, 520, packed)
    out, lse = torch.empty(2, 520, 4, widths[1], dtype=BF16), torch.empty(2, 4, 520)
    for window, tiles in ((None, 15), (129, 10)):
        each = 2 * 2 * tiles * 128**2 * 2
        monkeypatch.setattr(stored_facts, "STORED_BYTES", parts * each)
        for sinks in (None, torch.empty(4)):
            behind = out, *inputs, starts, sinks, None, None, out, lse, 0.3, window, cap, True
            found = check(attention_op._attention_backward, *behind, [*[True] * 3, sinks is not None, False])
            assert found == 4 * 2 * 4 * 520 + min(parts, 4) * each - 4 * 4 * (sinks is not None)


@PACKED
@EACH_ATTENTION
@pytest.mark.parametrize("cap", [None, 2.0])
def test_attention_with_relations(shape: tuple[int, ...], cap: float | None, packed: bool) -> None:
    """Backward also one number per key and head; sinks need no more than that."""
    batch, num_positions, heads, _, width, value_width = shape
    if cap is not None and max(width, value_width) > attention_facts.BENT_WIDTH:
        return
    inputs, starts = attention_inputs(shape, BF16), starts_of(batch, num_positions, packed)
    bias = torch.empty(batch, 2 * num_positions, dtype=torch.int32)[:, ::2], torch.empty(heads, 3, dtype=BF16).T
    copied = 4 * batch * num_positions + 6 * heads
    added = copied if num_positions * batch > 1 and heads > 1 else None
    found = check(attention_op._attention, *inputs, starts, 0.3, 9, None, *bias, cap, True)
    assert added is None or found == added
    out, lse = torch.empty(batch, num_positions, heads, value_width, dtype=BF16), torch.empty(batch, heads, num_positions)
    for sinks in (None, torch.empty(heads)):
        behind = out, *inputs, starts, sinks, *bias, out, lse, 0.3, None, cap, True
        found = check(attention_op._attention_backward, *behind, [*[True] * 3, sinks is not None, True])
        assert sinks is not None or added is None or found == 8 * batch * heads * num_positions + added
        check(attention_op._attention_backward, *behind, [True, False, True, sinks is not None, False])


@PACKED
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_pieces_of_attention(num_ranks: int, packed: bool) -> None:
    """All ranks' keys are read in place, without reordering."""
    q, k, v = attention_inputs((2, 10, 4, 2, 24, 9), BF16)
    k, v = (each.repeat(1, num_ranks, 1, 1) for each in (k, v))
    stored = [piece for rank in range(num_ranks) for piece in (rank, 2 * num_ranks - 1 - rank)]
    starts, pieces = starts_of(2, 10, packed), (stored[-2:], stored)
    assert check(attention_pieces._pieces, q, k, v, starts, 0.3, None, *NEITHER, *UNCAPPED, *pieces) == 0
    out, lse = torch.empty(2, 10, 4, 9, dtype=BF16), torch.empty(2, 4, 10)
    behind = out, q, k, v, starts, *NEITHER, out, lse, 0.3, None, *UNCAPPED
    assert check(attention_pieces._pieces_backward, *behind, *pieces) == 4 * 2 * 4 * 10
    bias = torch.empty(2, 10 * num_ranks, dtype=torch.int32), torch.empty(3, 4, dtype=BF16)
    behind = out, q, k, v, starts, None, *bias, out, lse, 0.3, None, 2.0, True
    assert check(attention_pieces._pieces_backward, *behind, *pieces) == 4 * 2 * 4 * 10 * (1 + num_ranks)


INDEXED = [(2, 50, 4, 16, 16, 3, 8), (1, 7, 3, 5, 7, 1, 17), (2, 40, 8, 200, 128, 2, 64), (1, 1, 1, 1, 1, 1, 1), (1, 3, 1, 1, 1, 64, 128)]


def indexed_inputs(shape: tuple[int, ...], dtypes: tuple[torch.dtype, torch.dtype], keys: int = 1) -> list[Tensor]:
    """Inputs of indexed attention, with `keys` keys for each query."""
    (batch, num_positions, heads, width, value_width, index_heads, index_width), (dtype, of_parameters) = shape, dtypes
    rows, tokens = (batch, keys * num_positions, heads), (batch, num_positions)
    q, k, v = torch.empty(*tokens, heads, width), torch.empty(*rows, width), torch.empty(*rows, value_width)
    index = torch.empty(*tokens, index_heads, index_width), torch.empty(*tokens, index_width), torch.empty(*tokens, index_heads)
    norm = (torch.empty(index_width, dtype=of_parameters) for _ in range(2))
    table = (torch.ones(1, 1).expand(num_positions, index_width // 2) for _ in range(2))
    return [*(each.to(dtype) for each in (q, k, v, *index)), *norm, *table]


@PACKED
@DTYPES
@pytest.mark.parametrize("shape", INDEXED, ids=str)
@pytest.mark.parametrize("elements", [indexed_sizes.INDEX_CHUNK_ELEMENTS, 1])
def test_indexed_attention(shape: tuple[int, ...], dtypes: Any, packed: bool, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed_sizes, "INDEX_CHUNK_ELEMENTS", elements)
    batch, num_positions, heads, width, value_width, *_ = shape
    if dtypes[0] == FP32 and max(width, value_width) > 64:
        return
    inputs, starts, numbers = indexed_inputs(shape, dtypes), starts_of(batch, num_positions, packed), (0.3, 4, 1.0, 1e-5, None)
    made = [torch.empty(batch, num_positions, heads, value_width, dtype=dtypes[0]), torch.empty(batch, heads, num_positions)]
    made += [torch.empty(batch, num_positions) for _ in range(2)]
    for sinks in (None, torch.empty(heads)):
        assert check(indexed_op._indexed_attention, *inputs, starts, *numbers, sinks)
        for needs in ([True] * 9, [True, False, True, False, True, True, False, True, True]):
            assert check(indexed_op._indexed_attention_backward, made[0].clone(), *inputs, starts, sinks, *made, *numbers, needs)


@PACKED
@pytest.mark.parametrize("shape", INDEXED[:3], ids=str)
def test_pieces_of_indexed_attention(shape: tuple[int, ...], packed: bool) -> None:
    """Two pieces of queries against four of keys."""
    batch, num_positions, heads, _, value_width, _, index_width = shape
    shape = (batch, 2 * num_positions, *shape[2:])
    q, k, v, index_q, index_k, weights, scale, _, *table = indexed_inputs(shape, (BF16, BF16), 2)
    starts, keys = starts_of(batch, 2 * num_positions, packed), torch.empty(batch, 4 * num_positions, index_width)
    given, numbers, pieces = (q, k, v, index_q, keys, weights, *table, starts), (0.3, 4, 1.0, None), ([0, 3], [0, 3, 1, 2])
    out, lse = torch.empty(batch, 2 * num_positions, heads, value_width, dtype=BF16), torch.empty(batch, heads, 2 * num_positions)
    made = out, lse, *(torch.empty(batch, 2 * num_positions) for _ in range(2))
    for sinks in (None, torch.empty(heads)):
        assert check(indexed_pieces._pieces, *given, *numbers, sinks, *pieces)
        assert check(indexed_pieces._pieces_backward, out.clone(), *given, sinks, *made, *numbers, *pieces)
    assert check(indexed_pieces._index_keys, index_k, scale, scale, *table, 1e-5) == 0
    assert check(indexed_pieces._index_keys_backward, index_k.float(), index_k, scale, *table, 1e-5)


SSD = [
    ((2, 50, 4, 16, 2, 16), 16),
    ((1, 7, 3, 5, 1, 7), 3),
    ((3, 130, 2, 32, 2, 9), 200),
    ((2, 40, 8, 20, 1, 1), 1),
    ((2, 1, 64, 1, 64, 1), 1),
    ((1, 1, 64, 1, 1, 1), 1),
    ((1, 70, 120, 3, 1, 32), 64),
]
EACH_SSD = pytest.mark.parametrize(("shape", "chunk_size"), SSD, ids=str)


@PACKED
@DTYPES
@EACH_SSD
def test_scan(shape: tuple[int, ...], chunk_size: int, dtypes: Any, packed: bool) -> None:
    batch, num_positions, heads, width, _, state = shape
    inputs, starts = ssd_inputs(shape, dtypes), starts_of(batch, num_positions, packed)
    check(ssd_op._ssd, *inputs, starts, chunk_size, *NO_LIMITS)
    states = torch.empty(batch, -(-num_positions // chunk_size), heads, width, state, dtype=dtypes[0])
    for needs in ([True] * 7, [False, True, True, False, True, False, True]):
        assert check(ssd_op._ssd_backward, torch.empty_like(inputs[0]), *inputs, starts, states, chunk_size, *NO_LIMITS, needs)


@pytest.mark.parametrize("width", [65, 100, 128])
@pytest.mark.parametrize("groups", [1, 40])
def test_scan_of_wide_heads(width: int, groups: int) -> None:
    """Heads in two blocks of columns: with few groups the parts of dt's gradient are the peak."""
    inputs = ssd_inputs((1, 70, 40, width, groups, 2), (BF16, BF16))
    states = torch.empty(1, 2, 40, width, 2, dtype=BF16)
    check(ssd_op._ssd_backward, torch.empty_like(inputs[0]), *inputs, None, states, 64, *NO_LIMITS, [True] * 7)


@PACKED
@EACH_SSD
@pytest.mark.parametrize("whole", [False, True], ids=["one lane", "all lanes"])
def test_piece_of_a_scan(shape: tuple[int, ...], chunk_size: int, packed: bool, whole: bool) -> None:
    """Half of the positions and, of tensors with heads, parts: views as `megarun.parallel.groups.relay` cuts them."""
    batch, num_positions, heads, width, groups, state = shape
    wide = (batch, 2 * num_positions, heads * (1 if whole else 2), width, groups * (1 if whole else 2), state)
    rows, heads_of, groups_of = slice(num_positions, None), slice(0, heads), slice(0, groups)
    x, dt, A_log, B, C, D, dt_bias = ssd_inputs(wide, (BF16, BF16))
    inputs = [x[:, rows, heads_of], dt[:, rows, heads_of], A_log[heads_of], B[:, rows, groups_of], C[:, rows, groups_of]]
    inputs += [D[heads_of], dt_bias[heads_of]]
    starts = starts_of(batch, 2 * num_positions, packed)
    starts = None if starts is None else starts[:, rows]
    num_chunks = -(-num_positions // chunk_size)
    states = torch.empty(batch, 2 * num_chunks, wide[2], width, state, dtype=BF16)[:, num_chunks:, heads_of]
    y, first = torch.empty(x.shape, dtype=BF16)[:, rows, heads_of], torch.empty(batch, heads, width, state)
    check(ssd_piece._piece, first, *inputs, starts, chunk_size, *NO_LIMITS, y, states)
    totals = [torch.zeros(each.shape, dtype=FP32 if each.dim() == 1 else BF16) for each in inputs]
    check(ssd_piece._piece_backward, first, y, *inputs, starts, states, chunk_size, *NO_LIMITS, *totals)


def m2rnn_inputs(shape: tuple[int, ...], dtypes: tuple[torch.dtype, torch.dtype]) -> list[Tensor]:
    (batch, num_positions, heads, keys, values), (dtype, of_parameters) = shape, dtypes
    q, k = torch.empty(batch, num_positions, 2 * keys, dtype=dtype).chunk(2, 2)
    v = torch.empty(batch, num_positions, heads, values, dtype=dtype)
    f = torch.empty(batch, num_positions, heads, dtype=dtype)
    parameters = ((heads, values, values), (heads, values), (heads,), (heads,))
    return [q, k, v, f, *(torch.empty(each, dtype=of_parameters) for each in parameters)]


M2RNN = [
    ((2, 50, 4, 16, 16), 16),
    ((1, 7, 3, 5, 6), 3),
    ((3, 33, 2, 100, 9), 64),
    ((2, 3, 40, 1, 16), 1),
    ((2, 2, 5, 1, 1), 1),
    ((5, 1, 7, 1, 2), 2),
]
EACH_M2RNN = pytest.mark.parametrize(("shape", "save_every"), M2RNN, ids=str)
SPANS = pytest.mark.parametrize("span_bytes", [m2rnn_sizes.SPAN_BYTES, 60_000, 1])


@PACKED
@DTYPES
@SPANS
@EACH_M2RNN
def test_recurrence(
    shape: tuple[int, ...], save_every: int, dtypes: Any, packed: bool, span_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(m2rnn_sizes, "SPAN_BYTES", span_bytes)
    batch, num_positions, heads, keys, values = shape
    inputs, starts = m2rnn_inputs(shape, dtypes), starts_of(batch, num_positions, packed)
    assert check(m2rnn_op._m2rnn, *inputs, starts, save_every) == 0
    states = torch.empty(batch, -(-num_positions // save_every) + 1, heads, keys, values)
    for needs in ([True] * 8, [False, True, True, False, True, False, True, False]):
        assert check(m2rnn_op._m2rnn_backward, torch.empty_like(inputs[2]), *inputs, starts, states, save_every, needs)


@PACKED
@EACH_M2RNN
@pytest.mark.parametrize("whole", [False, True], ids=["one lane", "all lanes"])
def test_piece_of_a_recurrence(shape: tuple[int, ...], save_every: int, packed: bool, whole: bool) -> None:
    batch, num_positions, heads, keys, values = shape
    q, k, v, f, *parameters = m2rnn_inputs((batch, 2 * num_positions, heads * (1 if whole else 2), keys, values), (BF16, BF16))
    rows, heads_of = slice(num_positions, None), slice(0, heads)
    inputs = [q[:, rows], k[:, rows], v[:, rows, heads_of], f[:, rows, heads_of], *(each[heads_of] for each in parameters)]
    starts = starts_of(batch, 2 * num_positions, packed)
    starts = None if starts is None else starts[:, rows]
    count = -(-num_positions // save_every) + 1
    states = torch.empty(batch, 2 * count, v.shape[2], keys, values)[:, count:, heads_of]
    y, first = torch.empty_like(v)[:, rows, heads_of], torch.empty(batch, heads, keys, values)
    check(m2rnn_piece._piece, first, *inputs, starts, save_every, y, states)
    totals = [torch.zeros(each.shape, dtype=FP32 if index > 3 else BF16) for index, each in enumerate(inputs)]
    check(m2rnn_piece._piece_backward, first, y, *inputs, starts, states, save_every, *totals)


def test_copies_of_operands_are_counted() -> None:
    """Rows whose last dim is not dense, a gradient that is one number everywhere, and states and parameters that are not contiguous."""
    inputs = ssd_inputs((2, 9, 4, 6, 2, 5), (BF16, BF16))
    inputs[0], inputs[2] = inputs[0].transpose(1, 3).contiguous().transpose(1, 3), inputs[2].repeat(2)[::2]
    grad, states = torch.empty((), dtype=BF16).expand(2, 9, 4, 6), torch.empty(2, 2, 4, 5, 6, dtype=BF16).mT
    check(ssd_op._ssd, *inputs, None, 8, *NO_LIMITS)
    check(ssd_op._ssd_backward, grad, *inputs, None, states, 8, *NO_LIMITS, [True] * 7)
    inputs, first = ssd_inputs((1, 1, 2, 16, 1, 16), (BF16, BF16)), torch.empty(1, 2, 16, 16)
    totals, states = [torch.zeros_like(each, dtype=FP32 if each.dim() == 1 else BF16) for each in inputs], torch.empty(1, 1, 2, 16, 16)
    check(ssd_piece._piece_backward, first.mT, inputs[0], *inputs, None, states.bfloat16(), 1, *NO_LIMITS, *totals)
    inputs = m2rnn_inputs((2, 1, 4, 1, 16), (BF16, FP32))
    inputs[4] = inputs[4].mT
    check(m2rnn_op._m2rnn_backward, inputs[2], *inputs, None, torch.empty(2, 2, 4, 1, 16), 1, [True] * 8)
    q, k, v = attention_inputs((2, 9, 4, 2, 6, 5), BF16)
    inputs, starts, out = [q.mT.contiguous().mT, k, v], torch.zeros(9, 2, dtype=torch.int32).T, torch.empty(2, 9, 4, 5, dtype=BF16)
    check(attention_op._attention, *inputs, starts, 0.3, None, *NEITHER, *UNCAPPED)
    grad, lse = torch.empty((), dtype=BF16).expand(out.shape), torch.empty(2, 9, 4).mT
    behind = grad, *inputs, starts, *NEITHER, out, lse, 0.3, None, *UNCAPPED
    check(attention_op._attention_backward, *behind, [*[True] * 3, False, False])
    inputs = m2rnn_inputs((2, 9, 4, 6, 5), (BF16, BF16))
    inputs[0], inputs[4] = inputs[0].mT.contiguous().mT, inputs[4].mT
    grad, states = torch.empty((), dtype=BF16).expand(2, 9, 4, 5), torch.empty(2, 3, 4, 5, 6).mT
    check(m2rnn_op._m2rnn, *inputs, None, 8)
    check(m2rnn_op._m2rnn_backward, grad, *inputs, None, states, 8, [True] * 8)


def test_the_reference_states_nothing() -> None:
    """Chosen, or because the kernels do not take the sizes or the dtype."""
    narrow, wide = ssd_inputs((1, 4, 2, 4, 1, 4), (BF16, BF16)), ssd_inputs((1, 4, 2, 129, 1, 4), (BF16, BF16))
    states, exact = torch.empty(1, 1, 2, 4, 4, dtype=BF16), m2rnn_inputs((1, 4, 2, 4, 4), (torch.float64, FP32))
    name = "megakernels.ssd_backward.default"
    assert scratch_bytes(name, (narrow[0], *narrow, None, states, 4, *NO_LIMITS, [True] * 7))
    assert scratch_bytes(name, (wide[0], *wide, None, states, 4, *NO_LIMITS, [True] * 7)) == 0
    assert scratch_bytes("megakernels.m2rnn_backward.default", (exact[2], *exact, None, torch.empty(1, 2, 2, 4, 4), 4, [True] * 8)) == 0
    use_kernels("reference")
    try:
        assert scratch_bytes(name, (narrow[0], *narrow, None, states, 4, *NO_LIMITS, [True] * 7)) == 0
    finally:
        use_kernels("triton")
