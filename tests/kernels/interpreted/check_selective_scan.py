"""The kernels of the selective scan: odd widths, blocks of channels, documents, segments, and pieces that pass their state to the next."""

import random
from typing import NamedTuple

import pytest
import torch
from kernel_checks import TOLERANCE, check_values, contract_tests, no_reference, seeds, shuffled_grid, strided
from op_cases import CASES
from op_checks import rms_ratio
from torch import Tensor
from torch.nn.functional import softplus

from megakernels import selective_scan, selective_scan_piece, selective_scan_piece_backward
from megakernels.ops.selective_scan import facts, reference
from megakernels.ops.selective_scan.inputs import GRADIENTS, SelectiveScanInputs
from megakernels.ops.selective_scan.sizes import accepts

BY_NAME = {case.name: case for case in CASES if case.name.startswith("selective_scan")}
EACH = pytest.mark.parametrize("name", BY_NAME)


@EACH
def test_values(name: str) -> None:
    check_values(BY_NAME[name], 7, torch.bfloat16, reference, views=True)


@pytest.mark.slow
@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_positions", [1, 2, 39, 40, 41, 81])
def test_values_of_more_lengths(name: str, dtype: torch.dtype, num_positions: int) -> None:
    check_values(BY_NAME[name], num_positions, dtype, reference)


class Drawn(NamedTuple):
    """Random operands in their dtype, in the order of `GRADIENTS`, and how they are cut."""

    inputs: list[Tensor]
    starts: Tensor | None
    save_every: int
    num_pieces: int


def drawn(seed: int) -> Drawn:
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    dtype = draw.choice([torch.float32, torch.bfloat16])
    batch, channels, width = draw.choice([1, 2, 3]), draw.choice([1, 5, 31, 33, 40, 130]), draw.choice([1, 3, 7, 8, 16])
    num_pieces, length = draw.choice([1, 1, 2, 3]), draw.choice([1, 2, 3, 5, 9, 16])
    positions = num_pieces * length

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    starts = None
    if draw.random() < 0.5:
        begins = torch.rand(batch, positions, generator=generator) < draw.choice([0.05, 0.3, 0.7])
        begins[:, 0] = True
        starts = torch.where(begins, torch.arange(positions), 0).cummax(1).values.int()
    inputs = [
        normal(batch, positions, channels) * draw.choice([1.0, 20.0]),
        normal(batch, positions, channels) * draw.choice([0.3, 1.0, 3.0]),
        (normal(channels, width).abs() * draw.choice([0.1, 2.0, 8.0])).log1p(),
        *(normal(batch, positions, width) for _ in range(2)),
        normal(channels),
        normal(channels) + draw.choice([-4.0, -1.0, 2.0]),
    ]
    return Drawn([each.to(dtype) for each in inputs], starts, draw.choice([1, 2, 3, 8, 40]), num_pieces)


def independent(wide: list[Tensor], starts: Tensor | None) -> Tensor:
    """The recurrence as it is published, position by position, fp64; autograd has its gradients."""
    x, dt, A_log, B, C, D, dt_bias = wide
    step, state, found = softplus(dt + dt_bias), torch.zeros(x.shape[0], *A_log.shape, dtype=torch.float64), []
    for position in range(x.shape[1]):
        if starts is not None:
            state = state * (starts[:, position] < position).double()[:, None, None]
        now = step[:, position].unsqueeze(2)
        state = torch.exp(-now * A_log.exp()) * state + now * x[:, position].unsqueeze(2) * B[:, position].unsqueeze(1)
        found.append((state * C[:, position].unsqueeze(1)).sum(2) + D * x[:, position])
    return torch.stack(found, 1)


def of_pieces(given: Drawn, grad: Tensor) -> list[Tensor]:
    """y and gradients by pieces, each from the previous piece's last state."""
    inputs, starts, save_every, num_pieces = given
    length = grad.shape[1] // num_pieces
    count, plain = -(-length // save_every), {name: strided(each) for name, each in zip(GRADIENTS, inputs, strict=True)}
    batch, shape = grad.shape[0], plain["A_log"].shape
    y, state = torch.empty_like(grad), torch.zeros(batch, *shape)
    states = torch.empty(batch, num_pieces * count, *shape)

    def part(index: int, tensor: Tensor, size: int = length) -> Tensor:
        return tensor[:, index * size : (index + 1) * size]

    def own(index: int, tensors: dict[str, Tensor]) -> list[Tensor]:
        return [part(index, each) if name in ("x", "dt", "B", "C") else each for name, each in tensors.items()]

    def begins(index: int) -> Tensor | None:
        return None if starts is None else part(index, starts) - index * length

    for index in range(num_pieces):
        made = part(index, y), part(index, states, count)
        state = selective_scan_piece(state, own(index, plain), begins(index), save_every, *made)
    totals = {name: torch.zeros(each.shape) for name, each in plain.items()}
    carried = torch.zeros_like(state)
    for index in reversed(range(num_pieces)):
        operands = own(index, plain), begins(index), part(index, states, count), save_every, own(index, totals)
        carried = selective_scan_piece_backward(carried, part(index, grad), *operands)
    return [y, *totals.values()]


@seeds(range(3), range(3, 50))
def test_random_shapes(seed: int) -> None:
    """The operation, and pieces of it, against another implementation; with the same bits in any order of programs."""
    given = drawn(seed)
    inputs, starts, save_every, _ = given
    wide = [each.double().requires_grad_() for each in inputs]
    exact = independent(wide, starts)
    dtype = inputs[0].dtype
    grad = torch.randn(exact.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    expected = [exact, *torch.autograd.grad(exact, wide, grad.double())]
    leaves = [each.clone().requires_grad_() for each in inputs]
    with no_reference(reference):
        y = selective_scan(*leaves, save_every, starts)
        found = [y, *torch.autograd.grad(y, leaves, grad)]
        with shuffled_grid(seed):
            again = selective_scan(*leaves, save_every, starts)
            repeated = [again, *torch.autograd.grad(again, leaves, grad)]
        pieces = of_pieces(given, grad)
    assert all(torch.equal(a, b) for a, b in zip(found, repeated, strict=True))
    assert torch.equal(pieces[0], found[0])
    for made in (found, pieces):
        ratios = dict(zip(("y", *GRADIENTS), map(rms_ratio, made, expected), strict=True))
        assert {name: ratio for name, ratio in ratios.items() if not ratio <= TOLERANCE[dtype]} == {}


test_contract, test_only_wanted_gradients, test_gradient_of_a_sum = contract_tests(
    reference, [BY_NAME["selective_scan_packed"]], uniform=[BY_NAME["selective_scan"]], slow=("needs",)
)


@pytest.mark.parametrize("shape", [(0, 4), (2, 0)])
def test_no_positions(shape: tuple[int, int]) -> None:
    x, B = torch.empty(*shape, 3, requires_grad=True), torch.empty(*shape, 2)
    rates = torch.ones(3, 2, requires_grad=True)
    y = selective_scan(x, x, rates, B, B, torch.ones(3), torch.ones(3), 4)
    assert y.shape == x.shape
    assert torch.autograd.grad(y.sum(), rates)[0].count_nonzero() == 0


def test_what_stays_with_the_reference() -> None:
    empty = torch.empty(1, 1, 2)
    given = SelectiveScanInputs(empty, empty, torch.empty(2, facts.LARGEST_STATE), empty, empty, empty, empty, None, 1)
    assert accepts(given)
    assert not accepts(given._replace(A_log=torch.empty(2, facts.LARGEST_STATE + 1)))
