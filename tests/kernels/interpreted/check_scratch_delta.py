"""Scratch bytes of the gated delta rule's kernels, compared with the stated ones."""

from typing import Any

import pytest
import torch
from scratch_checks import BF16, DTYPES, FP32, PACKED, check, make_idle, starts_of
from torch import Tensor

from megakernels.ops.gated_delta import facts as delta_sizes
from megakernels.ops.gated_delta import op as delta_op
from megakernels.ops.gated_delta import piece as delta_piece


@pytest.fixture(autouse=True)
def _idle(monkeypatch: pytest.MonkeyPatch) -> None:
    make_idle(monkeypatch)


DELTA = [
    ((2, 50, 2, 4, 16, 24), 16, False),
    ((1, 7, 3, 3, 5, 7), 3, True),
    ((3, 130, 1, 2, 32, 9), 200, True),
    ((2, 40, 8, 8, 20, 33), 1, False),
    ((1, 1, 64, 64, 1, 1), 1, True),
    ((1, 70, 2, 120, 3, 32), 64, False),
]
"""Batch, positions, key heads, heads, widths of a key and of a value; positions between two saved states; a decay for each row."""
EACH_DELTA = pytest.mark.parametrize(("shape", "save_every", "per_row"), DELTA, ids=str)


def delta_inputs(shape: tuple[int, ...], per_row: bool, dtypes: tuple[torch.dtype, torch.dtype]) -> list[Tensor]:
    """q and k are parts of wider rows, as a block's split has them; then the parameters."""
    (batch, num_positions, groups, heads, keys, values), (dtype, of_parameters) = shape, dtypes
    rows = (keys,) if per_row else ()
    q, k = torch.empty(batch, num_positions, 2 * groups * keys, dtype=dtype).chunk(2, 2)
    tokens = [torch.empty(batch, num_positions, heads, *each, dtype=dtype) for each in ((values,), rows, ())]
    parameters = [torch.empty(heads, *each, dtype=of_parameters) for each in ((), rows)]
    return [q.unflatten(2, (groups, keys)), k.unflatten(2, (groups, keys)), *tokens, *parameters]


@PACKED
@DTYPES
@EACH_DELTA
@pytest.mark.parametrize("part_bytes", [delta_sizes.PART_BYTES, 1])
def test_delta_rule(
    shape: tuple[int, ...], save_every: int, per_row: bool, dtypes: Any, packed: bool, part_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_sizes, "PART_BYTES", part_bytes)
    batch, num_positions, _, heads, keys, values = shape
    inputs, starts, settings = delta_inputs(shape, per_row, dtypes), starts_of(batch, num_positions, packed), (64, save_every, 1.0)
    assert check(delta_op._gated_delta, *inputs, starts, *settings)
    states = torch.empty(batch, -(-num_positions // save_every), heads, keys, values)
    for needs in ([True] * 7, [False, True, True, False, True, False, True]):
        assert check(delta_op._gated_delta_backward, torch.empty_like(inputs[2]), *inputs, starts, states, *settings, needs)


@PACKED
@EACH_DELTA
@pytest.mark.parametrize("whole", [False, True], ids=["one lane", "all lanes"])
def test_piece_of_a_delta_rule(shape: tuple[int, ...], save_every: int, per_row: bool, packed: bool, whole: bool) -> None:
    batch, num_positions, groups, heads, keys, values = shape
    lanes = 1 if whole else 2
    wide = delta_inputs((batch, 2 * num_positions, groups * lanes, heads * lanes, keys, values), per_row, (BF16, BF16))
    rows, heads_of, groups_of = slice(num_positions, None), slice(0, heads), slice(0, groups)
    inputs = [each[:, rows, groups_of if index < 2 else heads_of] for index, each in enumerate(wide[:5])]
    inputs += [each[heads_of] for each in wide[5:]]
    starts = starts_of(batch, 2 * num_positions, packed)
    starts = None if starts is None else starts[:, rows]
    count, settings = -(-num_positions // save_every), (64, save_every, 1.0)
    states = torch.empty(batch, 2 * count, heads * lanes, keys, values)[:, count:, heads_of]
    y, first = torch.empty_like(wide[2])[:, rows, heads_of], torch.empty(batch, heads, keys, values)
    check(delta_piece._piece, first, *inputs, starts, *settings, y, states)
    totals = [torch.zeros(each.shape, dtype=BF16 if index < 5 else FP32) for index, each in enumerate(inputs)]
    check(delta_piece._piece_backward, first, y, *inputs, starts, states, *settings, *totals)
