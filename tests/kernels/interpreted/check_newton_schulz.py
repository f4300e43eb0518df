"""The symmetric product."""

import pytest
import torch
from kernel_checks import TOLERANCE, no_reference, shuffled_grid
from op_checks import rms_ratio

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
