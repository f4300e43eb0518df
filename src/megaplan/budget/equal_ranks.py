"""Ranks of a pipeline rank with equal bytes: if shards are uneven, neighbouring data ranks up to a boundary are equal.

A rank is its offset in its pipeline rank. Every replica of `dp_replicate` repeats the first one, and boundaries mark where ranks begin to
differ, so that ranks, of which a mesh may have a million, are counted one by one only where they are listed.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from itertools import pairwise
from typing import NamedTuple

from megaplan.hosts.megarun.optimizer import Uneven
from megaplan.spec.models import Mesh


class EqualRanks(NamedTuple):
    """Ranks with equal bytes.

    Attributes:
        first: The first offset.
        stop: Offset after the last one of the first replica.
    """

    first: int
    stop: int


def equal_runs(mesh: Mesh, uneven: Iterable[Uneven], places: Container[int], shards: int | None = None) -> tuple[EqualRanks, ...]:
    """The runs of offsets whose ranks hold the same bytes of every tensor.

    Args:
        mesh: Degrees.
        uneven: Tensors of which data ranks hold different bytes.
        places: Places in the CP group of the requested ranks.
        shards: Ranks that share a dense tensor; `dp_shard` by default.
    """
    size = mesh.dp_shard * mesh.cp * mesh.tp // (shards or mesh.dp_shard), mesh.ep * mesh.etp
    return runs_between(mesh, [bound * size[tensor.expert] for tensor in uneven for bound in tensor.boundaries], places)


def runs_between(mesh: Mesh, offsets: Iterable[int], places: Container[int]) -> tuple[EqualRanks, ...]:
    """The runs of ranks at these places, between offsets of the first replica where ranks begin to differ."""
    last = mesh.dp_shard * mesh.cp * mesh.tp
    edges = sorted({0, last, *[offset for offset in offsets if offset < last]})
    found = ((_first(mesh, start, stop, places), stop) for start, stop in pairwise(edges))
    return tuple(EqualRanks(first, stop) for first, stop in found if first < stop)


def all_offsets(mesh: Mesh, run: EqualRanks, places: Container[int]) -> list[int]:
    """Every offset of a run, in every replica."""
    replica, tp, cp = mesh.dp_shard * mesh.cp * mesh.tp, mesh.tp, mesh.cp
    own = [offset for offset in range(run.first, run.stop) if offset // tp % cp in places]
    return own if mesh.dp_replicate == 1 else [base + offset for base in range(0, replica * mesh.dp_replicate, replica) for offset in own]


def _first(mesh: Mesh, start: int, stop: int, places: Container[int]) -> int:
    """The first offset at one of the places; `stop` or larger if there is none."""
    while start < stop and start // mesh.tp % mesh.cp not in places:
        start = (start // mesh.tp + 1) * mesh.tp
    return start
