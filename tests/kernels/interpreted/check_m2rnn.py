"""The matrix recurrence's kernels: segments, spans of segments, packed rows, slow decay."""

import math
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from kernel_checks import DTYPES, TOLERANCE, check_values, contract_tests, each, no_reference, run, seeds_of
from op_cases import BY_NAME
from op_checks import rms_ratio
from op_exact import exact_m2rnn
from op_makers import BATCH, Case, document_starts
from torch import Tensor

from megakernels import m2rnn, m2rnn_piece, m2rnn_piece_backward
from megakernels.ops.m2rnn import facts, kernel, reference
from megakernels.ops.m2rnn.inputs import M2rnnInputs
from megakernels.ops.m2rnn.kernel_step import quick_tanh
from megakernels.ops.m2rnn.op import SCAN

EACH = each([BY_NAME["m2rnn"], BY_NAME["m2rnn_packed"]])


def in_segments_of(save_every: int, name: str = "m2rnn") -> Case:
    return replace(
        BY_NAME[name],
        call=lambda i: (m2rnn(**i, save_every=save_every),),
        extra=lambda t: [((BATCH, math.ceil(t / save_every) + 1, 3, 5, 6), "accumulator")],
    )


@pytest.mark.parametrize(
    ("name", "dtype", "num_positions"),
    [("m2rnn", torch.float32, 1), ("m2rnn_packed", torch.float32, 11), pytest.param("m2rnn", torch.bfloat16, 9, marks=pytest.mark.slow)],
)
def test_values(name: str, dtype: torch.dtype, num_positions: int) -> None:
    """A position takes the interpreter milliseconds: few sizes here, all of them below."""
    check_values(in_segments_of(4, name), num_positions, dtype, reference, views=num_positions == 9)


@pytest.mark.slow
@EACH
@DTYPES
@pytest.mark.parametrize("num_positions", [1, 63, 64, 65, 1000])
def test_values_at_all_sizes(case: Case, dtype: torch.dtype, num_positions: int) -> None:
    check_values(case, num_positions, dtype, reference, views=num_positions == 63)


test_contract, test_only_wanted_gradients, test_gradient_of_a_sum = contract_tests(
    reference, [BY_NAME["m2rnn_packed"]], [BY_NAME["m2rnn"]], slow=("needs", "uniform")
)


