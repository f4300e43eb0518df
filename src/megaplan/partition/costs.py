"""Costs of layers: forward and backward FLOPs per token from `megaplan.cost`, or the times of a costs file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megaplan.cost.model import model_costs
from megaplan.inventory.tensors import Inventory
from megaplan.partition.values import StackCosts
from megaplan.spec.models import Spec

if TYPE_CHECKING:
    from megaplan.cost.times import MeasuredCosts


def stack_costs(spec: Spec, inventory: Inventory, measured: MeasuredCosts | None = None) -> StackCosts:
    """Costs of each layer and of both ends: F + I + W.

    Args:
        spec: The spec.
        inventory: Parameter tensors of the spec.
        measured: A costs file of as many layers: nanoseconds of one microbatch on one rank.

    Without a costs file: executed FLOPs per token, including work that an op itself repeats, without recompute policies. The token
    embedding costs 0; projections of side embeddings are on the first slot; the head (6 · hidden · vocab) and every MTP depth (its block,
    its projection, one more head) on the last.
    """
    if measured is not None:
        times = measured.times
        return StackCosts(tuple(layer.total_ns for layer in times.layers), times.first.total_ns, times.last.total_ns, unit="ns")
    costs = model_costs(spec, inventory)
    last = costs.head.total_flops + sum(depth.total_flops for depth in costs.mtp)
    return StackCosts(tuple(layer.total_flops for layer in costs.layers), costs.side_embeddings.total_flops, last)
