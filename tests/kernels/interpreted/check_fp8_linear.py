"""The kernels of eight-bit copies: the same bits as plain torch, and values of an independent rounding, in any order of programs."""

from random import Random

import numpy as np
import pytest
import torch
from delayed_numbers import numbers_for
from kernel_checks import shuffled_grid
from torch import Tensor

from megakernels import fp8_input_gradients, fp8_linears, fp8_quantize, fp8_weight_gradients, use_kernels
from megakernels.ops.fp8_linear import choice, kernel, reference
from megakernels.ops.fp8_linear.delayed import delayed_of

FORMATS = {torch.float8_e4m3fn: (3, -6, 448.0), torch.float8_e5m2: (2, -14, 57344.0)}
"""Bits of the fraction, exponent of the smallest normal number, largest number."""
SEEDS, QUICK = range(40), 5
HOW = [(by_row, transposed, second) for by_row in (False, True) for transposed in (False, True) for second in (False, True)]


def drawn(seed: int) -> Tensor:
    """A matrix of any size, with elements of many magnitudes, rows of zeros, numbers between two scales, or a view of a wider one."""
    draw, generator = Random(seed), torch.Generator().manual_seed(seed)
    rows, columns = draw.choice([1, 3, 16, 37, 130, 257]), draw.choice([1, 5, 16, 48, 129, 200])
    spread = torch.exp(draw.choice([0, 2, 6]) * torch.randn(rows, 2 * columns, generator=generator))
    x = torch.randn(rows, 2 * columns, generator=generator) * spread
    kind = draw.choice(["plain", "zeros", "tiny", "largest", "view"])
    if kind == "zeros":
        x[draw.randrange(rows)] = 0
    if kind == "tiny":
        x[draw.randrange(rows)] *= 1e-30
    if kind == "largest":  # the largest fraction of the formats, and the next larger number
        x = x.sign() * draw.choice([1.75, 448.0, 57344.0, 1.7500001])
    x = x.to(draw.choice([torch.float32, torch.bfloat16]))
    return x[:, :columns] if kind == "view" else x[:, :columns].contiguous()


def values(data: Tensor, scale: Tensor) -> Tensor:
    return data.double() * scale.double().view(-1, 1)


def rounded(x: np.ndarray, dtype: torch.dtype, axis: int | None) -> np.ndarray:
    """Scaled as a whole or along an axis, to the nearest number of the format, ties to even."""
    fraction, smallest, largest = FORMATS[dtype]
    factor = np.exp2(np.floor(np.log2(largest / np.maximum(np.abs(x).max(axis, keepdims=True), np.float32(1e-12)))))
    _, exponent = np.frexp(x * factor)
    unit = np.exp2(np.maximum(exponent - 1, smallest) - fraction)
    found: np.ndarray = np.round(x * factor / unit) * unit / factor
    return found


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    assert (found.dtype, found.shape, found.is_contiguous()) == (expected.dtype, expected.shape, True)
    bits = torch.uint8 if found.element_size() == 1 else torch.int32
    assert torch.equal(found.view(bits), expected.view(bits))


@pytest.mark.parametrize("seed", [each if each < QUICK else pytest.param(each, marks=pytest.mark.slow) for each in SEEDS])
def test_copies(seed: int) -> None:
    x = drawn(seed)
    for dtype in FORMATS:
        for by_row, transposed, second in HOW:
            expected = reference.operand(x, dtype=dtype, by_row=by_row, transposed=transposed, second=second)
            with shuffled_grid(seed):
                found = kernel.operand(x, dtype=dtype, by_row=by_row, transposed=transposed, second=second)
            for mine, theirs in zip(found, expected, strict=True):
                assert_same_bits(mine, theirs)
            exact = rounded(x.double().numpy(), dtype, (0 if transposed else 1) if by_row else None)
            inside = values(*found)[: exact.shape[1 if transposed else 0], : exact.shape[0 if transposed else 1]]
            assert torch.equal(inside, torch.from_numpy(exact.T.copy() if transposed else exact))
    for by_column in (False, True):
        (data, scale), (other, other_scale) = kernel.kept(x, by_column=by_column), reference.kept(x, by_column=by_column)
        assert_same_bits(data, other)
        assert_same_bits(scale, other_scale)
        assert_same_bits(kernel.turned(data, scale).data, reference.turned(other, other_scale).data)


@pytest.mark.parametrize("seed", [each if each < QUICK else pytest.param(each, marks=pytest.mark.slow) for each in SEEDS])
def test_copies_with_given_factors(seed: int) -> None:
    """The same bits, scales and recorded magnitudes, where some elements are beyond the largest number."""
    x, factor = drawn(seed), Random(seed).choice([1.0, 37.3, 1e-3, 3e4])
    for dtype in FORMATS:
        for transposed in (False, True):
            for second in (False, True):
                mine, theirs = (numbers_for("delayed", 1, (1.0, 1.0, factor))[0] for _ in range(2))
                how = {"dtype": dtype, "by_row": False, "transposed": transposed, "second": second}
                expected = reference.operand(x, **how, delayed=delayed_of(theirs, "gradient"))
                with shuffled_grid(seed):
                    found = kernel.operand(x, **how, delayed=delayed_of(mine, "gradient"))
                for one, other in zip(found, expected, strict=True):
                    assert_same_bits(one, other)
                assert torch.equal(mine, theirs)
    mine, theirs = (numbers_for("delayed", 1, (factor, 1.0, 1.0))[0] for _ in range(2))
    for one, other in zip(
        kernel.kept(x, by_column=False, delayed=delayed_of(mine, "input")),
        reference.kept(x, by_column=False, delayed=delayed_of(theirs, "input")),
        strict=True,
    ):
        assert_same_bits(one, other)
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize("scaling", ["tensor", "rows", "delayed"])
def test_operations_use_them(scaling: str) -> None:
    torch.manual_seed(0)
    x, weights = torch.randn(2, 9, 20).bfloat16(), [torch.randn(width, 20).bfloat16() for width in (16, 5)]
    gradients, kept = [torch.randn(2, 9, width).bfloat16() for width in (16, 5)], "columns" if scaling == "rows" else scaling

    def results() -> list[Tensor]:
        numbers = numbers_for(scaling, 2)
        low = fp8_quantize(x, kept, (*numbers, None)[0])
        made = [*low, *fp8_linears(x, None, weights, [None, None], scaling, numbers=numbers)]
        made.append(fp8_input_gradients(gradients, weights, scaling, "e5m2", numbers=numbers))
        return [*made, *fp8_weight_gradients(gradients, *low, 20, scaling, "e5m2", [True, False], numbers), *numbers]

    assert choice.chosen(x, x) is kernel
    found = results()
    try:
        use_kernels("torch")
        assert choice.chosen(x, x) is reference
        expected = results()
    finally:
        use_kernels("triton")
    assert all(torch.equal(mine.float(), theirs.float()) for mine, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_values_that_are_not_finite_stay(value: float) -> None:
    x = torch.randn(20, 33)
    x[2, 3] = value
    for dtype in FORMATS:
        for by_row, transposed, second in HOW:
            found = values(*kernel.operand(x, dtype=dtype, by_row=by_row, transposed=transposed, second=second))
            assert not (found.mT if transposed else found)[2, 3].isfinite()


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_no_elements(shape: tuple[int, int]) -> None:
    for by_row, transposed, second in HOW:
        found = kernel.operand(torch.empty(shape), dtype=torch.float8_e4m3fn, by_row=by_row, transposed=transposed, second=second)
        assert found.data.float().count_nonzero() == 0
        assert found.scale.isfinite().all()
