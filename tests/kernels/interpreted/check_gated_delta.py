"""The kernels of the gated delta rule: one decay a head or a row, tiles within segments, packed rows, pieces, any gates."""

import itertools
import random
from typing import Any

import pytest
import torch
from kernel_checks import DTYPES, TOLERANCE, check_values, contract_tests, no_reference, run, seeds, seeds_of, shuffled_grid, strided
from op_cases import CASES
from op_checks import gradients, rms_ratio
from op_exact import exact_gated_delta
from op_makers import BATCH, document_starts, per_document
from torch import Tensor
from torch.nn import functional

from megakernels import gated_delta, gated_delta_piece, gated_delta_piece_backward
from megakernels.ops.gated_delta import facts, kernel, reference
from megakernels.ops.gated_delta.inputs import GRADIENTS, GatedDeltaInputs
from megakernels.ops.gated_delta.op import SCAN
from megakernels.ops.gated_delta.piece import DeltaSettings

BY_NAME = {case.name: case for case in CASES if case.name.startswith("gated_delta")}
SEQUENCES = ("q", "k", "v", "decay", "beta")
SEEDS, QUICK = range(28), (9, 24)
"""Random shapes, and shapes with few programs, which CI runs."""
TERMS = {"dt_bias": "decay", "A_log": "decay"}
"""Whose terms a parameter's gradient sums: it may cancel except for the rounding of each."""


@pytest.mark.parametrize(
    ("name", "dtype", "num_positions"),
    [
        ("gated_delta_packed", torch.float32, 5),
        pytest.param("gated_delta_packed", torch.float32, 18, marks=pytest.mark.slow),
        pytest.param("gated_delta_rows_packed", torch.bfloat16, 18, marks=pytest.mark.slow),
        pytest.param("gated_delta_negative", torch.bfloat16, 33, marks=pytest.mark.slow),
    ],
)
def test_values(name: str, dtype: torch.dtype, num_positions: int) -> None:
    check_values(BY_NAME[name], num_positions, dtype, reference, views=num_positions == 18, terms=TERMS)


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_NAME)
@DTYPES
@pytest.mark.parametrize("num_positions", [1, 63, 65, 130])
def test_values_of_more_lengths(name: str, dtype: torch.dtype, num_positions: int) -> None:
    check_values(BY_NAME[name], num_positions, dtype, reference, views=num_positions == 65, terms=TERMS)


def drawn(seed: int) -> tuple[dict[str, Any], torch.dtype, int]:
    """Arguments of `gated_delta` of a random shape, fp64, the dtype, and the tile's positions in fp32.

    Gates are from weak to so strong that a state vanishes within a position, and in some draws both in one sequence. Nearly parallel keys
    are drawn in fp32 alone: a state's component in their direction is overwritten at each position, so the decay's gradient is a small
    difference of bf16-rounded numbers.
    """
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    dtype = draw.choice([torch.float32, torch.bfloat16])
    exact = dtype == torch.float32
    batch, positions = draw.choice([1, 2]), draw.choice([1, 16, 17, 50, 70, 100])
    rows, groups, shared = draw.random() < 0.5, draw.choice([1, 2]), draw.choice([1, 1, 2])
    width, values = draw.choice([(5, 6), (16, 16), (32, 24), (64, 64)] if exact else [(5, 6), (33, 40), (64, 64), (128, 128), (64, 256)])
    if max(width, values) > 40:
        batch, groups = 1, 1
    heads = groups * shared

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    strength, of_row = draw.choice([-4.0, -1.0, 2.0, 5.0]), (width,) if rows else ()
    decay = normal(batch, positions, heads, *of_row) * draw.choice([1.0, 4.0])
    starts = None
    if draw.random() < 0.5:
        begins = torch.rand(batch, positions, generator=generator) < draw.choice([0.03, 0.1, 0.7])
        begins[:, 0] = True
        starts = torch.where(begins, torch.arange(positions), 0).cummax(1).values.int()
    given: dict[str, Any] = {
        "q": normal(batch, positions, groups, width) * draw.choice([1e-3, 1.0, 30.0]),
        "k": normal(batch, positions, groups, width) + draw.choice([0.0, 0.0, 2.0]) * exact,
        "v": normal(batch, positions, heads, values),
        "decay": decay,
        "beta": normal(batch, positions, heads) + draw.choice([-2.0, 0.0, 3.0]),
        "A_log": normal(heads).abs().mul(2).log1p(),
        "dt_bias": normal(heads, *of_row) + strength,
        "starts": starts,
        "chunk_size": draw.choice([16, 64, 64]),
        "save_every": draw.choice([16, 40, 64, 256]),
        "beta_limit": draw.choice([1.0, 2.0]),
    }
    return given, dtype, draw.choice([16, 64])


