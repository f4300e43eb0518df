"""The peak of a forward: one of its operations, or the copies out of the all-gather before it.

Source: torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py (`foreach_all_gather_copy_out`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megaplan.budget.all_gathers import NO_ALL_GATHERS
from megaplan.budget.chunk import Chunk
from megaplan.budget.experts import ForwardPoint, fetching_experts, forward_points, freeing_experts
from megaplan.budget.unit import Peak
from megaplan.hosts.megarun.program import LiveSet
from megaplan.schedules.states import BACKWARDED, UNTOUCHED, ChunkState

NO_START = (-1, 0, 0)
"""Value if no forward begins with copies out of an all-gather."""


def forward_peak(chunk: Chunk, state: ChunkState, absent: int = 0, *, weight_grads: bool = True) -> Peak:
    """The largest point of a forward.

    Args:
        chunk: Chunk of a rank.
        state: State of the chunk before it.
        weight_grads: True if the gradients of linear layers exist.
        absent: Bytes that are not allocated before the first product, for a rank's first forward.
    """
    policy = chunk.policy
    fresh = state is UNTOUCHED or not policy.pipelined
    gathers = policy.reshard and not (state is BACKWARDED and policy.pipelined)
    flats, starts = (chunk.first_gathers if fresh else chunk.later_gathers) if fresh or gathers else NO_ALL_GATHERS
    best, index, point, gathered = _largest_forward(chunk, flats, absent, fresh=fresh, gathers=gathers)
    gradients = chunk.held(state, weight_grads=weight_grads)[0]
    copies = gathers if policy.reshard else fresh
    start, first, communication = _largest_start(chunk, starts, absent) if copies else NO_START
    filling = chunk.root.casting_bytes if fresh else 0
    if filling > max(start + absent, best):  # before any unit runs
        gathered = filling + chunk.root.gathered_bytes
        total = gradients + gathered - absent
        return Peak(total, "gathering of the slot's own parameters", chunk.first_layer, 0, None, (), gradients, gathered, 0, absent)
    if start > best:
        before = chunk.before[first] + chunk.units[first].input_bytes
        gathered = communication + chunk.root.gathered_bytes
        choice = chunk.choices[first]
        total, less = before + gradients + gathered + choice, absent if first == chunk.first_layer else 0
        return Peak(total - less, f"gathering of {chunk.names[first]}", first, before, None, (), gradients, gathered, choice, less)
    passing, less = chunk.units[index].passing_bytes + chunk.choice_bytes(index), absent if index < chunk.first_layer else 0
    peak = chunk.unit_peak(index, f"forward of {chunk.names[index]}", point, (), (gradients, gathered), passing)
    return peak._replace(total=peak.total - less, absent=less)


def _largest_forward(chunk: Chunk, flats: Sequence[int], absent: int, *, fresh: bool, gathers: bool) -> tuple[int, int, LiveSet, int]:
    """The largest of the units' forwards: its size without gradients, the unit, its point, and the gathered parameters then.

    Args:
        chunk: Chunk of a rank.
        flats: The all-gather's outputs of each unit, of its own group and of the next one.
        absent: Bytes that are not allocated before the first product.
        fresh: True if nothing is gathered before.
        gathers: True if each unit is gathered for its forward and freed after it.
    """
    policy, total, so_far = chunk.policy, chunk.layers_gathered_bytes, 0
    best, found = -1, (0, chunk.units[0].block.forward, 0)
    of_block: dict[int, list[ForwardPoint]] = {}
    for index, unit in enumerate(chunk.units):
        own = unit.gathered_bytes
        if policy.reshard:
            gathered = own + flats[index] if gathers else total - so_far
        else:
            gathered = so_far + own + flats[index] if fresh else total
        so_far += own
        points: Iterable[tuple[LiveSet, int, int]] = ((unit.block.forward, unit.block.forward_bytes, gathered),)
        if unit.has_experts and (policy.reshard or fresh):
            own_points = of_block.get(id(unit.block)) or of_block.setdefault(id(unit.block), forward_points(unit.block))
            if gathers or not policy.reshard:
                others = gathered - flats[index] - (0 if unit.storage is None else unit.storage.experts.gathered_bytes)
                points = fetching_experts(unit, own_points, others, flats[index], ahead=policy.gathers_ahead, frees=policy.reshard)
            else:
                points = freeing_experts(unit, own_points, gathered)
        for point, point_bytes, communication in points:
            held = chunk.before[index] + unit.input_bytes + unit.passing_bytes + chunk.choice_bytes(index)
            size = held + point_bytes + communication
            size -= absent if index < chunk.first_layer else 0
            if size >= best:
                best, found = size, (index, point, communication)
    return best, *found


def _largest_start(chunk: Chunk, starts: Sequence[int], absent: int) -> tuple[int, int, int]:
    """The largest of the copies out of all-gathers before forwards: its size without gradients, the unit, the gathered parameters.

    Args:
        chunk: Chunk of a rank.
        starts: Allocated bytes of each unit's copy; 0 if nothing is copied.
        absent: Bytes that are not allocated before the first product.
    """
    so_far, best, found = 0, -1, (0, 0)
    for index, unit in enumerate(chunk.units):
        own = unit.gathered_bytes
        if starts[index]:
            communication = starts[index] + own + (0 if chunk.policy.reshard else so_far)
            communication -= unit.storage.experts.gathered_bytes if unit.has_experts and unit.storage is not None else 0
            held = chunk.before[index] + unit.input_bytes + chunk.choices[index]
            size = held + communication - (absent if index == chunk.first_layer else 0)
            if size > best:
                best, found = size, (index, communication)
        so_far += own
    return best, *found
