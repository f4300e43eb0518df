"""FSDP2's memory for the dense parameters of consecutive layers that are one group (`sharding.wrap: 4`)."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from megaplan.hosts.megarun.listed import casting_bytes
from megaplan.hosts.megarun.packed import packed_block
from megaplan.hosts.megarun.sizes import GroupBytes, Sizes, together
from megaplan.hosts.megarun.storage import BlockStorage, packed_shards
from megaplan.inventory.tensors import Block


class Member(NamedTuple):
    """A layer of a group.

    Attributes:
        name: Name of its block.
        block: Tensors of the layer.
        storage: Storage of these tensors.
    """

    name: str
    block: Block
    storage: BlockStorage


def unit_group(sizes: Sizes, members: Sequence[Member]) -> GroupBytes:
    """The group of some layers' dense tensors: sums over the layers, and maxima over single tensors."""
    groups = [member.storage.dense for member in members]
    found = together(groups)
    casting, _ = casting_bytes(sizes, *(packed_block(sizes.packing, member.block, sizes.tp) for member in members))
    left = [0, *accumulate([group.part_bytes - group.gathered_bytes for group in groups])]
    cutting = max([before + group.cutting_bytes for before, group in zip(left, groups, strict=False) if group.part_bytes], default=0)
    return found._replace(casting_bytes=casting, cutting_bytes=cutting, sent_bytes=_sent_bytes(sizes, members, found.gathered_bytes))


def _sent_bytes(sizes: Sizes, members: Sequence[Member], gathered_bytes: int) -> int:
    """The all-gather's input, or the most bytes while weights are packed one after another before the gather."""
    if sizes.packs is None:
        return sum(member.storage.dense.sent_bytes for member in members)
    sent = packed = making = 0
    for name, block, storage in members:
        low, _ = packed_shards(sizes, block, packed=sizes.packs.covers(name, block.family))
        making = max(making, packed + low.making_bytes)
        packed += low.packed_bytes
        wide = storage.dense.gathered_bytes // sizes.degrees[False] - low.packed_bytes
        sent += wide if storage.dense.flat_bytes and sizes.compute(block.family) is not sizes.masters else 0
    return max(sent + packed, making - gathered_bytes)