def terms_of_rates(given: dict[str, Any], grad_decay: Tensor) -> Tensor:
    """The terms that the gradient of A_log sums: log decay times its gradient."""
    raw = (given["decay"] + given["dt_bias"]).detach()
    return grad_decay * functional.softplus(raw) / raw.sigmoid()


def independent(given: dict[str, Any]) -> Tensor:
    """The recurrence, position by position, on each document alone."""
    inputs = {name: value for name, value in given.items() if name not in ("starts", "chunk_size", "save_every")}
    if given["starts"] is None:
        return exact_gated_delta(**inputs)
    return per_document(exact_gated_delta, SEQUENCES, inputs | {"starts": given["starts"]})


@seeds(QUICK, [each for each in SEEDS if each not in QUICK])
def test_random_shapes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32 also with the larger tile that other dtypes have, so that all of it is held to fp32's bound."""
    given, dtype, tile = drawn(seed)
    monkeypatch.setitem(facts.LARGEST_TILE, torch.float32.itemsize, tile)
    monkeypatch.setattr(facts, "PART_BYTES", 1 if seed % 3 == 0 else facts.PART_BYTES)
    narrow = given | {name: given[name].to(dtype).requires_grad_() for name in GRADIENTS}
    wide = given | {name: narrow[name].detach().double().requires_grad_() for name in GRADIENTS}
    expected = independent(wide)
    cotangent = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    right = [expected, *gradients([expected], [wide[name] for name in GRADIENTS], [cotangent.double()])]
    again = gated_delta(**wide)
    other = [again, *gradients([again], [wide[name] for name in GRADIENTS], [cotangent.double()])]
    with no_reference(reference), shuffled_grid(seed):
        y = gated_delta(**narrow)
        found = [y, *gradients([y], [narrow[name] for name in GRADIENTS], [cotangent])]
    largest = max(each.norm() for each in right[1:])
    for exact in (right, other):
        right_ones = dict(zip(("y", *GRADIENTS), exact, strict=True))
        ratios, own_terms = {}, {"A_log": terms_of_rates(wide, right_ones["decay"])}
        for name, a in zip(right_ones, found, strict=True):
            b, terms = right_ones[name], own_terms.get(name, right_ones[TERMS.get(name, name)])
            if b.norm() > 1e-9 * largest:  # a gradient that vanishes next to the others has their rounding
                ratios[name] = rms_ratio(a, b) * float(min(1.0, b.norm() / terms.norm()))
            else:
                assert a.isfinite().all()
        assert {name: ratio for name, ratio in ratios.items() if not ratio <= TOLERANCE[dtype]} == {}
    assert [each.dtype for each in found] == [dtype] * len(found)


def test_the_draw_covers_what_it_should() -> None:
    given = [drawn(seed) for seed in SEEDS]
    assert {dtype for _, dtype, _ in given} == {torch.float32, torch.bfloat16}
    assert {each["decay"].dim() for each, _, _ in given} == {3, 4}
    assert {each["starts"] is None for each, _, _ in given} == {each["beta_limit"] > 1 for each, _, _ in given} == {True, False}
    assert any(each["q"].shape[3] == each["v"].shape[3] == 128 for each, _, _ in given)
    assert any(each["v"].shape[2] > each["q"].shape[2] for each, _, _ in given)
    assert any(each["q"].shape[1] > each["save_every"] for each, _, _ in given)


