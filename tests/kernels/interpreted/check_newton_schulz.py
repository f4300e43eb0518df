"""The symmetric product."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from kernel_checks import TOLERANCE, no_reference, shuffled_grid
from op_checks import rms_ratio
from triton.runtime import interpreter

from megakernels import symmetric_product
from megakernels.ops.newton_schulz import reference

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
SIZES = [(1, 1, 1), (2, 5, 65), (1, 130, 20), (1, 64, 64), pytest.param(2, 200, 300, marks=pytest.mark.slow)]


@DTYPES
@pytest.mark.parametrize("layout", ["plain", "transposed", "slice"])
@pytest.mark.parametrize(("num_matrices", "rows", "cols"), SIZES)
def test_values(dtype: torch.dtype, num_matrices: int, rows: int, cols: int, layout: str) -> None:
    torch.manual_seed(rows)
    x = torch.randn(num_matrices, rows, cols).to(dtype)
    if layout == "transposed":
        x = x.mT.contiguous().mT
    if layout == "slice":
        wider = torch.full((num_matrices, rows, cols + 3), torch.nan, dtype=dtype)
        wider[..., 1:-2] = x
        x = wider[..., 1:-2]
    with no_reference(reference):
        gram = symmetric_product(x)
        polynomial = symmetric_product(gram, gram, 0.5, -1.5)
        with shuffled_grid(seed=1):
            assert torch.equal(symmetric_product(x), gram)
            assert torch.equal(symmetric_product(gram, gram, 0.5, -1.5), polynomial)
    wide, wide_gram = x.double(), gram.double()
    assert rms_ratio(gram, wide @ wide.mT) < TOLERANCE[dtype]
    assert rms_ratio(polynomial, 0.5 * wide_gram @ wide_gram - 1.5 * wide_gram) < TOLERANCE[dtype]
    assert torch.equal(gram, gram.mT)
    assert torch.equal(polynomial, polynomial.mT)


@contextlib.contextmanager
def tilted_products() -> Iterator[None]:
    """Products of tiles are wrong by a share that grows with the column, so that no tile on the diagonal is symmetric of itself."""
    builder = type(interpreter.interpreter_builder)
    plain = builder.create_dot

    def create_dot(*arguments: Any) -> Any:
        found = plain(*arguments)
        found.data = found.data * (1 + 0.01 * np.arange(found.data.shape[1], dtype=found.data.dtype))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "create_dot", create_dot)
        yield


@DTYPES
@pytest.mark.parametrize("rows", [5, 130])
def test_a_result_is_symmetric_whatever_the_product_of_a_tile_is(dtype: torch.dtype, rows: int) -> None:
    """Order and width of a product's sums are those of the device, of TF32, or of the BLAS; what the kernel promises is not."""
    torch.manual_seed(rows)
    x = torch.randn(2, rows, 20).to(dtype)
    plain = symmetric_product(x)
    with tilted_products():
        tilted = symmetric_product(x)
        added = symmetric_product(x, plain.tril() + torch.full_like(plain, torch.nan).triu(1), 0.5, -1.5)
        same = symmetric_product(x, plain, 0.5, -1.5)
    assert not torch.allclose(tilted, plain)
    assert torch.equal(tilted, tilted.mT)
    assert torch.equal(added, added.mT)
    assert torch.equal(added, same)


def test_rows_beyond_32_bit_offsets() -> None:
    """Rows so distant that a 32-bit offset would wrap; the memory between them is never touched."""
    torch.use_deterministic_algorithms(False)  # which would fill it with NaN
    far = torch.empty((2 << 30) + 64, dtype=torch.bfloat16).as_strided((1, 3, 64), (0, 1 << 30, 1))
    near = torch.randn(1, 3, 64).bfloat16()
    far.copy_(near)
    assert rms_ratio(symmetric_product(far), near.double() @ near.double().mT) < TOLERANCE[torch.bfloat16]


def test_no_matrices() -> None:
    assert symmetric_product(torch.empty(0, 3, 4)).shape == (0, 3, 3)
    assert symmetric_product(torch.empty(2, 3, 0)).count_nonzero() == 0


def test_contract() -> None:
    x, added = torch.randn(2, 5, 7), torch.randn(2, 5, 5)
    for given in (None, added + added.mT):
        report = torch.library.opcheck(torch.ops.megakernels.symmetric_product, (x, given, 0.5, 2.0))
        assert set(report.values()) == {"SUCCESS"}
