"""Seconds of a forward without gradients over the tokens of a step, from the step's own time."""

from collections.abc import Mapping

from megaplan.cost.model import ModelCosts, model_costs
from megaplan.inventory.tensors import Inventory
from megaplan.spec.models import Spec

ONCE = ("exposed data", "sharding copies", "optimizer", "host", "fixed")
"""Terms of a step's time that occur once per step, not per microbatch."""
RECOMPUTE = "recompute"
"""The recompute term of hosts that time it separately; the other hosts include these operations in their own terms."""
NOTHING = 1e-12


def forward_seconds(spec: Spec, inventory: Inventory, seconds: float, terms: Mapping[str, float]) -> float:
    """Seconds of the forward: its share of the FLOPs, times the time of the step's microbatches without recompute.

    Args:
        spec: A checked spec.
        inventory: Parameter tensors of the spec.
        seconds: Seconds of the step.
        terms: Seconds of the step by term; empty for a step of which only the length is known.
    """
    once, costs = sum(terms.get(name, 0.0) for name in ONCE), model_costs(spec, inventory)
    parts = (*costs.layers, costs.head)
    forward, everything = sum(part.forward_flops for part in parts), sum(part.total_flops for part in parts)
    again = terms.get(RECOMPUTE, 0.0) / max(sum(terms.values()) - once, NOTHING)
    if RECOMPUTE not in terms:
        everything += forward if recomputes_all(spec) else _recomputed_flops(spec, inventory, costs)
    return max(seconds - once, 0.0) * (1 - again) * forward / everything


def _recomputed_flops(spec: Spec, inventory: Inventory, costs: ModelCosts) -> int:
    """FLOPs of the layers of which a backward recomputes everything."""
    layers = zip(inventory.layers, costs.layers, strict=True)
    return sum(cost.forward_flops for block, cost in layers if spec.recompute.of(block.family) == "full")


def recomputes_all(spec: Spec) -> bool:
    """True if the host itself recomputes every layer, which the cost model's FLOPs do not include."""
    return not spec.host.kind.trained and spec.host.recompute_num_layers is not None
