"""Times of layers whose kept tensors go to host memory and back (`host.activation_offload`), behind the layers that run meanwhile.

A layer's copy leaves while the next layer runs forward, and comes back while that runs backward; what takes longer than that is waited
for. Copies of a layer at the end of a stage are taken as those before another layer, although they hide behind nothing there: a stage's
first and last copy are a part of them that does not depend on where cuts are.

Source: `megarun.parallel.apply.offload`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megaplan.cost.rates import Rates
from megaplan.cost.values import LayerTime
from megaplan.inventory.tensors import Inventory
from megaplan.spec.models import Spec


def with_copies(spec: Spec, inventory: Inventory, rates: Rates, times: Sequence[LayerTime]) -> list[LayerTime]:
    """Times of layers, each with what its copies take longer than the layer after it."""
    found, copied, kept_bytes = list(times), dict[tuple[int, str, bool], int](), spec.host.kind.layer_kept
    if kept_bytes is None:
        return found
    for index, block in enumerate(inventory.layers):
        if not spec.offloads(index, block.family):
            continue
        key = id(block), spec.policy(index, block.family), spec.multiplies_in_eight_bits(index, block.family)
        if key not in copied:
            copied[key] = rates.host_ns(kept_bytes(spec, f"layers.{index}", block))
        own, after = found[index], times[index + 1]
        found[index] = replace(
            own,
            forward_ns=own.forward_ns + max(0, copied[key] - after.forward_ns),
            input_ns=own.input_ns + max(0, copied[key] - after.input_ns - after.weight_ns),
        )
    return found
