"""Rank and coordinate on both meshes, groups, and which groups leave a node."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaplan.layout.ranks import expert_coordinate, rank_coordinate
from megaplan.spec.models import Mesh

DEGREE = st.sampled_from([1, 2, 4])


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    degrees = {axis: draw(DEGREE) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp")}
    shared = degrees["dp_shard"] * degrees["cp"] * degrees["tp"]
    ep = draw(st.sampled_from([d for d in (1, 2, 4, 8) if shared % d == 0]))
    etp = draw(st.sampled_from([d for d in (1, 2, 4) if shared // ep % d == 0]))
    return Mesh(**degrees, ep=ep, etp=etp)


def test_ranks_are_row_major_with_tp_fastest() -> None:
    mesh = Mesh(pp=2, dp_replicate=1, dp_shard=2, cp=1, tp=2)
    assert rank_coordinate(mesh, 5) == {"pp": 1, "dp_replicate": 0, "dp_shard": 0, "cp": 0, "tp": 1}
    assert rank_coordinate(mesh, 2) == {"pp": 0, "dp_replicate": 0, "dp_shard": 1, "cp": 0, "tp": 0}


@pytest.mark.requirement("R-31")
def test_the_expert_mesh_rereads_the_same_ranks() -> None:
    mesh = Mesh(pp=2, dp_shard=4, tp=2, ep=4, etp=1)
    assert mesh.efsdp == 2
    assert expert_coordinate(mesh, 6) == {"pp": 0, "dp_replicate": 0, "efsdp": 1, "ep": 2, "etp": 0}


@given(meshes())
def test_ranks_count_the_coordinates_of_a_mesh(mesh: Mesh) -> None:
    """Each coordinate once, the last axis fastest; both meshes have one pipeline."""
    for coordinate in (rank_coordinate, expert_coordinate):
        found = [tuple(coordinate(mesh, rank).values()) for rank in range(mesh.world_size)]
        assert found == sorted(set(found))
        assert [place[0] for place in found] == [rank_coordinate(mesh, rank)["pp"] for rank in range(mesh.world_size)]


@pytest.mark.parametrize("rank", [-1, 8])
def test_a_rank_outside_the_mesh_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match="0 to 7"):
        rank_coordinate(Mesh(dp_shard=8), rank)
