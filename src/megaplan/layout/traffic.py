"""Bytes that the ranks of a job send in a step, by axis, kind of exchange and link.

Sizes follow from the formulas by which a step is timed: `megaplan.cost.transfers` for tensor, context, expert and pipeline groups, and
`megaplan.cost.data` or, under a host with fitted constants, `megaplan.cost.step.data` for data ranks. They are evaluated with rates at
which a byte takes a nanosecond. A ring sends (n − 1)/n of the full tensor; rows are distributed evenly over the expert ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from megaplan.blocks.work import Workload
from megaplan.cost.blocks import rank_workload
from megaplan.cost.data import data_sends, exchanges, mirrors_of, stage_ranks
from megaplan.cost.elements import local_elements, with_recipe
from megaplan.cost.rates import Rates
from megaplan.cost.transfers import (
    RankGroup,
    Transfers,
    context_transfers,
    row_transfers,
    tensor_transfers,
    vocabulary_transfers,
)
from megaplan.families.registry import FAMILIES
from megaplan.layout.build import Spans
from megaplan.layout.step_time import step_to_time
from megaplan.schedules import placement, slot_owner
from megaplan.spec.host import device_of
from megaplan.spec.local import boundary, local_dims
from megaplan.spec.models import Spec
from megaplan.spec.pattern import depth_blocks

if TYPE_CHECKING:
    from megaplan.families.family import Exchanges
    from megaplan.inventory.tensors import Inventory

FABRIC, NETWORK = "fabric", "network"
"""Slowest link of a group: inside a node or a domain of devices, or the adapters between them."""


class AxisTraffic(NamedTuple):
    """Bytes of one kind of exchange along an axis in a step.

    Attributes:
        axis: Axis of the mesh; `dp` for data ranks of all axes together.
        what: Kind of exchange: parameters, gradients, matrices, activations, keys, rows, tokens or boundaries.
        ranks: Ranks of a group.
        link: fabric, or network if a group leaves a node.
        rank_bytes: Bytes that a rank sends in a step, in the mean of the pipeline ranks.
        total_bytes: Bytes that all ranks send.
    """

    axis: str
    what: str
    ranks: int
    link: str
    rank_bytes: int
    total_bytes: int


def traffic_of(spec: Spec, inventory: Inventory, spans: Spans) -> tuple[AxisTraffic, ...]:
    """Traffic of a step by axis, the most first; without data ranks' if the host has no model of its step.

    Args:
        spec: A checked spec.
        inventory: Parameter tensors of the spec.
        spans: Cuts of the spec.
    """
    rows = (*_of_activations(spec, inventory, spans), *_of_data_ranks(spec, inventory, spans))
    return tuple(sorted((row for row in rows if row.rank_bytes), key=lambda row: -row.rank_bytes))


@dataclass(frozen=True, slots=True)
class _Counted(Rates):
    """Rates by which a time is the number of bytes that a rank sends over one kind of link."""

    link: str = FABRIC

    def node_ns(self, num_bytes: int) -> int:
        return num_bytes if self.link == FABRIC else 0

    def network_ns(self, num_bytes: int, num_nics: int = 1) -> int:  # noqa: ARG002  (bytes do not depend on the adapters)
        return num_bytes if self.link == NETWORK else 0


def _counted(spec: Spec, link: str) -> Rates:
    return _Counted(device_of(spec.device), {}, 0, 0, 0, rings=(), link=link)


def _row(spec: Spec, axis: str, what: str, group: RankGroup, rank_bytes: int, *, leaves: bool | None = None) -> AxisTraffic:
    link = NETWORK if (group.crosses(spec) if leaves is None else leaves) else FABRIC
    return AxisTraffic(axis, what, group.size, link, rank_bytes, rank_bytes * spec.mesh.world_size)


def _blocks(spec: Spec, inventory: Inventory) -> Iterator[tuple[Workload, Exchanges, str]]:
    """Workload, exchanges and recompute policy of every block; prediction depths recompute nothing."""
    model = spec.model
    for index, block in enumerate(inventory.layers):
        family = FAMILIES[block.family]
        exchanged = family.exchanges(family.section_of(model), model.hidden_size, block.variant)
        load = rank_workload(spec, spec.precision.of(block.family))._replace(low=spec.multiplies_in_eight_bits(index, block.family))
        yield load, exchanged, spec.policy(index, block.family)
    if model.features.mtp is not None:
        for depth in depth_blocks(model) * model.features.mtp.depth:
            load = rank_workload(spec, spec.precision.of(depth.family.letter))
            yield load, depth.family.exchanges(depth.section, model.hidden_size, depth.variant), "none"


def _both(waits: Transfers) -> int:
    return waits.forward_ns + waits.input_ns


def _of_activations(spec: Spec, inventory: Inventory, spans: Spans) -> Iterator[AxisTraffic]:
    mesh, sent, left = spec.mesh, _counted(spec, FABRIC), _counted(spec, NETWORK)
    count = spec.schedule.microbatches_per_update
    tensor = context = inside = outside = gathered = 0
    for load, exchange, policy in _blocks(spec, inventory):
        if exchange.sharded and mesh.tp > 1:
            waits = tensor_transfers(sent, spec, load, exchange.gathered_width)
            tensor += _both(waits) + waits.repeated_ns(policy)
        waits = context_transfers(sent, spec, load, exchange)
        context += _both(waits) + waits.repeated_ns(policy)
        if exchange.rows and load.gathers_tokens:
            gathered += _both(row_transfers(sent, spec, load, exchange))
        elif exchange.rows:
            inside += _both(row_transfers(sent, spec, load, exchange))
            outside += _both(row_transfers(left, spec, load, exchange))
    load = rank_workload(spec, spec.precision.params)
    ends = vocabulary_transfers(sent, spec, load) if mesh.tp > 1 else ()
    tensor += sum(map(_both, ends))
    pp = mesh.pp
    yield _row(spec, "tp", "activations", RankGroup(mesh.tp, 1), count * tensor // pp)
    yield _row(spec, "cp", "keys and values", RankGroup(mesh.cp, mesh.tp), count * context // pp)
    experts = RankGroup(mesh.ep * mesh.etp, 1)
    yield _row(spec, "ep", "routed rows", experts, count * inside // pp, leaves=False)
    yield _row(spec, "ep", "routed rows", experts, count * outside // pp, leaves=True)
    yield _row(spec, "ep", "gathered tokens", experts, count * gathered // pp)
    if pp > 1:
        layout = placement(spec.schedule.kind)
        owners = [slot_owner(layout, slot, pp)[0] for slot in range(len(spans))]
        hops = zip(pairwise(owners), spans, strict=False)
        dims = local_dims(spec)
        moved = sum([boundary(spec, dims, stop).bytes for (before, after), (_, stop) in hops if before != after])
        crosses = mesh.world_size > spec.device.per_node
        yield _row(spec, "pp", "activations and their gradients", RankGroup(pp, 1), 2 * count * moved // pp, leaves=crosses)


def _of_data_ranks(spec: Spec, inventory: Inventory, spans: Spans) -> Iterator[AxisTraffic]:
    if not spec.host.kind.trained:
        yield from _of_fitted_host(spec, inventory, spans)
        return
    mesh = spec.mesh
    local = with_recipe(spec, inventory, local_elements(inventory, mesh.tp, mesh.ep, mesh.etp, spec.packing))
    once = data_sends(spec, _counted(spec, FABRIC), local)
    gathers, reductions = exchanges(spec)
    stride = mesh.cp * mesh.tp
    shards, replicas = RankGroup(mesh.dp_shard, stride), RankGroup(mesh.dp_replicate, mesh.dp_shard * stride)
    yield _row(spec, "pp", "gradients of the mirrored copy", mirrors_of(spec), once.mirrored)
    yield _row(spec, "dp", "largest magnitudes of operands", stage_ranks(spec), once.maxima)
    if spec.sharding.copies:  # unsharded gradients are summed over all data ranks once
        yield _row(spec, "dp", "gradients", RankGroup(mesh.data_ranks, stride), once.replicas)
        yield _row(spec, "cp", "gradients", RankGroup(mesh.cp, mesh.tp), once.context)
        return
    again = gathers - (1 if mesh.is_pipelined else spec.schedule.microbatches_per_update) if spec.sharding.kept_over else 0
    yield _row(spec, "dp_shard", "parameters", shards, (gathers - again) * once.gather)
    yield _row(spec, "dp_shard", "parameters again", RankGroup(spec.shard_keepers[0], stride), again * once.again)
    yield _row(spec, "dp_shard", "gradients", shards, reductions * once.shards)
    yield _row(spec, "dp_shard", "matrices of the optimizer", shards, once.matrices)
    yield _row(spec, "dp_replicate", "gradients", replicas, reductions * once.replicas)
    yield _row(spec, "cp", "gradients", RankGroup(mesh.cp, mesh.tp), reductions * once.context)


def _of_fitted_host(spec: Spec, inventory: Inventory, spans: Spans) -> Iterator[AxisTraffic]:
    work = None if spec.host.kind.step is None else step_to_time(spec, spans, inventory)
    if work is None or isinstance(work, str):
        return
    from megaplan.cost.step.data import data_exchanges  # noqa: PLC0415  (a host without times loads no model of them)

    for name, group, reduced, gathered in data_exchanges(work):
        part, crosses = (group.ranks - 1) / group.ranks, group.ranks > group.inside
        for what, payload in (("gradients", reduced), ("parameters", gathered)):
            yield _row(spec, "dp", f"{what}{name}", RankGroup(round(group.ranks), 1), round(part * payload), leaves=crosses)
