"""The kernel that makes the matrix of packed rows: the reference's bits, at sizes that end inside a byte, a block and a tile."""

import pytest
import torch

from megakernels import unpacked
from megakernels.ops.packed_weight import reference
from megakernels.ops.packed_weight.facts import PACKED_TILE, Packing


@pytest.mark.parametrize(
    "packing", [Packing("nf4", 64, True), Packing("nf4", 20, False), Packing("int8", 4, True), Packing("int8", 64, False)]
)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (5, 37), (3, PACKED_TILE + 129)])
def test_values(packing: Packing, rows: int, columns: int) -> None:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(columns))
    weight[0] = 0
    packed = reference.join(*reference.pack(weight, packing))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(unpacked(packed, columns, packing, dtype), reference.unpack(packed, columns, packing, dtype))


def test_no_rows() -> None:
    packing = Packing("nf4", 64, True)
    assert unpacked(torch.empty(0, packing.row_bytes(9), dtype=torch.uint8), 9, packing, torch.bfloat16).shape == (0, 9)
