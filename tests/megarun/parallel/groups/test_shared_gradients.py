"""Gradients of a block that several stages hold, where those stages are chunks of one rank."""

from typing import Any

import pytest
import torch
from torch import nn

from megaplan.inventory.build import build_inventory
from megaplan.layout.ranks import Layout, Slot
from megaplan.spec.models import Spec
from megarun.engine.build import build_stage, materialise
from megarun.engine.initialise import initialise
from megarun.model.stage import Stage
from megarun.parallel.groups.mesh import build_mesh
from megarun.parallel.groups.shared_gradients import SharedGradients

pytestmark = pytest.mark.runtime
CPU = torch.device("cpu")


class Holder(nn.Module):
    """A chunk with a copy of the embedding and of a side embedding, and its own layer."""

    def __init__(self, gradient: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 2)
        self.ngram = nn.Linear(2, 2, bias=False)
        self.layers = nn.ModuleDict({"0": nn.Linear(2, 2, bias=False)})
        for parameter in self.parameters():
            parameter.grad = torch.full_like(parameter, gradient)


@pytest.mark.requirement("R-62")
def test_chunks_of_one_rank_share_their_gradient(one_process: Any, spec_with: Any) -> None:
    """Both copies get the sum, as they do across ranks; a chunk without the block is left alone."""
    mesh = build_mesh(Spec.model_validate(spec_with()).mesh, CPU)
    shared = "embedding", "ngram"
    copies = (), shared
    slots = tuple(Slot(index, 0, index, index, index + 1, (*shared, f"layers.{index}"), copies[index]) for index in range(2))
    first, last, other = Holder(1.0), Holder(2.0), nn.Linear(2, 2)
    SharedGradients(Layout("v", slots, 1, 2), mesh).reduce([first, other, last])
    for holder, own in ((first, 1.0), (last, 2.0)):
        assert torch.equal(holder.embedding.weight.grad, torch.full((3, 2), 3.0))
        assert torch.equal(holder.ngram.weight.grad, torch.full((2, 2), 3.0))
        assert torch.equal(holder.layers["0"].weight.grad, torch.full((2, 2), own))
    assert other.weight.grad is None
    last.embedding.weight.grad = None
    with pytest.raises(RuntimeError, match=r"embedding\.weight has no gradient"):
        SharedGradients(Layout("v", slots, 1, 2), mesh).reduce([first, last])


def test_the_output_of_a_stage_is_not_a_view(spec_with: Any) -> None:
    """torch cannot detach a view in place where it splits a backward; recomputed or not, every family ends in its own sum."""
    for policy in ("none", "selective"):
        spec = Spec.model_validate(spec_with({"recompute.default": policy, "mesh.pp": 5, "schedule.num_microbatches": 5}))
        inventory = build_inventory(spec)
        for index in range(4):
            blocks = ("embedding",) * (index == 0) + (f"layers.{index}",)
            stage: Stage = build_stage(spec, inventory, Slot(index, index, 0, index, index + 1, blocks))
            materialise(stage, CPU)
            initialise(stage, inventory, 0)
            given = torch.zeros((1, 24), dtype=torch.int64) if index == 0 else torch.randn(1, 24, 32, requires_grad=True)
            assert not stage(given)._is_view()
