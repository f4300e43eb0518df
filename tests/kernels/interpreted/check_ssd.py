"""The scan's kernels: tiles within chunks, packed rows, pieces, any decay."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from kernel_checks import DTYPES, TOLERANCE, check_values, contract_tests, no_reference, run, seeds_of
from op_cases import BY_NAME
from op_checks import gradients, rms_ratio
from op_exact import exact_ssd
from op_makers import BATCH, LIMITED, Case, document_starts, per_document
from torch import Tensor

from megakernels import ssd, ssd_piece, ssd_piece_backward
from megakernels.ops.ssd import facts, kernel, reference
from megakernels.ops.ssd.inputs import SsdInputs
from megakernels.ops.ssd.op import SCAN

NAMES = ("ssd", "ssd_one_group_small_chunks", "ssd_limited", "ssd_packed", "ssd_one_group_small_chunks_packed")


@pytest.mark.parametrize(
    ("name", "dtype", "num_positions"),
    [
        ("ssd", torch.float32, 1),
        pytest.param("ssd", torch.bfloat16, 63, marks=pytest.mark.slow),
        pytest.param("ssd_packed", torch.float32, 65, marks=pytest.mark.slow),
        pytest.param("ssd_one_group_small_chunks", torch.float32, 33, marks=pytest.mark.slow),
        ("ssd_one_group_small_chunks_packed", torch.bfloat16, 34),
        ("ssd_limited", torch.float32, 33),
    ],
)
def test_values(name: str, dtype: torch.dtype, num_positions: int) -> None:
    """A tile takes the interpreter tens of milliseconds: few sizes here, all of them below."""
    check_values(BY_NAME[name], num_positions, dtype, reference, views=num_positions in (33, 63))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@DTYPES
@pytest.mark.parametrize("num_positions", [1, 63, 64, 65, 1000])
def test_values_at_all_sizes(name: str, dtype: torch.dtype, num_positions: int) -> None:
    check_values(BY_NAME[name], num_positions, dtype, reference, views=num_positions == 63)


def wide(name: str, chunk_size: int) -> Case:
    """Heads of more columns than a kernel takes at a time, and chunks of several tiles of which the last one is not full."""
    plain, packed = BY_NAME["ssd"], name == "packed"
    num_positions_of = {"x": (3, 70), "dt": (3,), "B": (1, 9), "C": (1, 9)}

    def inputs(normal: Callable[..., Tensor], t: int) -> dict[str, Tensor]:
        made = {name: normal(BATCH, t, *rest) for name, rest in num_positions_of.items()}
        made |= {"A_log": normal(3).abs().mul(2).log1p(), "D": normal(3), "dt_bias": normal(3) - 1}
        return {name: made[name] for name in plain.saved} | ({"starts": document_starts(t)} if packed else {})

    def exact(**given: Tensor) -> Tensor:
        return per_document(exact_ssd, ("x", "dt", "B", "C"), given) if packed else exact_ssd(**given)

    return Case(
        f"ssd_wide_{name}",
        inputs,
        lambda i: (ssd(**i, chunk_size=chunk_size),),
        lambda i: (exact(**i),),
        (*plain.saved, *(("starts",) if packed else ())),
        lambda t: [((BATCH, math.ceil(t / chunk_size), 3, 70, 9), "x")],
    )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), [("packed", torch.bfloat16)])
def test_wide_heads_and_long_chunks(name: str, dtype: torch.dtype) -> None:
    check_values(wide(name, 70), 72, dtype, reference)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "packed"])
@pytest.mark.parametrize("chunk_size", [70, 100, 160])
def test_wide_heads_and_chunks_of_many_lengths(name: str, chunk_size: int) -> None:
    check_values(wide(name, chunk_size), 230, torch.bfloat16, reference)


def long_chunks(name: str, chunk_size: int) -> Case:
    limits = {"dt_limits": LIMITED} if name == "ssd_limited" else {}
    return replace(
        BY_NAME[name],
        call=lambda i: (ssd(**i, chunk_size=chunk_size, **limits),),
        extra=lambda t: [((BATCH, math.ceil(t / chunk_size), 4, 5, 7), "x")],
    )


def test_several_tiles_of_a_chunk() -> None:
    check_values(long_chunks("ssd_packed", 20), 25, torch.float32, reference)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunk_size", [100, 160])
@DTYPES
def test_chunks_of_many_tiles(name: str, chunk_size: int, dtype: torch.dtype) -> None:
    check_values(long_chunks(name, chunk_size), 230, dtype, reference)


test_contract, test_only_wanted_gradients, test_gradient_of_a_sum = contract_tests(
    reference, [BY_NAME["ssd_packed"]], [BY_NAME["ssd"]], slow=("needs", "uniform")
)


@pytest.mark.slow
@pytest.mark.parametrize("cuts", [(0, 5, 21, 26)])
def test_pieces_are_the_whole(cuts: tuple[int, ...]) -> None:
    """A sequence cut in three, each piece from its neighbour's state and with its neighbour's gradient."""
    inputs = BY_NAME["ssd"].make(26, torch.float32)
    starts = document_starts(26)
    wanted = run(BY_NAME["ssd_packed"], {**inputs, "starts": starts})
    (seed,) = seeds_of([wanted[0]])
    plain = [value.detach() for value in inputs.values()]
    y, made = torch.empty_like(plain[0]), [torch.zeros_like(tensor) for tensor in plain]
    pieces = [slice(*each) for each in itertools.pairwise(cuts)]
    states = [torch.empty(BATCH, -(-(rows.stop - rows.start) // 20), 4, 5, 7) for rows in pieces]

    def own(tensors: list[Tensor], rows: slice) -> list[Tensor]:
        return [tensor[:, rows] if tensor.dim() > 1 else tensor for tensor in tensors]

    state = torch.zeros(BATCH, 4, 5, 7)
    with no_reference(reference):
        for rows, at in zip(pieces, states, strict=True):
            state = ssd_piece(state, own(plain, rows), starts[:, rows] - rows.start, 20, y[:, rows], at)
        grad = torch.zeros_like(state)
        for rows, at in reversed(list(zip(pieces, states, strict=True))):
            grad = ssd_piece_backward(grad, seed[:, rows], own(plain, rows), starts[:, rows] - rows.start, at, 20, own(made, rows))
    ratios = {name: rms_ratio(a, b) for name, a, b in zip(("y", *inputs), (y, *made), wanted, strict=True)}
    assert {name: ratio for name, ratio in ratios.items() if not ratio <= TOLERANCE[torch.float32]} == {}


@pytest.mark.parametrize("shape", [(0, 4), (2, 0)])
def test_no_positions(shape: tuple[int, int]) -> None:
    inputs = BY_NAME["ssd"].make(1, torch.float32, requires_grad=False)
    empty = {name: value.new_empty(shape + value.shape[2:]) if value.dim() > 1 else value for name, value in inputs.items()}
    skip = empty["D"].requires_grad_()
    ssd(**empty, chunk_size=16).sum().backward()
    assert skip.grad is not None
    assert skip.grad.count_nonzero() == 0


@pytest.mark.parametrize("rate", [pytest.param(1e-4, marks=pytest.mark.slow), 300.0])
def test_any_decay(rate: float) -> None:
    """Factors exp(c_i) · exp(−c_j) would overflow at the strong end, and differences of rounded running sums would be imprecise."""
    inputs = BY_NAME["ssd"].make(70, torch.float32)
    with torch.no_grad():
        inputs["A_log"].fill_(math.log(rate))
    wide = {name: value.detach().double().requires_grad_() for name, value in inputs.items()}
    y, exact = ssd(**inputs, chunk_size=64), exact_ssd(**wide)
    found = gradients([y], list(inputs.values()), [torch.ones_like(y)])
    expected = gradients([exact], list(wide.values()), [torch.ones_like(exact)])
    ratios = dict(zip(["y", *inputs], map(rms_ratio, (y, *found), (exact, *expected)), strict=True))
    assert {name: ratio for name, ratio in ratios.items() if not ratio <= TOLERANCE[torch.float32]} == {}


def test_the_naive_factors_would_overflow() -> None:
    """The kernels avoid the separate factors of a tile, which are 0 · ∞ at rate 300."""
    inputs = BY_NAME["ssd"].make(64, torch.float32, requires_grad=False)
    sums = (-300 * torch.nn.functional.softplus(inputs["dt"] + inputs["dt_bias"])).cumsum(1)
    assert (sums[:, :, None].exp() * (-sums)[:, None].exp()).isnan().any()


def test_positions_beyond_32_bit_offsets() -> None:
    inputs = BY_NAME["ssd"].make(3, torch.bfloat16, requires_grad=False)
    torch.use_deterministic_algorithms(False)  # which would fill the memory between with NaN
    far = torch.empty((2 << 30) + 64, dtype=torch.bfloat16).as_strided((1, 3, 4, 5), (0, 1 << 30, 5, 1))
    far.copy_(inputs["x"][:1])
    one = {name: value[:1] if value.dim() > 1 else value for name, value in inputs.items()}
    assert torch.equal(ssd(**{**one, "x": far}, chunk_size=64), ssd(**one, chunk_size=64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_what_stays_with_the_reference(dtype: torch.dtype) -> None:
    largest, nothing = facts.SSD_LARGEST_WIDTH[dtype.itemsize], SsdInputs._make([None] * len(SsdInputs._fields))
    for head_width, state_width, expected in ((largest, largest, kernel), (largest + 1, 8, reference), (8, largest + 1, reference)):
        x, B = torch.empty(1, 1, 1, head_width, dtype=dtype), torch.empty(1, 1, 1, state_width, dtype=dtype)
        assert SCAN.module(nothing._replace(x=x, B=B, C=B)) is expected
    assert SCAN.module(nothing._replace(x=x, B=B, C=B.double())) is reference
