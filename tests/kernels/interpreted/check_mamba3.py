"""The kernels of Mamba-3's scan: ranks and rotations, tiles within segments, packed rows, pieces, any decay."""

import random
from typing import Any

import pytest
import torch
from kernel_checks import DTYPES, TOLERANCE, check_values, contract_tests, no_reference, seeds, shuffled_grid, strided
from op_cases import CASES
from op_checks import gradients, rms_ratio
from op_exact import exact_mamba3
from op_makers import per_document
from torch import Tensor

from megakernels import mamba3, mamba3_ahead, mamba3_ahead_backward, mamba3_piece, mamba3_piece_backward
from megakernels.ops.mamba3 import facts, kernel, reference
from megakernels.ops.mamba3.chunk import GRADIENTS, Mamba3Inputs
from megakernels.ops.mamba3.op import IMPLEMENTATION
from megakernels.ops.mamba3.piece import Mamba3Settings

BY_NAME = {case.name: case for case in CASES if case.name.startswith("mamba3")}
EACH = pytest.mark.parametrize("name", BY_NAME)
SEQUENCES = GRADIENTS[:8]
SEEDS, QUICK = range(24), (4, 6)
"""Random shapes, and shapes with few programs, which CI runs; each of the others takes some ten to thirty seconds."""
TERMS = {"dt_bias": "dt", "B_bias": "B", "C_bias": "C"}
"""The input that a parameter is added to: its gradient is a sum of that input's, which may cancel except for the rounding of each."""


@pytest.mark.slow
def test_values() -> None:
    check_values(BY_NAME["mamba3_packed"], 37, torch.float32, reference, views=True)


@pytest.mark.slow
@EACH
@DTYPES
@pytest.mark.parametrize("num_positions", [1, 65, 130])
def test_values_of_more_lengths(name: str, dtype: torch.dtype, num_positions: int) -> None:
    check_values(BY_NAME[name], num_positions, dtype, reference, views=num_positions == 65, terms=TERMS)


