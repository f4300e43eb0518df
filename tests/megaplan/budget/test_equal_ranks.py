"""Ranks that hold the same, beside a look at every rank."""

import random
from bisect import bisect_right

import pytest

from megaplan.budget.rank import all_offsets, equal_runs
from megaplan.hosts.megarun.sizes import Uneven
from megaplan.spec.models import Mesh


def looked_at(mesh: Mesh, uneven: list[Uneven], places: set[int]) -> list[list[int]]:
    """Offsets by how many boundaries of each kind lie behind them."""
    dense = sorted(bound for tensor in uneven if not tensor.expert for bound in tensor.boundaries)
    expert = sorted(bound for tensor in uneven if tensor.expert for bound in tensor.boundaries)
    found: dict[tuple[int, int], list[int]] = {}
    for offset in range(mesh.world_size // mesh.pp):
        if offset // mesh.tp % mesh.cp in places:
            shard, bank = offset // (mesh.cp * mesh.tp) % mesh.dp_shard, offset // (mesh.ep * mesh.etp) % mesh.efsdp
            found.setdefault((bisect_right(dense, shard), bisect_right(expert, bank)), []).append(offset)
    return list(found.values())


@pytest.mark.parametrize("seed", range(60))
def test_runs_are_what_a_look_at_every_rank_finds(seed: int) -> None:
    draw = random.Random(seed)
    tp, cp, shard = draw.choice((1, 2, 3)), draw.choice((1, 2, 4)), draw.choice((1, 2, 6, 16))
    ep = draw.choice([degree for degree in (1, 2, 4, 8, 12) if shard * cp * tp % degree == 0])
    mesh = Mesh(pp=2, tp=tp, cp=cp, dp_shard=shard, ep=ep, dp_replicate=draw.choice((1, 3)))
    uneven = []
    for _ in range(draw.randrange(4)):
        expert = draw.random() < 0.5
        degree = mesh.efsdp if expert else mesh.dp_shard
        rows = draw.randrange(1, 4 * degree + 1)
        uneven.append(Uneven(rows, -(-rows // degree), degree, 4, 4, expert, matrix=False))
    places = {cp - 1} if draw.random() < 0.5 else set(range(cp))
    runs = equal_runs(mesh, uneven, places)
    listed = [all_offsets(mesh, run, places) for run in runs]
    assert listed == looked_at(mesh, uneven, places)
    assert [run.first for run in runs] == [offsets[0] for offsets in listed]