test_contract, test_only_wanted_gradients, test_gradient_of_a_sum = contract_tests(
    reference,
    [BY_NAME["gated_delta_packed"], BY_NAME["gated_delta_rows_packed"]],
    [BY_NAME["gated_delta"], BY_NAME["gated_delta_rows"]],
    [BY_NAME["gated_delta"]],
    slow=("contract", "needs", "uniform"),
)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "save_every"), [("gated_delta", 32), ("gated_delta_rows", 40)])
def test_pieces_are_the_whole(name: str, save_every: int) -> None:
    """A sequence cut in three, each piece from its neighbour's state and with its neighbour's gradient, in views of wider tensors."""
    cuts, settings = (0, 5, 50, 61), DeltaSettings(16, save_every)
    inputs, starts = BY_NAME[name].make(61, torch.float32), document_starts(61)
    wanted = run(BY_NAME[f"{name}_packed"], {**inputs, "starts": starts})
    (seed,) = seeds_of([wanted[0]])
    plain = [strided(value.detach()) for value in inputs.values()]
    y, made = torch.empty_like(wanted[0]), [torch.zeros_like(tensor) for tensor in plain]
    pieces = [slice(*each) for each in itertools.pairwise(cuts)]
    states = [torch.empty(BATCH, -(-(rows.stop - rows.start) // save_every), 4, 5, 6) for rows in pieces]

    def own(tensors: list[Tensor], rows: slice) -> list[Tensor]:
        return [tensor[:, rows] if index < len(SEQUENCES) else tensor for index, tensor in enumerate(tensors)]

    state = torch.zeros(BATCH, 4, 5, 6)
    with no_reference(reference):
        for rows, at in zip(pieces, states, strict=True):
            state = gated_delta_piece(state, own(plain, rows), starts[:, rows] - rows.start, settings, y[:, rows], at)
        grad = torch.zeros_like(state)
        for rows, at in reversed(list(zip(pieces, states, strict=True))):
            here = starts[:, rows] - rows.start
            grad = gated_delta_piece_backward(grad, seed[:, rows], own(plain, rows), here, at, settings, own(made, rows))
    ratios = {each: rms_ratio(a, b) for each, a, b in zip(("y", *inputs), (y, *made), wanted, strict=True)}
    assert {each: ratio for each, ratio in ratios.items() if not ratio <= TOLERANCE[torch.float32]} == {}


@pytest.mark.slow
@pytest.mark.parametrize("per_row", [False, True])
def test_states_and_their_gradients(per_row: bool) -> None:
    """A run from an initial state, with a gradient of the last one, against the reference in fp64."""
    generator, rows = torch.Generator().manual_seed(3), (16,) if per_row else ()

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tokens = normal(1, 37, 2, 16), normal(1, 37, 2, 16), normal(1, 37, 2, 8), normal(1, 37, 2, *rows), normal(1, 37, 2)
    wide = GatedDeltaInputs(*tokens, normal(2), normal(2, *rows) - 3, None, 16, 20, 1.0)
    given = GatedDeltaInputs(*(each.float() if isinstance(each, Tensor) else each for each in wide))
    state, grad_last, grad_y = normal(1, 2, 16, 8), normal(1, 2, 16, 8), normal(1, 37, 2, 8)
    expected, found = reference.forward(state, wide), kernel.forward(state.float(), given)
    of_all, of_first = reference.backward(grad_last, grad_y, wide, expected[1])
    made, first = kernel.backward(grad_last.float(), grad_y.float(), given, found[1])
    pairs = zip((*found, *made, first), (*expected, *of_all, of_first), strict=True)
    assert max(rms_ratio(a, b) for a, b in pairs) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("shape", [(0, 4), (2, 0)])
def test_no_positions(shape: tuple[int, int]) -> None:
    inputs = BY_NAME["gated_delta"].make(1, torch.float32, requires_grad=False)
    empty = {name: value.new_empty(shape + value.shape[2:]) if value.dim() > 2 else value for name, value in inputs.items()}
    rate = empty["A_log"].requires_grad_()
    gated_delta(**empty, chunk_size=16, save_every=32).sum().backward()
    assert rate.grad is not None
    assert rate.grad.count_nonzero() == 0


@pytest.mark.slow
def test_positions_beyond_32_bit_offsets() -> None:
    inputs = BY_NAME["gated_delta"].make(3, torch.bfloat16, requires_grad=False)
    torch.use_deterministic_algorithms(False)  # which would fill the memory between with NaN
    far = torch.empty((2 << 30) + 64, dtype=torch.bfloat16).as_strided((1, 3, 4, 6), (0, 1 << 30, 6, 1))
    far.copy_(inputs["v"][:1])
    one = {name: value[:1] if value.dim() > 2 else value for name, value in inputs.items()}
    settings = {"chunk_size": 16, "save_every": 32}
    assert torch.equal(gated_delta(**{**one, "v": far}, **settings), gated_delta(**one, **settings))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_what_stays_with_the_reference(dtype: torch.dtype) -> None:
    (keys, values), nothing = (
        facts.DELTA_LARGEST_WIDTHS[dtype.itemsize],
        GatedDeltaInputs._make([None] * len(GatedDeltaInputs._fields))._replace(decay=torch.empty(1, 1, 1)),
    )
    for key_width, value_width, expected in ((keys, values, kernel), (keys + 1, 8, reference), (8, values + 1, reference)):
        q, v = torch.empty(1, 1, 1, key_width, dtype=dtype), torch.empty(1, 1, 1, value_width, dtype=dtype)
        assert SCAN.module(nothing._replace(q=q, k=q, v=v)) is expected
    assert SCAN.module(nothing._replace(q=q, k=q, v=v.double())) is reference
