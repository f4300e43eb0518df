"""Rows of a weight in blocks: groups of heads expand latents as the whole up-projection does."""

import pytest
import torch

from megakernels import fp8_linears
from megakernels.ops.fp8_linear.packing.facts import num_largest, packed_columns, squares
from megakernels.ops.fp8_linear.weights import pack_weight, square_maxima
from megarun.parallel.groups.scaled import PackedMatrix, attach, given_rows

pytestmark = pytest.mark.runtime


@pytest.mark.parametrize("scaling", ["nvfp4", "fp8_blockwise"])
@pytest.mark.parametrize("num_parts", [2, 3, 6, 12])
def test_parts_of_a_weight_round_as_the_whole(scaling: str, num_parts: int) -> None:
    """Parts of a weight that end within its blocks have the rows of the whole product, gathered packed or not."""
    rows, columns, dtype = 24 * 16, 128, torch.bfloat16
    torch.manual_seed(0)
    x, weight = torch.eye(columns, dtype=dtype), torch.randn(rows, columns, dtype=dtype)  # of one term, sums have no order
    weight[300] *= 50
    packed = PackedMatrix(torch.zeros(num_largest(rows, columns, scaling)), both=False, has_other=False)
    assert packed.largest is not None
    if scaling == "nvfp4":
        packed.largest.copy_(weight.abs().max())
    else:
        square_maxima(weight.float(), 0, packed.largest.view(squares(rows, columns)))
    packed.rows = torch.empty((rows, packed_columns(columns, scaling)), dtype=torch.uint8)
    pack_weight(weight, scaling, packed.rows, packed.largest, dtype, turned=False)
    placeholder = torch.empty(rows, columns, dtype=dtype)
    attach(placeholder, packed)
    (whole,) = fp8_linears(x, None, [weight], [None], scaling)
    for given in (weight, placeholder):
        parts = []
        for first in range(0, rows, rows // num_parts):
            own, largest, taken = given_rows(given, slice(first, first + rows // num_parts), scaling)
            parts += fp8_linears(x, None, [own], [None], scaling, dtype, [largest], taken=taken)
        assert torch.equal(torch.cat(parts, -1), whole)