def drawn(seed: int) -> tuple[dict[str, Any], torch.dtype]:
    """Arguments of `mamba3` of a random shape, fp64: steps and rates from weak to so strong that a state vanishes within a tile."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    dtype = draw.choice([torch.float32, torch.bfloat16])
    exact = dtype == torch.float32
    batch, positions = draw.choice([1, 2]), draw.choice([1, 15, 16, 17, 33, 50] if exact else [17, 33, 50])
    rank, groups, shared = draw.choice([1, 1, 2, 3, 4]), draw.choice([1, 2]), draw.choice([1, 2, 3])
    width, state = draw.choice([(5, 7), (16, 16), (32, 32), (1, 2), (9, 31)] if exact else [(5, 7), (16, 32), (64, 128), (33, 40)])
    if max(width, state) > 32:
        positions, groups = min(positions, 33), 1
    num_angles = draw.choice([0, 1, state // 2])
    heads = groups * shared

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    slow = draw.choice([-6.0, -1.0, 0.0, 3.0])
    given: dict[str, Any] = {
        "x": normal(batch, positions, heads, width),
        "z": normal(batch, positions, heads, width),
        "B": normal(batch, positions, rank, groups, state),
        "C": normal(batch, positions, rank, groups, state),
        "dt": normal(batch, positions, heads),
        "A": normal(batch, positions, heads) + slow,
        "trapezoid": normal(batch, positions, heads),
        "angles": normal(batch, positions, num_angles) if num_angles else None,
        "B_bias": normal(heads, rank, state),
        "C_bias": normal(heads, rank, state),
        "D": normal(heads),
        "dt_bias": normal(heads) + draw.choice([-3.0, 0.0, 2.0]),
    }
    mimo = rank > 1 or draw.random() < 0.3
    given |= {name: normal(heads, rank, width) if mimo else None for name in ("mimo_x", "mimo_z", "mimo_o")}
    starts = None
    if draw.random() < 0.5:
        begins = torch.rand(batch, positions, generator=generator) < draw.choice([0.05, 0.2, 0.7])
        begins[:, 0] = True
        starts = torch.where(begins, torch.arange(positions), 0).cummax(1).values.int()
    given |= {"starts": starts, "chunk_size": draw.choice([1, 16, 64]), "save_every": draw.choice([1, 16, 20, 40, 64])}
    if given["save_every"] == 1:
        given |= {"save_every": max(1, positions // 3)}
    return given | {"heavy_tail": draw.random() < 0.5}, dtype


def independent(given: dict[str, Any]) -> Tensor:
    """The recurrence, position by position, on each document alone."""
    inputs = {name: value for name, value in given.items() if name not in ("starts", "chunk_size", "save_every", "heavy_tail")}
    inputs = {name: value for name, value in inputs.items() if value is not None}
    if given["starts"] is None:
        return exact_mamba3(**inputs, heavy_tail=given["heavy_tail"])
    whole: dict[str, Any] = {**inputs, "starts": given["starts"], "heavy_tail": given["heavy_tail"]}
    return per_document(exact_mamba3, SEQUENCES, whole)


def check_drawn(seed: int) -> None:
    given, dtype = drawn(seed)
    names = [name for name in GRADIENTS if given[name] is not None]
    narrow = given | {name: given[name].to(dtype).requires_grad_() for name in names}
    wide = given | {name: narrow[name].detach().double().requires_grad_() for name in names}
    expected = independent(wide)
    cotangent = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    right = [expected, *gradients([expected], [wide[name] for name in names], [cotangent.double()])]
    again = mamba3(**wide)
    other = [again, *gradients([again], [wide[name] for name in names], [cotangent.double()])]
    with no_reference(reference), shuffled_grid(seed):
        y = mamba3(**narrow)
        found = [y, *gradients([y], [narrow[name] for name in names], [cotangent])]
    for exact in (right, other):
        right_ones = dict(zip(("y", *names), exact, strict=True))
        ratios = {}
        for name, a in zip(right_ones, found, strict=True):
            b, terms = right_ones[name], right_ones[TERMS.get(name, name)]
            if b.norm() > 1e-9 * expected.norm():  # a gradient that vanishes next to the others of its size has their rounding
                ratios[name] = rms_ratio(a, b) * float(min(1.0, b.norm() / terms.norm()))
        assert {name: ratio for name, ratio in ratios.items() if not ratio <= TOLERANCE[dtype]} == {}
    assert [each.dtype for each in found] == [dtype] * len(found)


@seeds(QUICK, [each for each in SEEDS if each not in QUICK])
def test_random_shapes(seed: int) -> None:
    check_drawn(seed)


def test_the_draw_covers_what_it_should() -> None:
    given = [drawn(seed) for seed in SEEDS]
    assert {dtype for _, dtype in given} == {torch.float32, torch.bfloat16}
    assert {each["B"].shape[2] for each, _ in given} == {1, 2, 3, 4}
    assert {each["starts"] is None for each, _ in given} == {each["angles"] is None for each, _ in given} == {True, False}
    assert any(each["x"].shape[3] == 64 and each["B"].shape[4] == 128 for each, _ in given)
    assert any(each["x"].shape[1] > 2 * each["save_every"] for each, _ in given)


@pytest.mark.parametrize(
    ("rank", "num_angles", "packed", "counts"),
    [
        (3, 2, True, (2, 7, 4, 1)),
        *(pytest.param(*each, (3, 20, 17, 4), marks=pytest.mark.slow) for each in ((3, 2, True), (1, 3, False), (2, 0, True))),
    ],
)
def test_pieces_are_the_whole(rank: int, num_angles: int, packed: bool, counts: tuple[int, ...]) -> None:
    """State and phase cross the pieces, and a share of each first position goes to the weight of the one before it."""
    pieces, length, every, heads = counts
    groups = -(-heads // 2)
    torch.manual_seed(0)
    shapes = [(heads, 5), (heads, 5), (rank, groups, 7), (rank, groups, 7), *[(heads,)] * 3, (num_angles,)]
    inputs: list[Any] = [torch.randn(2, pieces * length, *shape) if 0 not in shape else None for shape in shapes]
    inputs += [torch.randn(heads, rank, 7), torch.randn(heads, rank, 7), torch.randn(heads), torch.randn(heads) - 2]
    inputs += [torch.randn(heads, rank, 5) if rank > 1 else None for _ in range(3)]
    begins = torch.rand(2, pieces * length) < (0.1 if packed else 0.0)
    starts = torch.where(begins, torch.arange(pieces * length), 0).cummax(1).values.int() if packed else None
    settings, given = Mamba3Settings(16, every), [each.requires_grad_() for each in inputs if each is not None]
    with no_reference(reference):
        whole = mamba3(*inputs, 16, starts, save_every=every)
        grad_y = torch.randn(whole.shape)
        expected = torch.autograd.grad(whole, given, grad_y)
        plain = [None if each is None else each.detach() for each in inputs]
        totals = [None if each is None else torch.zeros_like(each) for each in plain]

        def own(tensors: list[Any], index: int) -> list[Any]:
            rows = slice(index * length, (index + 1) * length)
            return [each[:, rows] if each is not None and place < 8 else each for place, each in enumerate(tensors)]

        def here(index: int) -> Tensor | None:
            return None if starts is None else (starts[:, index * length : (index + 1) * length] - index * length).contiguous()

        def first(index: int) -> tuple[Any, ...]:
            begin = here(index)
            return plain[4][:, index * length], plain[6][:, index * length], plain[11], None if begin is None else begin[:, 0]

        y, count = torch.empty_like(whole), -(-length // every)
        states = torch.empty(2, pieces, count, heads, 5, 7)
        phases = torch.empty(2, pieces, count, heads, num_angles)
        carried, zero = torch.zeros(2, heads, 5 * 7 + num_angles), torch.zeros(2, heads)
        ahead = [*(mamba3_ahead(*first(index)) for index in range(1, pieces)), zero]
        for index in range(pieces):
            rows = y[:, index * length : (index + 1) * length]
            kept = states[:, index], phases[:, index]
            carried = mamba3_piece(carried, own(plain, index), here(index), ahead[index], settings, rows, *kept)
        assert rms_ratio(y, whole) < TOLERANCE[torch.float32]
        grad_last, grad_ahead = torch.zeros_like(carried), torch.empty_like(zero)
        for index in reversed(range(pieces)):
            grad_last = mamba3_piece_backward(
                grad_last,
                grad_y[:, index * length : (index + 1) * length],
                own(plain, index),
                here(index),
                ahead[index],
                states[:, index],
                phases[:, index],
                settings,
                own(totals, index),
                grad_ahead,
            )
            if index + 1 < pieces:
                grad_dt, grad_trapezoid, grad_bias = mamba3_ahead_backward(grad_ahead, *first(index + 1))
                totals[4][:, (index + 1) * length] += grad_dt
                totals[6][:, (index + 1) * length] += grad_trapezoid
                totals[11] += grad_bias
    made = [each for each in totals if each is not None]
    assert max(rms_ratio(found, right) for found, right in zip(made, expected, strict=True)) < TOLERANCE[torch.float32]


def test_fewer_segments_at_once_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """State and its gradient pass from one part of the segments to the next."""
    monkeypatch.setattr(facts, "STATES_BYTES", 1)
    given, _ = drawn(6)
    given |= {"save_every": 5} | {name: given[name].float() for name in GRADIENTS if given[name] is not None}
    scan = Mamba3Inputs(**given)
    made = kernel.forward(scan)
    assert made[1].shape[1] == 4
    expected = reference.forward(scan)
    found = *made, *kernel.backward(expected[0], scan, *expected[1:])
    right = *expected, *reference.backward(expected[0], scan, *expected[1:])
    assert all(a is None or rms_ratio(a, b) < TOLERANCE[torch.float32] for a, b in zip(found, right, strict=True) if a is None or a.numel())


test_contract, test_only_wanted_gradients, test_gradient_of_a_sum = contract_tests(
    reference, [BY_NAME["mamba3_single"]], [BY_NAME["mamba3"]], [BY_NAME["mamba3_single"]], slow=("contract", "needs", "uniform")
)


def test_strided_operands_have_the_bits_of_dense_ones() -> None:
    given, _ = drawn(6)
    names = [name for name in GRADIENTS if given[name] is not None]
    dense = Mamba3Inputs(**given | {name: given[name].float() for name in names})
    views = dense._replace(**{name: strided(getattr(dense, name)) for name in names})
    found, expected = kernel.forward(views), kernel.forward(dense)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    again = (kernel.backward(expected[0], each, *expected[1:]) for each in (views, dense))
    assert all(a is None or torch.equal(a, b) for a, b in zip(*again, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_what_stays_with_the_reference(dtype: torch.dtype) -> None:
    widest, widest_state = facts.MAMBA3_LARGEST_WIDTHS[dtype.itemsize]

    def given(width: int, state: int, rank: int = 1) -> Mamba3Inputs:
        x, keys = torch.empty(1, 1, 1, width, dtype=dtype), torch.empty(1, 1, rank, 1, state, dtype=dtype)
        return Mamba3Inputs(x, x, keys, keys, *(None,) * 12, 16, 16, False)

    assert IMPLEMENTATION.module(given(widest, widest_state, facts.LARGEST_RANK)) is kernel
    others = given(widest + 1, 8), given(8, widest_state + 1), given(8, 8, facts.LARGEST_RANK + 1), given(8, 1), given(0, 8)
    assert all(IMPLEMENTATION.module(each) is reference for each in others)
    assert IMPLEMENTATION.module(given(8, 8)._replace(z=torch.empty(1, 1, 1, 8, dtype=torch.float64))) is reference
