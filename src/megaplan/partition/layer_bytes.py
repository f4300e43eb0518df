"""Bytes that layers certainly need on a rank, as sums: limits that every fitting split must keep.

At a forward of a steady step, a rank holds its parameters and moments, the saved tensors of microbatches in flight, the gradients of chunks
that have run backward, and the gathered parameters of chunks that have run forward. All of these are sums over layers; the temporary
tensors of a running block are not, and are excluded. The allocator's further reserved bytes are excluded too, except for the rounding of
segments. A split beyond these limits is known not to fit, and a split within them must still be checked by the full budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from megaplan.budget.stored import reads_other_input
from megaplan.cost.values import StoredBytes
from megaplan.hosts.megarun.embedding import boundary_bytes
from megaplan.hosts.megarun.ledger import block_bytes, block_variants
from megaplan.hosts.megarun.sizes import storage_sizes
from megaplan.hosts.megarun.storage import BlockStorage, block_storage
from megaplan.hosts.megarun.towers import stream_bytes, tower_sizes
from megaplan.inventory.tensors import Block, Inventory, Outside, layer_names
from megaplan.layout.ranks import Layout
from megaplan.partition.limits import SpanSum, Weight, layer_weight
from megaplan.schedules.in_flight import shared_buffers
from megaplan.schedules.states import FORWARD, REDUCED, UNTOUCHED, RankState, non_dominated, rank_states
from megaplan.spec.local import local_dims
from megaplan.spec.models import Spec

if TYPE_CHECKING:
    from megaplan.cost.values import MeasuredCosts


class BlockNeeds(NamedTuple):
    """Bytes of a block on a rank.

    Attributes:
        static_bytes: Resident parameters and moments.
        saved_bytes: Bytes that one microbatch in flight keeps, including the block's input if the block keeps it.
        gradient_bytes: Whole gradients, from the chunk's first backward to its reduction.
        gathered_bytes: Gathered parameters, from the chunk's first forward, unless they are freed after it.
        update_bytes: Gradient shards, which all exist when the update begins, without the shards that AdamW frees before Muon runs.
    """

    static_bytes: int = 0
    saved_bytes: int = 0
    gradient_bytes: int = 0
    gathered_bytes: int = 0
    update_bytes: int = 0

    def at(self, count: int, graded: int, touched: int) -> int:
        """Bytes with the given number of microbatches in flight."""
        return self.static_bytes + count * self.saved_bytes + graded * self.gradient_bytes + touched * self.gathered_bytes


def stored_needs(storage: BlockStorage, *, muon: bool, offloads: bool = False) -> BlockNeeds:
    """Needs of a block's parameters, gradients and moments, without rounding to segments.

    Args:
        storage: Storage of the block.
        muon: True if Muon steps matrices.
        offloads: True if optimizer state may be in host memory, so that none is certain to be on the device.
    """
    static = sum(storage.resident_bytes)
    if not offloads:
        static += storage.matrix_state_bytes + storage.other_state_bytes + sum(tensor.state_bytes(0) for tensor in storage.uneven)
    update = storage.both.shard_bytes - (storage.adamw_shard_bytes if muon else 0)
    return BlockNeeds(static, 0, storage.both.unsharded_bytes, storage.both.gathered_bytes, max(update, 0))


def necessary_limits(
    spec: Spec, inventory: Inventory, layout: Layout, usable_bytes: int, measured: MeasuredCosts | None
) -> tuple[tuple[SpanSum, ...], ...]:
    """The sums of each pp rank that stay within usable memory in every split that fits.

    Args:
        spec: The spec; its step is pipelined.
        inventory: Parameter tensors of the spec.
        layout: Layout of any split; it gives the blocks outside the layers on the first and the last slot.
        usable_bytes: Usable bytes of the device.
        measured: A costs file; its bytes, if given, replace the budget's.
    """
    mesh, schedule = spec.mesh, spec.schedule
    degrees = schedule.kind, mesh.pp, mesh.vpp, schedule.num_microbatches
    dims, receives = local_dims(spec), shared_buffers(*degrees)
    layers, first, last = _needs(spec, inventory, layout, measured)
    made: dict[tuple[int, int, int], Weight] = {}

    def weight(point: tuple[int, int, int]) -> Weight:
        if point not in made:
            made[point] = layer_weight([need.at(*point) for need in layers], first.at(*point), last.at(*point))
        return made[point]

    limits = []
    for rank, of_rank in enumerate(rank_states(*degrees, num_steps=schedule.distinct_steps, interleaved=spec.interleaves_pairs)):
        received = boundary_bytes(dims) * sum(forward + backward for forward, backward in receives[rank])
        found = []
        for point in _at_forwards(of_rank, mesh.vpp * spec.num_copies, keeps=not spec.sharding.reshard_after_forward):
            # The input of a slot's first block is a receive buffer, already counted.
            inputs = sum(count for count, _, _ in point) * boundary_bytes(dims)
            found.append(SpanSum(tuple(map(weight, point)), usable_bytes - received + inputs))
        limits.append(tuple(found))
    return tuple(limits)


def no_limits(
    spec: Spec, inventory: Inventory, _layout: Layout, usable_bytes: int, _measured: MeasuredCosts | None
) -> tuple[tuple[SpanSum, ...], ...]:
    """The sums of a host whose bytes are not known before the budget; every split keeps them."""
    weight = layer_weight([0] * len(inventory.layers))
    return ((SpanSum((weight,) * (spec.mesh.vpp * spec.num_copies), usable_bytes),),) * spec.mesh.pp


def _at_forwards(found: Sequence[RankState], vpp: int, *, keeps: bool) -> tuple[tuple[tuple[int, int, int], ...], ...]:
    """Each chunk's microbatches in flight, and whether all gradients and gathered parameters exist, at the forwards of a rank."""
    seen: set[tuple[int, ...]] = set()
    for point in found:
        if point.kind is FORWARD and point.partner < 0:  # a pair in turns never holds all of both its microbatches
            graded = [int(exist and state is not REDUCED) for exist, state in zip(point.weight_grads, point.states, strict=True)]
            touched = [int(keeps and state not in (UNTOUCHED, REDUCED)) for state in point.states]
            touched[point.chunk] = int(keeps)
            seen.add((*point.in_flight, *graded, *touched))  # tensors that wait for W are not counted
    return tuple(tuple(zip(sums[:vpp], sums[vpp:-vpp], sums[-vpp:], strict=True)) for sums in non_dominated(seen))


