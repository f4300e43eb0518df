"""Parts of a tensor: what a rank owns, and the whole again."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megaplan.inventory.build import build_inventory
from megaplan.inventory.tensors import Group, Owner, ParamTensor
from megaplan.spec.models import Spec
from megarun.parallel.groups.ownership import local_part

pytestmark = pytest.mark.runtime


def place(tp: int, index: int, ep: int = 1, expert_index: int = 0, etp: int = 1, slice_index: int = 0) -> Any:
    return SimpleNamespace(
        coordinate={"tp": index},
        size=lambda axis: {"tp": tp}[axis],
        expert_coordinate={"ep": expert_index, "etp": slice_index},
        expert_size=lambda axis: {"ep": ep, "etp": etp}[axis],
    )


def whole_from_parts(tensor: ParamTensor, parts: Sequence[Tensor]) -> Tensor:
    """A tensor-parallel tensor from the parts of all its ranks, by TP rank; one part is the whole."""
    dim = tensor.tp_dim
    if len(parts) == 1 or dim is None:
        return parts[0]
    degree = len(parts)
    sizes = [size // degree for size in tensor.tp_parts or (tensor.shape[dim],)]
    pieces = [torch.split(part, sizes, dim) for part in parts]
    return torch.cat([piece[index] for index in range(len(sizes)) for piece in pieces], dim)


@pytest.mark.requirement("R-17")
@pytest.mark.parametrize("tp", [1, 2])
def test_parts_have_the_ledgers_shape_and_make_the_whole(tp: int, spec_with: Any) -> None:
    """Every tensor of every family; replicated ones are whole on every rank."""
    spec = Spec.model_validate(
        spec_with({"model.recurrent.num_heads": 4, "mesh": {"tp": tp, "vocab_parallel": True}, "model.vocab_size": 64})
    )
    for name, tensor in build_inventory(spec).tensors():
        whole = torch.arange(tensor.elements).view(tensor.shape)
        parts = [local_part(tensor, whole, place(tp, index)) for index in range(tp)]
        assert {tuple(part.shape) for part in parts} == {tensor.local_shape(tp, 1, 1)}, name
        held = parts if tensor.owner is Owner.TENSOR_PARALLEL else parts[:1]
        assert torch.equal(whole_from_parts(tensor, held), whole), name


@pytest.mark.requirement("R-16")
def test_ep_cuts_banks_by_expert_and_nothing_else(spec_with: Any) -> None:
    """Rank 1 of 2 owns the second half of the experts, whole; the router stays whole."""
    spec = Spec.model_validate(spec_with({"mesh": {"dp_shard": 2, "ep": 2}}))
    cut = set()
    for name, tensor in build_inventory(spec).tensors():
        whole = torch.arange(tensor.elements).view(tensor.shape)
        parts = [local_part(tensor, whole, place(1, 0, 2, index)) for index in range(2)]
        assert {tuple(part.shape) for part in parts} == {tensor.local_shape(1, 2, 1)}, name
        if parts[0].shape != whole.shape:
            assert torch.equal(torch.cat(parts), whole)
            cut.add(name)
    assert cut == {f"layers.2.experts.{matrix}_proj" for matrix in ("gate", "up", "down")}


@pytest.mark.requirement("R-16")
def test_etp_cuts_the_width_of_each_expert(spec_with: Any) -> None:
    """The rows of up and gate, the columns of down, of the experts that the ranks of ep share."""
    spec = Spec.model_validate(spec_with({"mesh": {"dp_shard": 4, "ep": 2, "etp": 2}}))
    for name, tensor in build_inventory(spec).tensors():
        if tensor.owner is not Owner.EXPERT_PARALLEL:
            continue
        assert tensor.tp_dim is not None
        whole = torch.arange(tensor.elements).view(tensor.shape)
        parts = [[local_part(tensor, whole, place(1, 0, 2, expert, 2, index)) for index in range(2)] for expert in range(2)]
        assert {tuple(part.shape) for row in parts for part in row} == {tensor.local_shape(1, 2, 2)}, name
        assert torch.equal(torch.cat([torch.cat(row, tensor.tp_dim) for row in parts]), whole), name
        assert tensor.tp_dim == (2 if name.endswith("down_proj") else 1), name


@pytest.mark.requirement("R-17")
def test_a_fused_projection_is_cut_part_by_part() -> None:
    """Rank 1 of 2 owns the second half of each part, not the second half of the whole."""
    tensor = ParamTensor("in_proj.weight", (8, 1), Owner.TENSOR_PARALLEL, Group.OTHER, tp_dim=0, tp_parts=(4, 2, 2))
    assert local_part(tensor, torch.arange(8).view(8, 1), place(2, 1)).flatten().tolist() == [2, 3, 5, 7]


def test_what_does_not_divide_is_refused() -> None:
    """A part is never rounded."""
    tensor = ParamTensor("q_proj.weight", (6, 2), Owner.TENSOR_PARALLEL, Group.MATRIX, tp_dim=0)
    with pytest.raises(ValueError, match=r"q_proj.weight: 6 along dim 0 is not divisible by 4 ranks"):
        local_part(tensor, torch.zeros(6, 2), place(4, 0))
