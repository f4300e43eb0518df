"""The backward under a pipeline, and its first gradients, which FSDP2 casts for accumulation one tensor after another.

A layer's gradients are cast when its backward has ended, the slot's own when all have; each is freed after its cast. An expert bank's are
cast inside its layer's backward.

Source: torch/distributed/fsdp/_fully_shard/_fsdp_param.py (`to_accumulated_grad_if_needed`), _fsdp_param_group.py (`post_backward`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megaplan.blocks.ops import in_bank
from megaplan.budget.chunk import Chunk
from megaplan.budget.stored import fsdp_order
from megaplan.budget.unit import Peak, Unit
from megaplan.hosts.megarun.group_bytes import GroupBytes
from megaplan.schedules.states import BACKWARDED, FORWARDED, ChunkState


def accumulating_backward_peak(chunk: Chunk, state: ChunkState) -> Peak:
    """The peak of a backward under a pipeline, where whole gradients accumulate; `reducing_backward_peak` is that without one."""
    policy, first = chunk.policy, state <= FORWARDED
    accumulates = policy.in_place and not first
    fetches = policy.reshard and state is not BACKWARDED  # a backward leaves every layer gathered
    units, before, carried, everything, layers = (
        chunk.units,
        chunk.before,
        chunk.backward_extra,
        chunk.unsharded_bytes,
        chunk.layers_gathered_bytes,
    )
    behind = made = 0  # units already done: unsharded layers, gradients of the slot's group
    gathered = 0 if fetches else layers
    largest, found = -1, (0, 0)
    found_peaks: list[Peak] = []
    for index in range(len(units) - 1, -1, -1):
        unit = units[index]
        gradients = (behind if first else everything) + (0 if accumulates else made)
        bank = unit.has_experts and not policy.in_place
        gathered += unit.gathered_bytes if fetches else 0
        if fetches or bank:
            found_peaks.append(chunk.backward(index, gradients, gathered, accumulates=accumulates, fetches=fetches))
        else:
            size = before[index] + gradients + carried[index] + (unit.accumulating_bytes if accumulates else unit.backward_bytes)
            if size > largest:
                largest, found = size, (index, gradients)
        if bank:
            found_peaks.append(after_bank_peak(chunk, index, gradients, gathered, first=first))
        if unit.layer:
            behind += unit.unsharded_bytes
        made += chunk.lasting(index)
    if largest >= 0:
        index, gradients = found
        found_peaks.append(chunk.backward(index, gradients, layers, accumulates=accumulates, fetches=False))
    peak = found_peaks[0] if len(found_peaks) == 1 else max(found_peaks, key=lambda peak: peak.total)
    if first and not policy.in_place:
        peak = largest_cast(chunk, peak.total, made, fetches=fetches) or peak
    return peak


def largest_cast(chunk: Chunk, beaten: int, made: int, *, fetches: bool) -> Peak | None:
    """The largest point of these casts, None if it is not above `beaten`; tensors that wait for W are compared, but not in the peak.

    Args:
        chunk: Chunk that runs backward.
        beaten: Bytes to exceed.
        made: Gradients of the slot's own parameters, in autograd's dtype.
        fetches: True if each layer is gathered for its backward, and stays gathered.
    """
    found: Peak | None = None
    root, policy = chunk.root, chunk.policy
    received = 0 if "embedding" in chunk.names else policy.boundary_bytes  # the gradient for the slot before
    held = chunk.logits_bytes  # the last stage's output, until the backward has returned
    behind = own = 0  # gradients of finished layers, of the slot's own parameters so far
    gathered = root.gathered_bytes + (0 if fetches else chunk.layers_gathered_bytes)
    for index in range(len(chunk.units) - 1, -1, -1):
        unit = chunk.units[index]
        if not unit.layer or unit.storage is None:
            own += chunk.lasting(index)
            continue
        gathered += unit.gathered_bytes if fetches else 0
        dense = unit.storage.dense
        gradients = behind + own + unit.storage.experts.unsharded_bytes + chunk.waiting_sums(index)
        waiting = chunk.waiting_from[index] if chunk.waiting_from else 0
        communication = gathered + (chunk.prefetched(index) if fetches else 0)
        most = chunk.before[index] + gradients + communication + chunk.passed_bytes(index) + held + dense.unsharded_bytes + dense.made_bytes
        if most + waiting > beaten:
            cast = gradients + cast_bytes([(_listed(unit), dense)])
            activations = (chunk.passed_bytes(index) if index else received) + held
            peak = chunk.after_backward(index, f"cast of {chunk.names[index]}", cast, communication, activations)
            found, beaten = (peak, peak.total + waiting) if peak.total + waiting > beaten else (found, beaten)
        behind += unit.unsharded_bytes
        own += chunk.lasting(index)
    waiting = chunk.waiting_from[0] if chunk.waiting_from else 0
    if behind + root.unsharded_bytes + made + chunk.gathered_bytes + received + held + waiting > beaten:
        peak = chunk.idle_peak(
            "cast of the slot's own gradients", behind + cast_bytes(_outside(chunk)), chunk.gathered_bytes, received + held
        )
        found = peak if peak.total + waiting > beaten else found
    return found


def after_bank_peak(chunk: Chunk, index: int, gradients: int, gathered: int, *, first: bool) -> Peak:
    """The peak of a layer's backward after its bank's gradients are cast, or added to the existing ones.

    A bank's first gradients are cast for accumulation inside its layer's backward, one after another, and each is freed after its cast.
    The casts are kept for the rest of the layer's backward. Later gradients are freed after they have been added.
    """
    unit, carried, name = chunk.units[index], chunk.backward_extra[index], chunk.names[index]
    bank, storage = unit.bank, unit.storage
    if bank is None or storage is None:
        raise ValueError(f"{name} has no experts")
    cast = storage.experts.unsharded_bytes if first else 0
    held = gradients + cast, gathered
    peak = chunk.unit_peak(index, f"backward of {name}", bank.later, bank.later_params, held, carried, bank.later_bytes)
    if not first:
        return peak
    made = {parameter: size for parameter, size in unit.block.gradients.items() if in_bank(parameter)}
    casting = gradients + cast_bytes([(made, storage.experts)]), gathered
    largest = chunk.unit_peak(index, f"cast of {name}.experts", bank.taken, bank.taken_params, casting, carried, bank.taken_bytes)
    return max(largest, peak, key=lambda peak: peak.total)


def cast_bytes(blocks: Sequence[tuple[Mapping[str, int], GroupBytes]]) -> int:
    """Peak bytes of gradients while they are cast one after another.

    Args:
        blocks: Bytes by name before the cast, and the group whose sums give the ratio of the dtypes.
    """
    left = sum([sum(gradients.values()) for gradients, _ in blocks])
    most = done = 0
    for gradients, group in blocks:
        for size in gradients.values():
            done += size * group.unsharded_bytes // group.made_bytes
            most, left = max(most, done + left), left - size
    return most


def _outside(chunk: Chunk) -> list[tuple[Mapping[str, int], GroupBytes]]:
    """The gradients of the slot's own parameters by block, in FSDP2's order; with MTP the first depth holds embedding's and head's."""
    found: dict[str, tuple[dict[str, int], GroupBytes]] = {}
    for index, unit in enumerate(chunk.units):
        if not chunk.lasting(index):
            continue
        for name in unit.shared or unit.block.gradients:
            size, block = unit.block.gradients[name], chunk.names[index]
            if unit.shared:
                block = name.partition(".")[0]
            if block == "head" and unit.storage is None:  # tied
                block = "embedding"
            gradients, _ = found.setdefault(block, ({}, chunk.root if unit.storage is None else unit.storage.dense))
            gradients.setdefault(name, size)
    return [found[block] for block in sorted(found, key=fsdp_order)]


def _listed(unit: Unit) -> dict[str, int]:
    """Gradients of a layer's backward, except its bank's; a block's own, without a dot in their names, after its children's."""
    made, last = unit.block.part.replay.backward[-1].params, unit.last_own
    shared = frozenset(unit.shared)
    names = [name for name in unit.block.gradients if name in made and name not in shared and not in_bank(name)]
    return {name: unit.block.gradients[name] for name in sorted(names, key=lambda name: bool(last) and (name == last or "." not in name))}
