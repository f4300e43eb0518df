"""What a slot costs until a costs file says otherwise: forward and backward FLOPs per token from `megaplan.cost`."""

from __future__ import annotations

from megaplan.cost.model import model_costs
from megaplan.inventory.tensors import Inventory
from megaplan.spec.models import Spec
from megaplan.split.values import StackCosts


def stack_costs(spec: Spec, inventory: Inventory) -> StackCosts:
    """Executed FLOPs per token of each layer and of both ends: F + I + W, repeated work included.

    The token embedding costs 0; projections of side embeddings stand on the first slot; the head (6 · hidden · vocab) and every MTP depth
    (its block, its projection, one more head) on the last.
    """
    costs = model_costs(spec, inventory)
    last = costs.head.total_flops + sum(depth.total_flops for depth in costs.mtp)
    return StackCosts(tuple(layer.total_flops for layer in costs.layers), costs.side_embeddings.total_flops, last)
