"""The comparison can fail, names what it should, and puts shards together."""

import copy
from typing import Any

import pytest
import torch
from parity_cells import Cell
from parity_compare import first_difference, whole
from parity_world import CellFailedError, Worlds

from megaplan.inventory.tensors import Group, Owner, ParamTensor
from megaplan.spec.models import Mesh

pytestmark = [pytest.mark.runtime, pytest.mark.jobs]


@pytest.fixture(scope="module")
def record(worlds: Worlds) -> Any:
    return worlds.reference(Cell("one").reference)


def _plant(record: Any, key: str, name: str) -> Any:
    wrong = copy.deepcopy(record)
    wrong[key][name][0].view(-1)[0] += 1e-3
    return wrong


@pytest.mark.requirement("R-63")
@pytest.mark.parametrize("key", ["initial", "gradients", "parameters"])
def test_the_first_tensor_in_model_order_is_named(record: Any, key: str) -> None:
    """Two planted differences; the embedding comes first of all, the final norm after the layers."""
    case = Cell("one").reference
    assert first_difference(case, [record], record, 0.0) is None
    found = first_difference(case, [_plant(_plant(record, key, "final_norm.weight"), key, "layers.3.up_proj.weight")], record, 1e-5)
    assert found is not None
    assert (found.what, found.name) == (key, "layers.3.up_proj.weight")
    found = first_difference(case, [_plant(_plant(record, key, "embedding.weight"), key, "layers.0.o_proj.weight")], record, 1e-5)
    assert found is not None
    assert found.name == "embedding.weight"


def test_an_entry_whose_gradient_is_rounding_is_not_compared(record: Any) -> None:
    """AdamW's step is as large for it as for any, in a tensor that is only steps; one without gradient makes no step."""
    case, name = Cell("one").reference, "layers.1.conv1d.bias"
    small = copy.deepcopy(record)
    gradient = small["gradients"][name][0]
    for share, found in ((5e-7, False), (0.0, True), (2e-6, True)):
        gradient.view(-1)[0] = share * gradient.abs().max()
        assert (first_difference(case, [_plant(small, "parameters", name)], small, 1e-5) is not None) == found
    matrix = small["gradients"]["layers.0.o_proj.weight"][0]
    matrix.view(-1)[0] = 5e-7 * matrix.abs().max()
    assert first_difference(case, [_plant(small, "parameters", "layers.0.o_proj.weight")], small, 1e-5) is not None
    gradient.mul_(1e-7).view(-1)[-1] = 1.0  # all others are rounding now
    assert first_difference(case, [small], small, 1e-5) is None
    assert first_difference(case, [_plant(small, "parameters", name)], small, 1e-5) is not None


def test_losses_missing_tensors_and_ranks_that_disagree_are_found(record: Any) -> None:
    """Everything a rank reports is looked at."""
    case, two = Cell("one").reference, Cell("two", {"dp_shard": 2}).case
    wrong = copy.deepcopy(record)
    wrong["losses"][1] *= 1.001
    assert "losses: the first tensor that differs is step 2" in str(first_difference(case, [wrong], record, 1e-5))
    for key in ("router_load", "router_entropy", "idle_experts"):
        other = copy.deepcopy(record)
        other[key][-1] += 1
        assert f"{key}: the first tensor that differs is step 3" in str(first_difference(case, [other], record, 1e-5))
    assert "losses: ranks disagree" in str(first_difference(two, [record, wrong], record, 1.0))
    wrong = copy.deepcopy(record)
    del wrong["gradients"]["head.weight"]
    assert "gradients: one side has no head.weight" in str(first_difference(case, [wrong], record, 1e-5))
    found = first_difference(two, [record, _plant(record, "parameters", "head.weight")], record, 1.0)
    assert "parameters: ranks that hold the same part disagree" in str(found)


def test_a_failing_case_names_its_rank_and_the_next_one_runs(worlds: Worlds) -> None:
    """A world that failed is replaced."""
    broken = copy.deepcopy(Cell("dp2", {"dp_shard": 2}).case)
    broken["spans"] = [[0, 3]]
    with pytest.raises(CellFailedError, match=r"rank \d failed first: MP325"):
        worlds.train(broken, 2)
    assert len(worlds.train(Cell("dp2", {"dp_shard": 2}).case, 2)) == 2


def test_shards_are_joined_by_owner_and_parts() -> None:
    """Fused parts shard one by one; a head that two ranks repeat counts once; banks split over ep; replicas must agree."""
    value = torch.arange(24.0).view(12, 2)
    fused = ParamTensor("p", (12, 2), Owner.TENSOR_PARALLEL, Group.OTHER, tp_dim=0, tp_parts=(4, 8))
    first, second = value.split([4, 8])
    shards = [[torch.cat([first[rank * 2 : rank * 2 + 2], second[rank * 4 : rank * 4 + 4]])] for rank in range(2)]
    found = whole(fused, shards, Mesh(tp=2))
    assert found is not None
    assert torch.equal(found, value)
    heads = ParamTensor("p", (12, 2), Owner.TENSOR_PARALLEL, Group.OTHER, tp_dim=0)
    repeated = [[half] for half in (value[:6], value[:6], value[6:], value[6:])]
    found = whole(heads, repeated, Mesh(tp=4))
    assert found is not None
    assert torch.equal(found, value)
    bank = ParamTensor("p", (12, 2), Owner.EXPERT_PARALLEL, Group.MATRIX)
    found = whole(bank, [[value[:6]], [value[6:]], [value[:6]], [value[6:]]], Mesh(dp_shard=4, ep=2))
    assert found is not None
    assert torch.equal(found, value)
    replicated = ParamTensor("p", (12, 2), Owner.REPLICATED, Group.OTHER)
    assert whole(replicated, [[value], [value + 1]], Mesh(tp=2)) is None
    with pytest.raises(ValueError, match="make no"):
        whole(replicated, [[value[:6]]], Mesh())
