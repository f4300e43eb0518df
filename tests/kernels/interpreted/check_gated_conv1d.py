"""The kernels of the convolution between two gates: taps, bias, documents, pieces, and the products before them."""

import random
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from kernel_checks import TOLERANCE, check_values, contract_tests, each, no_reference, seeds, shuffled_grid, strided
from op_cases import BY_NAME
from op_checks import rms_ratio
from op_exact import exact_gated_conv
from op_makers import Case, gated_conv_case, packed
from torch import Tensor
from torch.nn import functional

from megakernels import gated_conv1d, gated_conv_pieces, gated_conv_pieces_backward
from megakernels.ops.causal_conv1d.facts import LARGEST_KERNEL
from megakernels.ops.gated_conv1d import kernel, reference
from megakernels.ops.gated_conv1d.op import accepts

SEQUENCES = ("input_gate", "output_gate", "value")
FOUR = gated_conv_case("gated_conv1d_four", 4, bias=True)
CONV = [BY_NAME["gated_conv1d"], FOUR, packed(FOUR, gated_conv1d, exact_gated_conv, SEQUENCES)]
WIDE = replace(
    gated_conv_case("gated_conv1d_two_tiles", 2, bias=True),
    inputs=lambda n, t: {**{each: n(1, t, 300) for each in SEQUENCES}, "weight": n(300, 2), "bias": n(300)},
)
EACH = each([*CONV, WIDE])


@EACH
def test_values(case: Case) -> None:
    check_values(case, 5, torch.bfloat16, reference, views=True)


@pytest.mark.slow
@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_positions", [1, 63, 64, 65, 129, 300])
def test_values_of_more_lengths(case: Case, dtype: torch.dtype, num_positions: int) -> None:
    check_values(case, num_positions, dtype, reference)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a short row has several: the shipped ones have up to 128 positions of 256 channels."""
    for name, size in (("GATED_FORWARD_POSITIONS", 16), ("POSITIONS_PER_SHARE", 16), ("GATED_CHANNELS", 32)):
        monkeypatch.setattr(kernel, name, size)


class Drawn(NamedTuple):
    """Random operands in their dtype, and the pieces that they are cut into."""

    sequences: list[Tensor]
    weight: Tensor
    bias: Tensor | None
    starts: Tensor | None
    num_pieces: int


def drawn(seed: int) -> Drawn:
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    dtype = draw.choice([torch.float32, torch.bfloat16])
    batch, channels, taps = draw.choice([1, 2]), draw.choice([1, 5, 11, 32, 40]), draw.choice([1, 2, 3, 3, 4])
    num_pieces, length = draw.choice([1, 2, 3]), draw.choice([1, 2, 3, 7, 11, 16, 18])
    length = max(length, taps - 1)  # the products before a piece are those of one piece
    positions = num_pieces * length

    def normal(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator, dtype=torch.float64) * draw.choice([1.0, 1.0, 30.0])).to(dtype)

    starts = None
    if draw.random() < 0.6:
        begins = torch.rand(batch, positions, generator=generator) < draw.choice([0.05, 0.2, 0.7])
        begins[:, 0] = True
        starts = torch.where(begins, torch.arange(positions), 0).cummax(1).values.int()
    sequences = [normal(batch, positions, channels) for _ in SEQUENCES]
    return Drawn(sequences, normal(channels, taps), normal(channels) if draw.random() < 0.5 else None, starts, num_pieces)


def independent(given: Drawn, wide: list[Tensor]) -> Tensor:
    """Torch's own convolution of every document, fp64; products are rounded as `gated_conv1d` documents them."""
    input_gate, output_gate, value, weight, *bias = wide
    product = input_gate * value
    product = product + (product.detach().to(given.weight.dtype).double() - product.detach())
    rows = []
    for row in range(value.shape[0]):
        starts = [0] if given.starts is None else sorted(set(given.starts[row].tolist()))
        lengths = [stop - start for start, stop in zip(starts, [*starts[1:], value.shape[1]], strict=True)]
        parts = [functional.pad(part.mT, (weight.shape[1] - 1, 0)) for part in product[row].split(lengths)]
        summed = [functional.conv1d(part, weight.unsqueeze(1), *bias, groups=weight.shape[0]).mT for part in parts]
        rows.append(torch.cat(summed))
    return output_gate * torch.stack(rows)


