"""Seconds of a forward without gradients over the tokens of a step, from the step's own time."""

from __future__ import annotations

from collections.abc import Mapping

from megaplan.cost.model import model_costs
from megaplan.inventory.tensors import Inventory
from megaplan.spec.models import Spec

ONCE = ("exposed data", "sharding copies", "optimizer", "host", "fixed")
"""Terms of a step's time that occur once per step, not per microbatch."""


def forward_seconds(spec: Spec, inventory: Inventory, seconds: float, terms: Mapping[str, float]) -> float:
    """Seconds of the forward: its share of the FLOPs, times the time of the step's microbatches.

    Args:
        spec: A checked spec.
        inventory: Parameter tensors of the spec.
        seconds: Seconds of the step.
        terms: Seconds of the step by term; empty for a step of which only the length is known.
    """
    once, costs = sum(terms.get(name, 0.0) for name in ONCE), model_costs(spec, inventory)
    parts = (*costs.layers, costs.head)
    forward = sum(part.forward_flops for part in parts)
    everything = sum(part.total_flops for part in parts) + (forward if recomputes_all(spec) else 0)
    return max(seconds - once, 0.0) * forward / everything


def recomputes_all(spec: Spec) -> bool:
    """True if the host itself recomputes every layer, which the cost model's FLOPs do not include."""
    return not spec.host.kind.trained and spec.host.recompute_num_layers is not None
