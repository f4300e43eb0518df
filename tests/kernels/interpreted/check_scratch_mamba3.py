"""Scratch bytes of trapezoidal scans, compared with the stated ones."""

from typing import Any

import pytest
import torch
from scratch_checks import BF16, DTYPES, FP32, PACKED, check, make_idle, starts_of
from torch import Tensor

from megakernels.ops.mamba3 import facts as mamba3_sizes
from megakernels.ops.mamba3 import op as mamba3_op
from megakernels.ops.mamba3 import piece as mamba3_piece


@pytest.fixture(autouse=True)
def _idle(monkeypatch: pytest.MonkeyPatch) -> None:
    make_idle(monkeypatch)


MAMBA3 = [
    ((2, 50, 4, 16, 2, 16), 4, 3, 16),
    ((1, 7, 3, 5, 1, 7), 1, 0, 3),
    ((3, 130, 40, 32, 2, 9), 3, 2, 200),
    ((1, 70, 120, 3, 1, 32), 1, 16, 64),
    ((1, 1, 1, 1, 1, 2), 2, 1, 1),
    ((1, 1, 64, 1, 64, 2), 1, 1, 1),
]
"""Batch, positions, heads, width, groups and state width; ranks, angles, positions between two saved states."""
EACH_MAMBA3 = pytest.mark.parametrize(("shape", "rank", "num_angles", "save_every"), MAMBA3, ids=str)


def mamba3_inputs(shape: tuple[int, ...], rank: int, num_angles: int, dtypes: tuple[torch.dtype, torch.dtype]) -> list[Tensor | None]:
    """x, z, dt, A and trapezoid are parts of wider rows, as a block's split has them; then the parameters."""
    (batch, num_positions, heads, width, groups, state), (dtype, of_parameters) = shape, dtypes
    widths = (heads * width, heads * width, heads, heads, heads)
    x, z, *steps = torch.empty(batch, num_positions, sum(widths), dtype=dtype).split(widths, 2)
    B, C = (torch.empty(batch, num_positions, rank, groups, state, dtype=dtype) for _ in range(2))
    angles = torch.empty(batch, num_positions, num_angles, dtype=dtype) if num_angles else None
    shapes = [(heads, rank, state)] * 2 + [(heads,)] * 2
    weights = [torch.empty(each, dtype=of_parameters) for each in shapes]
    mimo = [torch.empty(heads, rank, width, dtype=of_parameters) if rank > 1 else None for _ in range(3)]
    return [x.unflatten(2, (heads, width)), z.unflatten(2, (heads, width)), B, C, *steps, angles, *weights, *mimo]


@PACKED
@DTYPES
@EACH_MAMBA3
def test_trapezoidal_scan(shape: tuple[int, ...], rank: int, num_angles: int, save_every: int, dtypes: Any, packed: bool) -> None:
    batch, num_positions, heads, width, _, state = shape
    inputs, starts = mamba3_inputs(shape, rank, num_angles, dtypes), starts_of(batch, num_positions, packed)
    settings = (16, save_every, False)
    check(mamba3_op._mamba3, *inputs, starts, *settings)
    segments = -(-num_positions // save_every)
    kept = torch.empty(batch, segments, heads, width, state, dtype=dtypes[0]), torch.empty(batch, segments, heads, num_angles)
    for needs in ([True] * 15, [index % 2 == 0 for index in range(15)]):
        assert check(mamba3_op._mamba3_backward, torch.empty_like(inputs[0]), *inputs, starts, *kept, *settings, needs)


@PACKED
@EACH_MAMBA3
@pytest.mark.parametrize("whole", [False, True], ids=["one lane", "all lanes"])
def test_piece_of_a_trapezoidal_scan(
    shape: tuple[int, ...], rank: int, num_angles: int, save_every: int, packed: bool, whole: bool
) -> None:
    batch, num_positions, heads, width, groups, state = shape
    lanes = 1 if whole else 2
    wide = mamba3_inputs((batch, 2 * num_positions, heads * lanes, width, groups * lanes, state), rank, num_angles, (BF16, BF16))
    rows, heads_of, groups_of = slice(num_positions, None), slice(0, heads), slice(0, groups)
    inputs: list[Tensor | None] = []
    for index, each in enumerate(wide):
        if each is None or index == 7:
            inputs.append(None if each is None else each[:, rows])
        elif index > 7:
            inputs.append(each[heads_of])
        else:
            inputs.append(each[:, rows, :, groups_of] if each.dim() == 5 else each[:, rows, heads_of])
    starts = starts_of(batch, 2 * num_positions, packed)
    starts = None if starts is None else starts[:, rows]
    count, settings = -(-num_positions // save_every), (16, save_every, False)
    states = torch.empty(batch, 2 * count, heads * lanes, width, state, dtype=BF16)[:, count:, heads_of]
    phases = torch.empty(batch, 2 * count, heads * lanes, num_angles)[:, count:, heads_of]
    y, ahead = torch.empty_like(wide[0])[:, rows, heads_of], torch.empty(batch, 2, heads * lanes)[:, 1, heads_of]
    carried = torch.empty(batch, heads, width * state + num_angles)
    check(mamba3_piece._piece, carried, *inputs, starts, ahead, *settings, y, states, phases)
    totals = [each if each is None or index < 8 else torch.zeros_like(each, dtype=FP32) for index, each in enumerate(inputs)]
    behind = (carried, y, *inputs, starts, ahead, states, phases, *settings, *totals, torch.empty_like(ahead))
    check(mamba3_piece._piece_backward, *behind)


def test_fewer_segments_at_once_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mamba3_sizes, "STATES_BYTES", 1)
    inputs = mamba3_inputs((2, 50, 24, 3, 1, 32), 4, 0, (BF16, BF16))
    check(mamba3_op._mamba3, *inputs, None, 16, 16, False)
    kept = torch.empty(2, 4, 24, 3, 32, dtype=BF16), torch.empty(2, 4, 24, 0)
    check(mamba3_op._mamba3_backward, torch.empty_like(inputs[0]), *inputs, None, *kept, 16, 16, False, [True] * 15)


def test_copies_of_a_scans_operands_are_counted() -> None:
    """A gradient that is one number everywhere, and states and parameters that are not contiguous."""
    inputs = mamba3_inputs((2, 9, 4, 6, 2, 8), 2, 3, (BF16, BF16))
    inputs[1], inputs[8], inputs[7] = inputs[1].contiguous(), inputs[8].mT.contiguous().mT, inputs[7].mT.contiguous().mT
    check(mamba3_op._mamba3, *inputs, None, 16, 8, False)
    kept = torch.empty(2, 2, 4, 8, 6, dtype=BF16).mT, torch.empty(2, 2, 3, 4).mT
    grad = torch.empty((), dtype=BF16).expand(2, 9, 4, 6)
    check(mamba3_op._mamba3_backward, grad, *inputs, None, *kept, 16, 8, False, [True] * 15)
