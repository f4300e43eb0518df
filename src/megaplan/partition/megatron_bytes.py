"""Bytes that layers certainly need on a rank under Megatron-Core, as sums: limits that every fitting split must keep.

A sum contains the storage of each layer, and the activations that are held at one point of the schedule under every split. Phases and fixed
buffers are excluded: a split above the limit does not fit, and one below it may or may not; the budget decides.
"""

from functools import cache

from megaplan.hosts.megatron.chunks import chunk
from megaplan.hosts.megatron.pattern import EMBEDDING
from megaplan.hosts.megatron.peak import in_flight_counts
from megaplan.hosts.megatron.run import MegatronRun, MegatronStage, stages_of
from megaplan.hosts.megatron.storage import GRADIENT_PADDING, PARAMETER_PADDING, parameters, storage_bytes, uses_muon
from megaplan.inventory.tensors import Inventory
from megaplan.layout.ranks import Layout
from megaplan.partition.limits import SpanSum, Weight, layer_weight
from megaplan.spec.models import Spec


def megatron_limits(
    spec: Spec, inventory: Inventory, layout: Layout, usable_bytes: int, _measured: object = None
) -> tuple[tuple[SpanSum, ...], ...]:
    """The sum of each pp rank that stays within usable memory in every split that fits; `layout` is of any split."""
    run = MegatronRun(spec, inventory)

    @cache
    def needs(own: str, count: int) -> int:
        return static_bytes(run, own) + (0 if spec.host.recompute_num_layers else count * chunk(run, own))

    operators = [run.operator_letter(layer) for layer in range(len(run.letters))]

    @cache
    def weight(count: int) -> Weight:
        each = {own: needs(own, count) for own in set(operators)}
        return layer_weight([each[own] for own in operators], needs(EMBEDDING, count), needs(run.end, count))

    most = usable_bytes * 100 // (100 + spec.host.fragmentation_percent) + 1
    found = []
    for stage in stages_of(run, layout):
        found.append((SpanSum(tuple(weight(count) for count in in_flight_counts(stage)), most),))
    return tuple(found)


def static_bytes(run: MegatronRun, own: str) -> int:
    """Parameters, gradients and state of some operators; the whole stage decides which ranks get Muon's matrices, and their padding."""
    alone = MegatronStage(run, (own,), run.spec.mesh.pp - 1)
    parts = storage_bytes(alone, parameters(alone))
    together = ("optimizer", PARAMETER_PADDING, GRADIENT_PADDING) if uses_muon(run.spec) else ()
    return sum(parts.values()) - sum(parts.get(name, 0) for name in together)
