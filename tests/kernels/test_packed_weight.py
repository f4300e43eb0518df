"""Weights in four or eight bits, against numpy in fp64: the nearest of the published values, errors within half a step, bytes of a row."""

import numpy as np
import pytest
import torch

from megakernels import unpacked
from megakernels.ops.packed_weight.facts import NF4_VALUES, Packing
from megakernels.ops.packed_weight.reference import join, pack

ROWS, COLUMNS, BLOCK = 6, 83, 16


def weight_of(seed: int) -> torch.Tensor:
    weight = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed))
    weight[2] = 0
    weight[3] *= 1e4
    return weight


def magnitudes(weight: torch.Tensor) -> np.ndarray:
    """The largest magnitude of each element's block, [rows, columns]."""
    values = np.abs(weight.double().numpy())
    return np.concatenate(
        [np.repeat(values[:, at : at + BLOCK].max(1, keepdims=True), min(BLOCK, COLUMNS - at), 1) for at in range(0, COLUMNS, BLOCK)], 1
    )


def made(weight: torch.Tensor, packing: Packing, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    packed = join(*pack(weight, packing))
    assert packed.shape == (ROWS, packing.row_bytes(COLUMNS))
    return unpacked(packed, COLUMNS, packing, dtype)


def test_four_bits_are_the_nearest_of_the_published_values() -> None:
    weight = weight_of(0)
    largest = magnitudes(weight)
    scaled = np.divide(weight.double().numpy(), largest, out=np.zeros_like(largest), where=largest > 0)
    table = np.array(NF4_VALUES)
    wanted = table[np.abs(scaled[..., None] - table).argmin(-1)] * largest
    np.testing.assert_allclose(made(weight, Packing("nf4", BLOCK, False)).double().numpy(), wanted, rtol=3e-7, atol=0)


def test_eight_bits_are_within_half_a_step() -> None:
    weight = weight_of(1)
    error = np.abs(made(weight, Packing("int8", BLOCK, False)).double().numpy() - weight.double().numpy())
    assert (error <= magnitudes(weight) * (0.5 / 127 + 1e-6)).all()
    assert error.max() > 0


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_nested_magnitudes_move_by_half_a_step_of_their_row(kind: str) -> None:
    weight = weight_of(2)
    largest = magnitudes(weight)
    blocks = np.abs(weight.double().numpy())
    per_block = np.stack([blocks[:, at : at + BLOCK].max(1) for at in range(0, COLUMNS, BLOCK)], 1)
    step = np.abs(per_block - per_block.mean(1, keepdims=True)).max(1, keepdims=True) / 128
    found, exact = (made(weight, Packing(kind, BLOCK, nested)).double().numpy() for nested in (True, False))
    assert (np.abs(found - exact) <= step + 1e-6 * largest).all()  # the largest of all has the code 127 of 128
    assert (found != exact).any()


def test_a_row_does_not_depend_on_the_others_and_zeros_stay() -> None:
    weight, packing = weight_of(3), Packing("nf4", BLOCK, True)
    assert torch.equal(made(weight, packing)[4], unpacked(join(*pack(weight[4:5], packing)), COLUMNS, packing, torch.float32)[0])
    assert not made(weight, packing)[2].any()


def test_bytes_of_a_row() -> None:
    """Half a byte or one for a code, one or four for a block's magnitude, and eight for the row where these are nested."""
    assert Packing("nf4", 64, True).row_bytes(4096) == 2048 + 64 + 8
    assert Packing("nf4", 64, False).row_bytes(4096) == 2048 + 256
    assert Packing("int8", 128, False).row_bytes(130) == 130 + 8
    with pytest.raises(ValueError, match="packed must be uint8"):
        unpacked(torch.zeros(2, 9, dtype=torch.uint8), 4, Packing("nf4", 64, True), torch.float32)
