"""Scratch bytes of the selective scan's kernels, compared with the stated ones."""

from typing import Any

import pytest
import torch
from scratch_checks import BF16, DTYPES, FP32, PACKED, check, make_idle, starts_of
from torch import Tensor

from megakernels.ops.selective_scan import op as selective_op
from megakernels.ops.selective_scan import piece as selective_piece


@pytest.fixture(autouse=True)
def _idle(monkeypatch: pytest.MonkeyPatch) -> None:
    make_idle(monkeypatch)


SELECTIVE = [((2, 50, 40, 16), 16), ((1, 7, 3, 5), 3), ((3, 65, 130, 9), 200), ((2, 3, 300, 1), 1), ((1, 1, 1, 1), 1), ((2, 1, 64, 16), 4)]
"""Batch, positions, channels and width of a state; positions between two saved states."""
EACH_SELECTIVE = pytest.mark.parametrize(("shape", "save_every"), SELECTIVE, ids=str)


def selective_inputs(shape: tuple[int, ...], dtypes: tuple[torch.dtype, torch.dtype]) -> list[Tensor]:
    """B and C are parts of wider rows, as a block's split has them."""
    (batch, num_positions, channels, width), (dtype, of_parameters) = shape, dtypes
    x, dt = (torch.empty(batch, num_positions, channels, dtype=dtype) for _ in range(2))
    B, C = torch.empty(batch, num_positions, 2 * width, dtype=dtype).chunk(2, 2)
    A_log, D, dt_bias = (torch.empty(each, dtype=of_parameters) for each in ((channels, width), (channels,), (channels,)))
    return [x, dt, A_log, B, C, D, dt_bias]


@PACKED
@DTYPES
@EACH_SELECTIVE
def test_selective_scan(shape: tuple[int, ...], save_every: int, dtypes: Any, packed: bool) -> None:
    batch, num_positions, channels, width = shape
    inputs, starts = selective_inputs(shape, dtypes), starts_of(batch, num_positions, packed)
    assert check(selective_op._selective_scan, *inputs, starts, save_every) == 4 * batch * channels * width
    states = torch.empty(batch, -(-num_positions // save_every), channels, width)
    for needs in ([True] * 7, [False, True, True, False, True, False, True]):
        assert check(selective_op._selective_scan_backward, torch.empty_like(inputs[0]), *inputs, starts, states, save_every, needs)


@PACKED
@EACH_SELECTIVE
@pytest.mark.parametrize("whole", [False, True], ids=["one lane", "all lanes"])
def test_piece_of_a_selective_scan(shape: tuple[int, ...], save_every: int, packed: bool, whole: bool) -> None:
    batch, num_positions, channels, width = shape
    x, dt, A_log, B, C, D, dt_bias = selective_inputs((batch, 2 * num_positions, channels * (1 if whole else 2), width), (BF16, BF16))
    rows, own = slice(num_positions, None), slice(0, channels)
    inputs = [x[:, rows, own], dt[:, rows, own], A_log[own], B[:, rows], C[:, rows], D[own], dt_bias[own]]
    starts = starts_of(batch, 2 * num_positions, packed)
    starts = None if starts is None else starts[:, rows]
    count = -(-num_positions // save_every)
    states = torch.empty(batch, 2 * count, x.shape[2], width)[:, count:, own]
    y, first = torch.empty_like(x)[:, rows, own], torch.empty(batch, channels, width)
    check(selective_piece._piece, first, *inputs, starts, save_every, y, states)
    totals = [torch.zeros(each.shape, dtype=BF16 if index < 2 else FP32) for index, each in enumerate(inputs)]
    check(selective_piece._piece_backward, first, y, *inputs, starts, states, save_every, *totals)


def test_copies_of_operands_are_counted() -> None:
    inputs = selective_inputs((2, 9, 6, 4), (BF16, BF16))
    inputs[0], inputs[2] = inputs[0].mT.contiguous().mT, inputs[2].mT.contiguous().mT
    check(selective_op._selective_scan, *inputs, None, 4)
    grad, states = torch.empty((), dtype=BF16).expand(2, 9, 6), torch.empty(2, 3, 4, 6).mT
    check(selective_op._selective_scan_backward, grad, *inputs, None, states, 4, [True] * 7)
