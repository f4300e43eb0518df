"""Bytes that layers certainly need on a rank under torchtitan: sharded parameters, gradients and moments, which no split avoids."""

from megaplan.inventory.tensors import Inventory
from megaplan.layout.ranks import Layout
from megaplan.partition.limits import SpanSum, layer_weight
from megaplan.spec.models import Spec


def torchtitan_limits(
    spec: Spec, inventory: Inventory, _layout: Layout, usable_bytes: int, _measured: object = None
) -> tuple[tuple[SpanSum, ...], ...]:
    """The sum of each pp rank that stays within usable memory in every split that fits; tensors that tp replicates count as sharded."""
    mesh, precision = spec.mesh, spec.precision
    ranks = mesh.tp * mesh.dp_shard * mesh.cp
    element_bytes = precision.master.bytes + precision.grads.bytes + 2 * precision.moments.bytes

    def needs(elements: int) -> int:
        return elements * element_bytes // ranks

    ends = {name: needs(block.elements) for name, block in inventory.outside}
    weight = layer_weight([needs(block.elements) for block in inventory.layers], ends["embedding"], ends.get("head", 0))
    most = usable_bytes * 100 // (100 + spec.host.reserved_percent) + 1
    return ((SpanSum((weight,) * mesh.vpp, most),),) * mesh.pp
