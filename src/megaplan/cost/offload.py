"""Times of layers whose saved tensors are in host memory between forward and backward (`host.activation_offload`).

A layer's copy leaves while the next layer runs forward, and comes back while that runs backward; the step waits for the rest of a longer
copy. Copies of a stage's last layer are timed as if another layer followed, although nothing hides them there: that part does not depend on
the cuts.

Source: `megarun.parallel.apply.offload`.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from megaplan.cost.rates import Rates
from megaplan.cost.values import LayerTime
from megaplan.inventory.tensors import Inventory
from megaplan.spec.models import Spec


def with_copies(spec: Spec, inventory: Inventory, rates: Rates, times: Sequence[LayerTime]) -> list[LayerTime]:
    """Times of layers, each with the excess of its copies over the next layer; `times` excludes copies."""
    copies = _copies_ns(spec, inventory, rates)
    found = []
    for copy_ns, (own, after) in zip(copies, pairwise(times), strict=True):
        forward, backward = max(0, copy_ns - after.forward_ns), max(0, copy_ns - after.backward_ns)
        found.append(replace(own, forward_ns=own.forward_ns + forward, input_ns=own.input_ns + backward) if copy_ns else own)
    return [*found, times[-1]]


def waits_of(times: Sequence[LayerTime], plain: Sequence[LayerTime]) -> LayerTime:
    """The additional time of all layers due to the copies."""
    pairs = list(zip(times, plain, strict=True))
    return LayerTime(
        forward_ns=sum([own.forward_ns - bare.forward_ns for own, bare in pairs]),
        input_ns=sum([own.input_ns - bare.input_ns for own, bare in pairs]),
    )


def _copies_ns(spec: Spec, inventory: Inventory, rates: Rates) -> list[int]:
    """Time of the copy of each layer except the last, which is never offloaded; 0 for layers that keep their tensors on the device."""
    kept_bytes, made = spec.host.kind.layer_kept, dict[tuple[int, str, bool], int]()
    found = []
    for index, block in enumerate(inventory.layers[:-1]):
        key = id(block), spec.policy(index, block.family), spec.multiplies_in_eight_bits(index, block.family)
        if kept_bytes is not None and spec.offloads(index, block.family) and key not in made:
            made[key] = rates.host_ns(kept_bytes(spec, f"layers.{index}", block))
        found.append(made.get(key, 0))
    return found
