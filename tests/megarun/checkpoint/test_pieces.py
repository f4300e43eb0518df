"""The boxes of a bank whose shards are rows: saved by one split, read by another."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megaplan.inventory.tensors import Group, Owner, ParamTensor
from megarun.checkpoint import pieces
from megarun.checkpoint.pieces import Pieces, pieces_of

pytestmark = [pytest.mark.runtime, pytest.mark.requirement("R-70")]


class Shard(torch.Tensor):
    """Replaces a DTensor whose `placements` are its size and offset."""

    def to_local(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def held(whole: torch.Tensor, ep: int, shards: int, monkeypatch: pytest.MonkeyPatch) -> list[Pieces]:
    """Rows of a bank that every rank of ep · shards holds."""
    tensor = ParamTensor("experts.up_proj", tuple(whole.shape), Owner.EXPERT_PARALLEL, Group.MATRIX, num_matrices=whole.shape[0])
    monkeypatch.setattr(pieces, "DTensor", Shard)

    def place(shape: Any, mesh: Any, placements: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        del shape, mesh
        return placements

    monkeypatch.setattr(pieces, "compute_local_shape_and_global_offset", place)
    found = []
    for index in range(ep):
        part = whole.chunk(ep)[index]
        rows = part.reshape(tensor.stored_shape(tuple(part.shape)))
        size = -(-len(rows) // shards)
        for start in range(0, size * shards, size):
            local = rows[start : start + size].clone().as_subclass(Shard)
            local.device_mesh, local.placements = None, (tuple(local.shape), (min(start, len(rows)), 0))  # type: ignore[attr-defined]
            mesh: Any = SimpleNamespace(expert_coordinate={"ep": index, "etp": 0}, expert_size=lambda axis: {"ep": ep, "etp": 1}[axis])
            found.append(pieces_of(tensor, local, mesh))
    return found


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 5), st.integers(1, 3), st.integers(1, 11))
def test_every_row_is_in_one_box_and_holds_its_own_numbers(ep: int, experts: int, rows: int, columns: int, shards: int) -> None:
    """Shards that end inside an expert, span several, or have none: together the whole, nothing twice, at most three boxes each."""
    whole = torch.arange(ep * experts * rows * columns, dtype=torch.float32).reshape(ep * experts, rows, columns)
    found = torch.full_like(whole, -1)
    with pytest.MonkeyPatch.context() as patch:
        for each in held(whole, ep, shards, patch):
            items = each.__create_write_items__("bank", None)
            assert len(items) == len(each.__create_chunk_list__()) <= 3
            for item in items:
                assert item.tensor_data is not None
                chunk = item.tensor_data.chunk
                box = tuple(slice(at, at + length) for at, length in zip(chunk.offsets, chunk.sizes, strict=True))
                assert bool((found[box] == -1).all())
                value = each.__get_tensor_shard__(item.index)
                assert value.shape == chunk.sizes
                found[box] = value
    assert torch.equal(found, whole)


def test_what_is_read_lands_in_the_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    """A box is a view of the rank's own rows."""
    whole = torch.arange(24.0).reshape(2, 4, 3)
    for each in held(whole, 1, 3, monkeypatch):
        for item in each.__create_write_items__("bank", None):
            each.__get_tensor_shard__(item.index).zero_()
        assert not each.local.any()
