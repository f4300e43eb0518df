"""Bytes of FSDP2's groups: gathered copies, gradients and the buffers of a reduction; `storage` has those of each block."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class GroupBytes(NamedTuple):
    """FSDP2 groups, one or several together.

    Attributes:
        gathered_bytes: Unsharded compute copies, padded.
        flat_bytes: The all-gather's own output before it is copied out: 0 on a one-rank mesh.
        casting_bytes: Bytes in addition to `gathered_bytes` while a one-rank mesh fills them from casts: 0 if parameters are stored in the
            used dtype.
        sent_bytes: The all-gather's input, a cast of the shard: 0 in the same case, and on a one-rank mesh.
        unsharded_bytes: Whole gradients in `precision.grads`.
        made_bytes: Whole gradients in the dtype in which autograd makes them.
        reduce_bytes: Reduce-scatter input in `precision.reduce`, padded.
        reduced_bytes: Reduce-scatter output, a padded shard.
        divided_bytes: If shards are whole and have replicas, its input divided by the gradient divisor.
        recast_bytes: The output once more, in `precision.grads`, if that is another dtype.
        shard_bytes: Gradient shards in `precision.grads`, padded.
        last_made_bytes: Bytes of the last tensor in `made_bytes`: `foreach_reduce` references it until it returns, on meshes of more than
            one rank.
        last_unsharded_bytes: Bytes of the last tensor in `unsharded_bytes`.
    """

    gathered_bytes: int = 0
    flat_bytes: int = 0
    casting_bytes: int = 0
    sent_bytes: int = 0
    unsharded_bytes: int = 0
    made_bytes: int = 0
    reduce_bytes: int = 0
    reduced_bytes: int = 0
    divided_bytes: int = 0
    recast_bytes: int = 0
    shard_bytes: int = 0
    last_made_bytes: int = 0
    last_unsharded_bytes: int = 0

    @property
    def has_tasks(self) -> bool:
        """True if its parameters are gathered, or its gradients taken when they are made."""
        return self.gathered_bytes > 0 or self.made_bytes > 0

    @property
    def reduction_bytes(self) -> int:
        """All buffers of a reduction."""
        return self.reduce_bytes + self.reduced_bytes + self.divided_bytes + self.recast_bytes


NOTHING = GroupBytes()


def together(groups: Iterable[GroupBytes]) -> GroupBytes:
    """Several groups as one; the last tensor is that of the last group that has one."""
    listed = list(groups)
    if len(listed) == 1:
        return listed[0]
    last = next((group for group in reversed(listed) if group.made_bytes), NOTHING)
    *sums, _, _ = [sum(sizes) for sizes in zip(*listed, strict=True)] or NOTHING
    return GroupBytes._make((*sums, last.last_made_bytes, last.last_unsharded_bytes))