def _needs(
    spec: Spec, inventory: Inventory, layout: Layout, measured: MeasuredCosts | None
) -> tuple[list[BlockNeeds], BlockNeeds, BlockNeeds]:
    """Needs of each layer, and of the blocks outside the layers on the first and on the last slot."""
    dims, sizes, variants = local_dims(spec), storage_sizes(spec), block_variants(spec, inventory)
    pipelined, merges = spec.mesh.is_pipelined, tower_sizes(spec) is not None
    rounds, offloads = not spec.host.expands_segments, sizes.offload > 0

    has_mtp, normed = any(block.family is Outside.MTP for _, block in inventory.outside), inventory.normed_ahead

    def needs(name: str, block: Block, *, runs: bool) -> BlockNeeds:
        storage = block_storage(sizes, block, packed=sizes.packs is not None and sizes.packs.covers(name, block.family))
        stored = stored_needs(storage, muon=spec.optimizer.uses_muon, offloads=offloads)
        static = stored.static_bytes + rounds * (storage.resident_slack_bytes + (0 if offloads else storage.state_slack_bytes))
        if not runs:
            return BlockNeeds(static, 0, pipelined * stored.gradient_bytes, pipelined * stored.gathered_bytes)
        ledger = block_bytes(spec, dims, name, block, start=len(inventory.layers))
        other = reads_other_input(name, has_mtp=has_mtp, normed=normed, merges=merges)
        kept_input = stream_bytes(spec, dims, name) if ledger.keeps_input and not other else 0
        saved = ledger.saved_bytes + rounds * ledger.saved_slack_bytes + kept_input
        return BlockNeeds(static, saved, pipelined * stored.gradient_bytes, pipelined * stored.gathered_bytes)

    made: dict[object, BlockNeeds] = {}
    layers = []
    for index, (name, block) in enumerate(zip(layer_names(len(inventory.layers)), inventory.layers, strict=True)):
        if variants[name] not in made:
            made[variants[name]] = needs(name, block, runs=True)
        found = made[variants[name]]
        if spec.offloads(index, block.family):
            found = found._replace(saved_bytes=0)
        if measured is not None:
            found = _measured(found, StoredBytes(measured.static_bytes[index], measured.activation_bytes[index]))
        layers.append(found)
    ends = []
    for slot in (layout.slots[0], layout.slots[layout.num_parts - 1]):
        outside = [
            name for name in slot.blocks if not name.startswith("layers.") and inventory.block(name).family is not Outside.RELATION_BIAS
        ]
        parts = [needs(name, inventory.block(name), runs=name not in (*slot.copies, Outside.TOWERS)) for name in outside]
        ends.append(BlockNeeds(*map(sum, zip(*parts, strict=True))) if parts else BlockNeeds())
    if measured is not None:
        ends = [_measured(*both) for both in zip(ends, (measured.first, measured.last), strict=True)]
    return layers, ends[0], ends[1]


def _measured(need: BlockNeeds, stored: StoredBytes) -> BlockNeeds:
    """Needs from the costs file if it has them: its static bytes cover everything that stays for the whole step."""
    if stored.static_bytes is not None:
        need = need._replace(static_bytes=stored.static_bytes, gradient_bytes=0, gathered_bytes=0)
    return need if stored.activation_bytes is None else need._replace(saved_bytes=stored.activation_bytes)
