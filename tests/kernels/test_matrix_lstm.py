"""mLSTM: bytes that the operation holds inside itself, gates beyond their caps, and arguments that do not fit."""

import pytest
import torch
from storages import Storages
from torch.utils._pytree import tree_leaves

from megakernels import mlstm, scratch_bytes
from megakernels.ops.matrix_lstm.op import _mlstm, _mlstm_backward

LARGE = {"pairs": (2, 6, 128, 64), "values": (3, 200, 8, 16), "keys": (200, 3, 8, 32), "states": (96, 160, 24, 8)}
"""Widths of a key and a value, positions and a chunk, by what is large."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("large", LARGE)
def test_it_holds_what_it_states(large: str, batch: int, dtype: torch.dtype) -> None:
    key, value, positions, chunk = LARGE[large]
    rows = batch, positions, 3
    q, k, v, *gates = (torch.randn(*rows, *width).to(dtype) for width in ((key,), (key,), (value,), (), ()))
    given = q, k, v, *gates, None, chunk, 15.0
    with Storages() as found:
        made = _mlstm._init_fn(*given)
    _within(scratch_bytes("megakernels.mlstm.default", given), found.scratch(tree_leaves(made)))
    given = v, q, k, v, *gates, None, made[1], chunk, 15.0, [True] * 5
    with Storages() as found:
        gradients = _mlstm_backward._init_fn(*given)
    _within(scratch_bytes("megakernels.mlstm_backward.default", given), found.scratch(tree_leaves(gradients)))


def _within(stated: int, held: int) -> None:
    """Masks, and numbers of one head, are not stated."""
    assert 0 <= held - stated <= 0.03 * held


def test_gates_beyond_their_caps_are_bounded() -> None:
    q, k, v = (torch.randn(1, 40, 2, 8, requires_grad=True) for _ in range(3))
    gates = [torch.full((1, 40, 2), sign * 1e4, requires_grad=True) for sign in (1, -1)]
    for order in (gates, gates[::-1]):
        y = mlstm(q, k, v, *order, 16, soft_cap=30.0)
        found = torch.autograd.grad(y, [q, k, v, *order], torch.ones_like(y))
        assert all(each.isfinite().all() for each in (y, *found))


@pytest.mark.parametrize(("change", "said"), [({"soft_cap": 31.0}, "at most 30"), ({"chunk_size": 0}, "at least 1")])
def test_numbers_that_do_not_fit(change: dict[str, float], said: str) -> None:
    q, gate = torch.ones(1, 2, 1, 3), torch.ones(1, 2, 1)
    with pytest.raises(ValueError, match=said):
        mlstm(q, q, q, gate, gate, **{"chunk_size": 4, **change})
    with pytest.raises(ValueError, match="both gates"):
        mlstm(q, q, q, gate, gate[:, :1], 4)
