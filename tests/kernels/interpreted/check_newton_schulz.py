"""Newton-Schulz steps and their symmetric products."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from kernel_checks import TOLERANCE, no_reference, shuffled_grid
from op_checks import rms_ratio
from torch import Tensor
from triton.runtime import interpreter

from megakernels import newton_schulz_
from megakernels.ops.newton_schulz import kernel, reference
from megakernels.ops.newton_schulz.facts import uses_descriptors
from megakernels.ops.newton_schulz.iteration import COEFFICIENTS

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {**TOLERANCE, FP16: 1e-3}
SIZES = [(1, 1, 1), (2, 5, 65), (1, 130, 20), (1, 64, 64), (1, 264, 64), pytest.param(2, 392, 128, marks=pytest.mark.slow)]
"""The last two with descriptors: a last tile of few rows, and a square of tiles below another."""


def poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


@pytest.mark.parametrize("tall", [False, True])
@pytest.mark.parametrize(("dtype", "out_dtype"), [(FP32, FP32), (BF16, FP16), (FP16, BF16)], ids=str)
@pytest.mark.parametrize(("num_matrices", "rows", "cols"), SIZES)
def test_products(dtype: torch.dtype, out_dtype: torch.dtype, num_matrices: int, rows: int, cols: int, tall: bool) -> None:
    """x xᵀ with a factor of each matrix, and a polynomial of the result."""
    torch.manual_seed(rows)
    x = torch.randn(num_matrices, *((cols, rows) if tall else (rows, cols))).to(dtype)
    scales = torch.rand(num_matrices) + 0.5

    def products() -> tuple[Tensor, Tensor]:
        gram = poisoned((num_matrices, rows, rows), out_dtype)
        kernel.product(x, x, gram, alpha=0.5, scales=scales, tall=tall)
        polynomial = torch.full_like(gram, torch.nan)
        kernel.product(gram, gram, polynomial, alpha=0.5, added=gram, beta=-1.5, diagonal=3.0)
        return gram, polynomial

    gram, polynomial = products()
    with shuffled_grid(seed=1):
        assert all(torch.equal(*pair) for pair in zip(products(), (gram, polynomial), strict=True))
    wide, wide_gram = (x.mT if tall else x).double(), gram.double()
    assert rms_ratio(gram, 0.5 * scales.view(-1, 1, 1) * (wide @ wide.mT)) < TOLERANCE[out_dtype]
    assert rms_ratio(polynomial, 0.5 * wide_gram @ wide_gram - 1.5 * wide_gram + 3.0 * torch.eye(rows)) < TOLERANCE[out_dtype]
    assert torch.equal(gram, gram.mT)
    assert torch.equal(polynomial, polynomial.mT)


@contextlib.contextmanager
def tilted_products() -> Iterator[None]:
    """Products of tiles are wrong by a share that grows with the column, so that no tile on the diagonal is symmetric by itself."""
    builder = type(interpreter.interpreter_builder)
    plain = builder.create_dot

    def create_dot(*arguments: Any) -> Any:
        found = plain(*arguments)
        found.data = found.data * (1 + 0.01 * np.arange(found.data.shape[1], dtype=found.data.dtype))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "create_dot", create_dot)
        yield


@pytest.mark.parametrize(("dtype", "rows"), [(FP32, 5), (FP32, 130), (BF16, 5), (BF16, 130), (BF16, 264)])
def test_a_result_is_symmetric_whatever_the_product_of_a_tile_is(dtype: torch.dtype, rows: int) -> None:
    """Order and precision of a product's sums depend on the device, TF32 or the BLAS; the kernel's guarantees do not."""
    torch.manual_seed(rows)
    x = torch.randn(2, rows, 24).to(dtype)
    plain, tilted, added, same = (poisoned((2, rows, rows), dtype) for _ in range(4))
    kernel.product(x, x, plain)
    half = plain.tril() + torch.full_like(plain, torch.nan).triu(1)
    with tilted_products():
        kernel.product(x, x, tilted)
        kernel.product(x, x, added, alpha=0.5, added=plain if uses_descriptors(rows, 24, 2, tall=False) else half, beta=-1.5)
        kernel.product(x, x, same, alpha=0.5, added=plain, beta=-1.5)
    assert not torch.allclose(tilted, plain)
    assert torch.equal(tilted, tilted.mT)
    assert torch.equal(added, added.mT)
    assert torch.equal(added, same)


def exact(x: Tensor, num_steps: int) -> Tensor:
    """The iteration as Jordan et al. write it, in fp64."""
    a, b, c = COEFFICIENTS
    wide = x.double().mT if x.shape[1] > x.shape[2] else x.double()
    wide = wide / wide.norm(dim=(1, 2), keepdim=True)
    for _ in range(num_steps):
        gram = wide @ wide.mT
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return wide.mT if x.shape[1] > x.shape[2] else wide


@pytest.mark.parametrize(("dtype", "tolerance"), [(FP32, 2e-5), (BF16, 2e-2), (FP16, 4e-3)], ids=str)
@pytest.mark.parametrize(("shape", "num_steps"), [((2, 20, 65), 5), ((1, 70, 24), 5), ((2, 33, 40), 5), ((1, 8, 8), 2), ((1, 4, 9), 1)])
def test_steps(dtype: torch.dtype, tolerance: float, shape: tuple[int, ...], num_steps: int) -> None:
    """Wide, tall and nearly square matrices, of gradients' size, in segments of one, two and three steps."""
    torch.manual_seed(shape[1])
    x = (torch.randn(shape) * (1e-3 if dtype is FP16 else 1e-6)).to(dtype)
    found = x.clone()
    with no_reference(reference):
        assert newton_schulz_(found, num_steps) is found
        with shuffled_grid(seed=1):
            assert torch.equal(newton_schulz_(x.clone(), num_steps), found)
    assert rms_ratio(found, exact(x, num_steps)) < tolerance
    plain = x.clone()
    reference.forward(plain, num_steps)
    assert rms_ratio(plain, exact(x, num_steps)) < tolerance


def test_rows_beyond_32_bit_offsets() -> None:
    """Rows so distant that a 32-bit offset would wrap; the memory between them is never touched."""
    torch.use_deterministic_algorithms(False)  # which would fill it with NaN
    far = torch.empty((2 << 30) + 64, dtype=BF16).as_strided((1, 3, 64), (0, 1 << 30, 1))
    near = torch.randn(1, 3, 64).bfloat16()
    far.copy_(near)
    found = poisoned((1, 3, 3), BF16)
    kernel.product(far, far, found)
    assert rms_ratio(found, near.double() @ near.double().mT) < TOLERANCE[BF16]


def test_no_matrices() -> None:
    assert newton_schulz_(torch.empty(0, 3, 4), 5).shape == (0, 3, 4)
    assert newton_schulz_(torch.zeros(2, 3, 4), 5).count_nonzero() == 0


def test_fp64_runs_plain_torch() -> None:
    x = torch.randn(2, 4, 9, dtype=torch.float64)
    assert rms_ratio(newton_schulz_(x.clone(), 5), exact(x, 5)) < 1e-12


def test_contract() -> None:
    report = torch.library.opcheck(torch.ops.megakernels.newton_schulz_, (torch.randn(2, 5, 7), 5))
    assert set(report.values()) == {"SUCCESS"}
