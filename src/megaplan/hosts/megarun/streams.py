"""The streams in which FSDP2 allocates in addition to the computing stream: each has its own pool in torch's allocator.

All-gathers use one for the output and for the cast of the shard, on meshes of more than one rank; an output is freed when the next
group's has been filled. Reductions use one for a group's reduced output, which becomes its gradient shards, or is added to them, or cast
to their dtype.

The pool of the shards is a fact of the runtime. FSDP2 itself makes them in its reduce-scatter stream, whose pool cannot use memory that
activations have freed; megarun passes it a reduce-scatter that allocates outputs that become shards in the computing stream (`SHARDS`).

Source: torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py (`foreach_all_gather`, `foreach_reduce`), _fsdp_param_group.py
(`FSDPCommContext`).
"""

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple

from megaplan.hosts.megarun.sizes import GroupBytes
from megaplan.tuples import new


class ShardsPool(StrEnum):
    """The stream whose pool holds gradient shards."""

    COMPUTE = "computing stream"
    REDUCE_SCATTER = "reduce-scatter stream"


SHARDS = ShardsPool.COMPUTE
"""The pool in which the current megarun allocates gradient shards."""


class GroupPools(NamedTuple):
    """Bytes of the groups of a slot, or of a rank's slots, in these streams.

    Attributes:
        gather_bytes: Most bytes that all-gathers hold at the same time.
        reduced_bytes: The largest reduced output.
        all_reduced_bytes: All reduced outputs.
        recast_bytes: Shards that are casts of these outputs: made in the reduce-scatter stream in every runtime.
        shard_bytes: All shards.
    """

    gather_bytes: int
    reduced_bytes: int
    all_reduced_bytes: int
    recast_bytes: int
    shard_bytes: int


class Reserving(NamedTuple):
    """Bytes that a rank reserves in addition to the allocated bytes of a step.

    Attributes:
        other_pool_bytes: Bytes in other streams' pools at their own peaks.
        open_bytes: Unused bytes of one partly filled segment or page per pool.
        missing_bytes: Requests after the main peak that fit into no block freed by activations.
        share: Unused part of the pool, in per mille of activations.
        last_requests: Requests in the computing stream of the reduction of the slot's own parameters, if it ends a backward.
        live_bytes: Allocated bytes of a step at that point.
        rounds: True if each tensor has its own, rounded segment.
    """

    other_pool_bytes: int
    open_bytes: int
    missing_bytes: int
    share: int
    last_requests: tuple[int, ...]
    live_bytes: int
    rounds: bool


def group_pools(root: GroupBytes, units: Sequence[Sequence[GroupBytes]], *, ahead: int) -> GroupPools:
    """Bytes of the groups of one slot.

    Args:
        root: The slot's own group.
        units: Groups of its units, in order: the dense group of a unit, then the banks of its layers.
        ahead: Units that each unit's forward begins by gathering.
    """
    most, alive = root.flat_bytes + root.sent_bytes, root.flat_bytes
    reduced, largest, recast, shards = root.reduced_bytes, root.reduced_bytes, root.recast_bytes, root.shard_bytes
    waits = 0
    for index, unit in enumerate(units):
        if ahead:  # parameters that were gathered `ahead` units earlier have been copied out
            alive = sum([group.flat_bytes for group in units[index - ahead]]) if index >= ahead else alive
            waits = sum([group.flat_bytes for each in units[max(0, index - ahead + 1) : index] for group in each])
        for group in unit:
            most = max(most, alive + waits + group.flat_bytes + group.sent_bytes)
            if ahead:
                waits += group.flat_bytes
            elif group.flat_bytes:
                alive = group.flat_bytes
            reduced, largest = reduced + group.reduced_bytes, max(largest, group.reduced_bytes)
            recast, shards = recast + group.recast_bytes, shards + group.shard_bytes
    return new(GroupPools, (most, largest, reduced, recast, shards))


def pools_together(pools: Iterable[GroupPools]) -> GroupPools:
    """Bytes of the slots of a rank, which run one at a time."""
    listed = list(pools)
    if len(listed) == 1:
        return listed[0]
    gathers, largest, reduced, recast, shards = zip(*listed, strict=True)
    return new(GroupPools, (max(gathers), max(largest), sum(reduced), sum(recast), sum(shards)))
