"""Owners of the experts, and numbers of rows that travel."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megaplan.families.moe.program import ExpertMesh, received_rows
from megaplan.layout.ranks import EXPERT_AXES, expert_coordinate
from megaplan.spec.models import Spec
from megarun.parallel.groups.expert import ExpertParallel, MeasuredRouting, StatedRouting, expert_parallel, spread
from megarun.parallel.groups.mesh import build_mesh
from megarun.trace.fake import lone_rank

MESHES = {
    "ep takes half of dp_shard": {"dp_shard": 4, "ep": 2},
    "ep takes tp and a part of dp_shard": {"dp_shard": 4, "tp": 2, "ep": 4},
    "tp without ep": {"dp_shard": 2, "tp": 2},
    "all": {"pp": 2, "dp_replicate": 2, "dp_shard": 2, "tp": 2, "ep": 2},
    "slices": {"dp_shard": 4, "tp": 2, "ep": 2, "etp": 2},
}


def experts(degree: int, index: int = 0) -> ExpertParallel:
    return ExpertParallel(degree, index, None, MeasuredRouting())


@pytest.mark.requirement("R-58")
def test_consecutive_experts_live_on_one_rank() -> None:
    assert [experts(4).owner(expert, 8) for expert in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert experts(4).share(8) == 2


@pytest.mark.requirement("R-31")
@pytest.mark.parametrize("degrees", MESHES.values(), ids=MESHES)
def test_groups_are_those_of_the_layout(spec_with: Any, degrees: dict[str, int]) -> None:
    """On every rank: the EP group borrows neighbouring ranks, and what is left of the data ranks shards its bank."""
    mesh = Spec.model_validate(spec_with({"mesh": degrees, "batch.seq_length": 32})).mesh
    places = [expert_coordinate(mesh, rank) for rank in range(mesh.world_size)]
    for rank in range(mesh.world_size):
        expected = {
            axis: [
                other
                for other, place in enumerate(places)
                if all(place[each] == places[rank][each] for each in EXPERT_AXES if each != axis)
            ]
            for axis in ("efsdp", "ep", "etp")
        }
        with lone_rank(rank, mesh.world_size):
            found = build_mesh(mesh, torch.device("cpu"))
            assert {axis: dist.get_process_group_ranks(found.experts[axis].get_group()) for axis in expected} == expected
            shards = found.bank_mesh if found.bank_mesh.ndim == 1 else found.bank_mesh["efsdp"]
            assert dist.get_process_group_ranks(shards.get_group()) == expected["efsdp"]
            assert found.bank_mesh.ndim == (2 if mesh.dp_replicate > 1 else 1)
            assert found.expert_size("ep") == mesh.ep


@pytest.mark.requirement("R-58")
def test_measured_splits_are_what_the_counts_say() -> None:
    sent, received = torch.tensor([[3, 0], [0, 2]], dtype=torch.int32), torch.tensor([[3, 0], [0, 0]], dtype=torch.int32)
    splits = MeasuredRouting()(sent, received)
    assert (splits.sent, splits.received, splits.num_received) == ((3, 2), (3, 0), 3)


@pytest.mark.parametrize("skew", [1.0, 1.7, 2.0, 8.0])
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("null_experts", [0, 1])
def test_stated_splits_add_up(spec_with: Any, degree: int, skew: float, null_experts: int) -> None:
    """A rank sends each of its rows once and receives what the estimate says the busiest rank receives."""
    changed = {"model.moe.routing_skew": skew, "model.moe.null_experts": null_experts}
    moe = Spec.model_validate(spec_with(changed | {"mesh": {"dp_shard": 4, "ep": degree}})).model.moe
    assert moe is not None
    num_tokens = 37
    for index in range(degree):
        splits = StatedRouting(moe, num_tokens, ExpertMesh(degree, 1), index)(torch.empty(0), torch.empty(0))
        assert len(splits.sent) == len(splits.received) == degree
        assert min(*splits.sent, *splits.received) >= 0
        assert sum(splits.sent) == moe.rows_of(num_tokens)
        assert splits.num_received == received_rows(moe, num_tokens, ExpertMesh(degree, 1))
        assert splits.sent[index] == splits.received[index]
        if skew > 1:
            assert splits.received[index] > min(splits.sent)


def test_stated_routing_counts_the_tokens_of_a_rank(spec_with: Any) -> None:
    """Under SP a rank has a part of each sequence."""
    spec = Spec.model_validate(spec_with({"mesh": {"tp": 2, "dp_shard": 2, "ep": 4}, "batch": {"micro_batch_size": 2, "seq_length": 24}}))
    with lone_rank(1, 4):
        ep = expert_parallel(spec, build_mesh(spec.mesh, torch.device("cpu")), measured=False)
        splits = ep.routing(torch.empty(0), torch.empty(0))
    assert (ep.degree, ep.index) == (4, 1)
    assert sum(splits.sent) == 2 * 24 // 2 * 2


@pytest.mark.requirement("R-58")
def test_rows_are_gathered_by_the_ranks_with_slices() -> None:
    """Two ETP ranks of two EP ranks each: own rows are those that arrived at this slice, and its experts have those of both."""
    sent = torch.tensor([[3, 0], [0, 2]], dtype=torch.int32)
    received = torch.tensor([[3, 0], [0, 0], [1, 1], [0, 5]], dtype=torch.int32)
    for index, own in enumerate(((3, 0), (2, 5))):
        splits = MeasuredRouting(index)(sent, received)
        assert (splits.sent, splits.received, splits.gathered, splits.num_received) == ((3, 2), own, (3, 7), 10)


@pytest.mark.parametrize("mesh", [ExpertMesh(1, 2), ExpertMesh(4, 3)])
def test_stated_rows_arrive_at_every_slice(spec_with: Any, mesh: ExpertMesh) -> None:
    moe = Spec.model_validate(spec_with({"model.moe.routing_skew": 1.7})).model.moe
    assert moe is not None
    splits = StatedRouting(moe, 37, mesh, 0)(torch.empty(0), torch.empty(0))
    assert splits.gathered == (sum(splits.received),) * mesh.etp
    assert splits.num_received == received_rows(moe, 37, mesh)


def test_spread_leaves_nothing_over() -> None:
    assert spread(10, 4) == (3, 3, 2, 2)
    assert spread(0, 3) == (0, 0, 0)


@pytest.mark.parametrize("mesh", [ExpertMesh(1, 2), ExpertMesh(4, 1), ExpertMesh(4, 3)])
@pytest.mark.parametrize("skew", [1.0, 1.7, 4.0])
@pytest.mark.parametrize("null_experts", [0, 1])
def test_stated_rows_of_experts_are_those_of_all_tokens(spec_with: Any, mesh: ExpertMesh, skew: float, null_experts: int) -> None:
    moe = Spec.model_validate(spec_with({"model.moe.routing_skew": skew, "model.moe.null_experts": null_experts})).model.moe
    assert moe is not None
    for index in range(mesh.ep):
        rows = StatedRouting(moe, 37, mesh, index).of_experts(torch.empty(0))
        assert sum(rows) == moe.rows_of(37) * mesh.ep * mesh.etp
        assert min(rows) >= 0
        assert rows[index] == received_rows(moe, 37, mesh)


def gathered(whole: torch.Tensor) -> ExpertParallel:
    """The second of two ranks, in whose group a gather gives this."""

    class Given(ExpertParallel):
        def gather(self, tokens: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
            return whole

    return Given(2, 1, None, MeasuredRouting())


def test_own_rows_are_those_of_the_ranks_experts() -> None:
    """Experts 2 and 3 are the second rank's, and 4 is a null expert."""
    indices = torch.tensor([[2, 0], [4, 3], [1, 2], [0, 1]], dtype=torch.int32)
    rows, counts = gathered(indices).own_rows(indices[2:], 5, 4)
    assert (rows.tolist(), counts.tolist()) == ([0, 5, 3], [2, 1])


def test_own_buffers_are_in_the_order_of_experts_and_ranks() -> None:
    """Two ranks of six pairs with buffers of two rows for each of four experts; an empty row stays empty."""
    places = torch.tensor([[0, 1, 2, -1, 3, 4, 5, -1], [5, -1, 4, 3, 2, -1, 1, 0]], dtype=torch.int32)
    rows, counts = gathered(places.flatten()).own_buffers(places[1], 4, 6)
    assert rows.tolist() == [3, 4, 8, -1, 5, -1, 7, 6]
    assert counts.tolist() == [4, 4]