@pytest.mark.slow
def test_spans_and_segments_change_only_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """One span, a span for each segment (bitwise the same), and segments of another length."""
    inputs = BY_NAME["m2rnn"].make(19, torch.float32)
    whole = run(in_segments_of(8), inputs)
    monkeypatch.setattr(facts, "SPAN_BYTES", 1)
    assert all(torch.equal(a, b) for a, b in zip(run(in_segments_of(8), inputs), whole, strict=True))
    other = run(in_segments_of(50), inputs)
    assert max(rms_ratio(a, b) for a, b in zip(other, whole, strict=True)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("rate", [1e-5, pytest.param(50.0, marks=pytest.mark.slow)])
def test_slow_and_fast_decay(rate: float) -> None:
    """At decay 1 − 1e−5 the gain is a difference of nearly equal numbers unless expm1 makes it."""
    inputs = BY_NAME["m2rnn"].make(40, torch.float32, requires_grad=False)
    inputs["A_log"].fill_(math.log(rate))
    inputs["D"].zero_()
    exact = exact_m2rnn(**{name: value.double() for name, value in inputs.items()})
    assert rms_ratio(m2rnn(**inputs, save_every=16), exact) < TOLERANCE[torch.float32]


def test_the_naive_gain_would_not_be_exact() -> None:
    """The kernels avoid 1 − exp(log decay) in fp32."""
    log_decay = torch.full((), -1e-5)
    assert abs((1 - log_decay.exp()).item() / -torch.expm1(log_decay.double()).item() - 1) > 100 * TOLERANCE[torch.float32]


def test_positions_beyond_32_bit_offsets() -> None:
    inputs = BY_NAME["m2rnn"].make(3, torch.bfloat16, requires_grad=False)
    torch.use_deterministic_algorithms(False)  # which would fill the memory between with NaN
    one = {name: value[:1] if name in ("q", "k", "v", "f") else value for name, value in inputs.items()}
    far = torch.empty((2 << 30) + 64, dtype=torch.bfloat16).as_strided((1, 3, 5), (0, 1 << 30, 1))
    far.copy_(one["k"])
    assert torch.equal(m2rnn(**{**one, "k": far}, save_every=8), m2rnn(**one, save_every=8))


@pytest.mark.slow
def test_pieces_are_the_whole() -> None:
    """A sequence cut in three, each piece from its neighbour's state and with its neighbour's gradient."""
    inputs = BY_NAME["m2rnn"].make(11, torch.float32, requires_grad=False)
    starts = document_starts(11)
    wanted = run(BY_NAME["m2rnn_packed"], {**{name: value.requires_grad_() for name, value in inputs.items()}, "starts": starts})
    (seed,) = seeds_of([wanted[0]])
    names = list(inputs)
    plain = [inputs[name].detach() for name in names]
    per_token = [tensor.dim() > 1 and tensor.shape[:2] == (BATCH, 11) for tensor in plain]
    y, made = torch.empty_like(plain[2]), [torch.zeros_like(tensor) for tensor in plain]
    pieces = (slice(0, 4), slice(4, 7), slice(7, 11))
    states = [torch.empty(BATCH, -(-(rows.stop - rows.start) // 2) + 1, 3, 5, 6) for rows in pieces]

    def own(tensors: list[Tensor], rows: slice) -> list[Tensor]:
        return [tensor[:, rows] if cut else tensor for tensor, cut in zip(tensors, per_token, strict=True)]

    state = torch.zeros(BATCH, 3, 5, 6)
    with no_reference(reference):
        for rows, at in zip(pieces, states, strict=True):
            state = m2rnn_piece(state, own(plain, rows), starts[:, rows] - rows.start, 2, y[:, rows], at)
        grad = torch.zeros_like(state)
        for rows, at in reversed(list(zip(pieces, states, strict=True))):
            grad = m2rnn_piece_backward(grad, seed[:, rows], own(plain, rows), starts[:, rows] - rows.start, at, 2, own(made, rows))
    ratios = {name: rms_ratio(a, b) for name, a, b in zip(("y", *names), (y, *made), wanted, strict=True)}
    assert {name: ratio for name, ratio in ratios.items() if not ratio <= TOLERANCE[torch.float32]} == {}


@pytest.mark.parametrize("shape", [(0, 4), (2, 0)])
def test_no_positions(shape: tuple[int, int]) -> None:
    inputs = BY_NAME["m2rnn"].make(1, torch.float32, requires_grad=False)
    empty = {name: value.new_empty(shape + value.shape[2:]) if name in ("q", "k", "v", "f") else value for name, value in inputs.items()}
    weight = empty["state_map"].requires_grad_()
    m2rnn(**empty, save_every=4).sum().backward()
    assert weight.grad is not None
    assert weight.grad.count_nonzero() == 0


def test_large_states_stay_with_the_reference() -> None:
    keys, values, nothing = facts.LARGEST_KEYS, facts.LARGEST_VALUES, M2rnnInputs._make([None] * len(M2rnnInputs._fields))
    for key_width, value_width, expected in ((keys, values, kernel), (keys + 1, values, reference), (keys, values + 1, reference)):
        given = nothing._replace(q=torch.empty(1, 1, key_width), v=torch.empty(1, 1, 1, value_width))
        assert SCAN.module(given) is expected


@triton.jit
def tanh_kernel(x, y, N: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(y + tl.arange(0, N), quick_tanh(tl.load(x + tl.arange(0, N))))


def test_the_recurrences_tanh() -> None:
    """Relative errors, from the smallest to the largest arguments of both signs, on both sides of where its series ends."""
    sizes = torch.cat([torch.logspace(-30, 3, 122), torch.tensor([0.0, 0.2499, 0.25, 0.2501, 39.9, 40.1])])
    x = torch.cat([sizes, -sizes])
    y = torch.empty_like(x)
    tanh_kernel[(1,)](x, y, N=256)
    exact = x.double().tanh()
    assert ((y.double() - exact).abs() <= 1e-6 * exact.abs()).all()
