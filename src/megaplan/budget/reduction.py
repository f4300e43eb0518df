"""Peaks of FSDP2's gradient reductions: after each microbatch without a pipeline, once a step with one.

A group's gradients are copied into the reduce-scatter's input and freed; its output becomes the gradient shards, or is added to them. The
input is kept until the next group reduces. With replicas, the output is all-reduced and kept until the backward has ended.

Source: torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py (`post_backward`, `AllReduceState`), _fsdp_collectives.py
(`foreach_reduce`).
"""

from __future__ import annotations

from collections.abc import Iterator

from megaplan.budget.chunk import Chunk
from megaplan.budget.unit import Peak
from megaplan.hosts.megarun.group_bytes import GroupBytes


def reduce_peak(chunk: Chunk) -> Peak:
    """The largest point of reducing a chunk's accumulated gradients: the slot's own group first, then its layers in order."""
    unsharded, gathered, shards = chunk.unsharded_bytes, chunk.gathered_bytes, 0
    best = chunk.idle_peak("", 0, 0)
    for name, group in _groups(chunk):
        gathered -= group.gathered_bytes
        unsharded -= group.unsharded_bytes
        for gradients, buffers in _reduction(group, group.unsharded_bytes, group.last_unsharded_bytes):
            if unsharded + shards + gradients + gathered + buffers > best.total:
                best = chunk.idle_peak(f"reduction of {name}", unsharded + shards + gradients, gathered + buffers)
        shards += group.shard_bytes
    return best


def reducing_backward_peak(chunk: Chunk, *, later: bool) -> Peak:
    """The peak of one microbatch's backward without a pipeline: layers reduce when done, the slot's own group at the end.

    Args:
        chunk: The only chunk of the rank.
        later: True if a microbatch was reduced before.
    """
    ending: list[Peak] = []
    largest = max(_reducing_backwards(chunk, later, ending), key=lambda peak: peak.total)
    largest = largest._replace(earlier=largest.total)
    ends: list[Peak] = [largest, *[peak._replace(earlier=largest.total) for peak in ending]]
    return max(ends, key=lambda peak: peak.total)


def _reducing_backwards(chunk: Chunk, later: bool, ending: list[Peak]) -> Iterator[Peak]:
    """Points of a backward until all layers are reduced; `ending` is filled with those of the slot's own reduction after it."""
    root, reshard = chunk.root, chunk.policy.reshard
    everything = chunk.shard_bytes
    behind = made = pending = 0  # shards of finished layers, gradients of the slot's group, the last reduce-scatter input
    kept = 0  # outputs that are not the shards themselves, while replicas sum them
    ahead = chunk.layers_gathered_bytes
    for index in range(len(chunk.units) - 1, -1, -1):
        unit = chunk.units[index]
        own = unit.gathered_bytes
        gradients = (everything if later else behind) + made + kept
        gathered = own if reshard else ahead
        yield chunk.backward(index, gradients, gathered + pending, accumulates=False, fetches=reshard)
        if index == 0 and (tied := chunk.tied_sum_bytes()):
            yield chunk.idle_peak("sum of the tied embedding's gradients", gradients + 2 * tied, gathered + pending + root.gathered_bytes)
        if not unit.layer or unit.storage is None:
            made += chunk.lasting(index)
            continue
        dense, experts = unit.storage.dense, unit.storage.experts
        gathered += chunk.prefetched(index) if reshard else 0
        if unit.bank is not None:  # it reduces inside its layer's backward, as soon as its rows have their gradients
            bank, gathered = unit.bank, gathered - experts.gathered_bytes
            for own_gradients, buffers in _reduction(experts, experts.made_bytes, experts.last_made_bytes):
                reducing = gradients + own_gradients, gathered + buffers
                where, carried = f"reduction of {chunk.names[index]}.experts", chunk.backward_extra[index]
                yield chunk.unit_peak(index, where, bank.taken, bank.taken_params, reducing, carried, bank.taken_bytes)
        ahead -= own
        behind += experts.shard_bytes
        kept += _kept(chunk, experts, later)
        gradients = (everything if later else behind) + made + kept
        if unit.bank is not None:  # a depth's later parameters are shared ones too, which `made` does not have yet
            held = gradients, gathered + experts.reduce_bytes
            where, carried = f"backward of {chunk.names[index]}", chunk.backward_extra[index]
            yield chunk.unit_peak(index, where, unit.bank.later, unit.bank.later_params, held, carried, unit.bank.later_bytes)
        made += chunk.lasting(index)
        gradients = (everything if later else behind) + made + kept
        gathered = root.gathered_bytes + (chunk.prefetched(index) if reshard else ahead)
        for own_gradients, buffers in _reduction(dense, dense.made_bytes, dense.last_made_bytes):
            passed, made_so_far = chunk.passed_bytes(index) if index else 0, gradients + own_gradients + chunk.waiting_sums(index)
            yield chunk.after_backward(index, f"reduction of {chunk.names[index]}", made_so_far, gathered + buffers, passed)
        behind += dense.shard_bytes
        kept += _kept(chunk, dense, later)
        pending = dense.reduce_bytes
    gradients = (everything if later else behind) + kept
    for own_gradients, buffers in _reduction(root, made, root.last_made_bytes):
        ending.append(chunk.after_backward(0, "reduction of the slot's own parameters", gradients + own_gradients, buffers, 0))


def reduced_groups(chunk: Chunk) -> list[GroupBytes]:
    """The groups of a chunk in the order in which they are reduced."""
    groups = [group for _, group in _groups(chunk) if group.reduce_bytes]
    if not chunk.policy.pipelined:  # a layer's bank inside its backward, then the layer, and the slot's own when all are done
        groups.reverse()
    return groups


def _kept(chunk: Chunk, group: GroupBytes, later: bool) -> int:
    """A reduction's output, if it is not the shards themselves: kept until the backward has ended."""
    return group.reduced_bytes if chunk.policy.replicated and (later or group.recast_bytes) else 0


def _reduction(group: GroupBytes, gradient_bytes: int, last_bytes: int) -> tuple[tuple[int, int], ...]:
    """(gradients, buffers) of a group while its gradients are copied, while they are reduced, and while the output is cast, if it is.

    The last gradient is still referenced then; the output counts as a gradient, because it becomes one.
    """
    reduced = last_bytes + group.reduced_bytes
    points = (gradient_bytes, group.reduce_bytes), (reduced, group.reduce_bytes + group.divided_bytes)
    return (*points, (reduced + group.recast_bytes, group.reduce_bytes)) if group.recast_bytes else points


def _groups(chunk: Chunk) -> Iterator[tuple[str, GroupBytes]]:
    yield "the slot's own parameters", chunk.root
    for name, unit in zip(chunk.names, chunk.units, strict=True):
        if unit.layer and unit.storage is not None:
            yield name, unit.storage.dense
            yield f"{name}.experts", unit.storage.experts