@pytest.mark.usefixtures("small_tiles")
@seeds(range(3), range(3, 50))
def test_random_shapes(seed: int) -> None:
    """The operation, and that of pieces put together, against another implementation; both with the same bits in any order."""
    given = drawn(seed)
    sequences, weight, bias, starts = given[:4]
    inputs = [each for each in (*sequences, weight, bias) if each is not None]
    wide = [each.double().requires_grad_() for each in inputs]
    exact = independent(given, wide)
    grad = torch.randn(exact.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(weight.dtype)
    expected = [exact, *torch.autograd.grad(exact, wide, grad.double())]
    leaves = [each.clone().requires_grad_() for each in inputs]
    with no_reference(reference):
        y = gated_conv1d(*leaves, *([None] if bias is None else []), starts)
        found = [y, *torch.autograd.grad(y, leaves, grad)]
        with shuffled_grid(seed):
            again = gated_conv1d(*leaves, *([None] if bias is None else []), starts)
            repeated = [again, *torch.autograd.grad(again, leaves, grad)]
        assert all(torch.equal(a, b) for a, b in zip(found, repeated, strict=True))
        pieces = of_pieces(given, grad)
    bound = TOLERANCE[weight.dtype]
    assert max(map(rms_ratio, found, expected)) < bound
    assert torch.equal(pieces[0], found[0])
    assert max(map(rms_ratio, pieces[1:], expected[1:])) < bound


def of_pieces(given: Drawn, grad: Tensor) -> list[Tensor]:
    """y and the gradients by the operation on pieces, each with its preceding products, as views of wider rows."""
    sequences, weight, bias, starts, num_pieces = given
    length, late = grad.shape[1] // num_pieces, weight.shape[1] - 1
    here = None if starts is None else (starts - torch.arange(num_pieces, dtype=torch.int32).repeat_interleave(length) * length)
    ends = (sequences[0] * sequences[2]).unflatten(1, (num_pieces, length))[:, :, length - late :]
    before = torch.cat([torch.zeros_like(ends[:, :1]), ends[:, :-1]], 1)
    views = [strided(each) for each in sequences]
    y = gated_conv_pieces(*views, before, weight, bias, here)
    *found, of_before, of_weight, of_bias = gated_conv_pieces_backward(strided(grad), *views, before, weight, bias, here)
    for own, other in ((0, 2), (2, 0)):
        pieces = found[own].unflatten(1, (num_pieces, length))
        factors = sequences[other].unflatten(1, (num_pieces, length))
        pieces[:, :-1, length - late :] += of_before[:, 1:] * factors[:, :-1, length - late :]
    return [y, *found, of_weight, *([] if of_bias is None else [of_bias])]


test_contract, test_only_wanted_gradients, test_gradient_of_a_sum = contract_tests(reference, [CONV[-1]], uniform=[FOUR])


@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 0, 3)])
def test_no_positions(shape: tuple[int, ...]) -> None:
    gate, weight = torch.empty(shape, requires_grad=True), torch.ones(3, 3, requires_grad=True)
    gated_conv1d(gate, gate, gate, weight).backward(torch.empty(shape))
    assert weight.grad is not None
    assert weight.grad.count_nonzero() == 0


def test_positions_beyond_32_bit_offsets() -> None:
    """Positions so distant that a 32-bit offset would wrap; the memory between them is never touched."""
    torch.use_deterministic_algorithms(False)  # which would fill it with NaN
    far = torch.empty((2 << 30) + 64, dtype=torch.bfloat16).as_strided((1, 3, 64), (64, 1 << 30, 1))
    near, weight = torch.randn(1, 3, 64).bfloat16(), torch.randn(64, 3).bfloat16()
    far.copy_(near)
    pairs = [(each.requires_grad_(), gated_conv1d(each, each, each, weight)) for each in (far, near)]
    assert torch.equal(pairs[0][1], pairs[1][1])
    found, expected = (torch.autograd.grad(y, each, near.detach())[0] for each, y in pairs)
    assert torch.equal(found, expected)


def test_what_stays_with_the_reference() -> None:
    narrow = [torch.empty(1, 2, 3, dtype=torch.bfloat16) for _ in SEQUENCES]
    given = reference.GatedConvolution(*narrow, torch.empty(3, LARGEST_KERNEL), None, None)
    assert accepts(given)
    assert not accepts(given._replace(weight=torch.empty(3, LARGEST_KERNEL + 1)))
    assert not accepts(given._replace(input_gate=narrow[0].float()))
