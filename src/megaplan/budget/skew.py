"""A job's budget under balanced and under uneven routing."""

from __future__ import annotations

from typing import Literal, NamedTuple

from megaplan.budget.build import build_budget
from megaplan.budget.values import Budget, RankBudget
from megaplan.inventory.build import build_inventory
from megaplan.inventory.tensors import Inventory
from megaplan.layout.values import Layout
from megaplan.spec.models import Spec

BALANCED = 1.0
Reason = Literal["moe.routing_skew", "largest possible"]


class RoutingRange(NamedTuple):
    """Effect of uneven routing: rows can move only between expert ranks.

    Attributes:
        balanced: Every expert rank receives its even share.
        skewed: The busiest expert rank receives `skew` times that.
        skew: `moe.routing_skew` if the spec states one above 1, of several the largest; else the largest possible, `largest_skew`.
        reason: Source of the skew.
    """

    balanced: Budget
    skewed: Budget
    skew: float
    reason: Reason

    def allocated_bytes(self, rank: RankBudget) -> tuple[int, int]:
        """Bytes that torch's allocator has allocated at the peak of these ranks: balanced, skewed."""
        first = rank.ranks[0]
        return self.balanced.of_rank(first).allocated_bytes, self.skewed.of_rank(first).allocated_bytes


def routing_range(spec: Spec, inventory: Inventory, layout: Layout, budget: Budget) -> RoutingRange | None:
    """Both ends of the routing, or None if no row can move: without experts, at ep 1, or with a capacity that bounds every expert.

    Args:
        spec: A checked spec.
        inventory: Parameter tensors of the spec.
        layout: Slots of the spec.
        budget: Budget of the spec as written: one of the two ends.
    """
    moe = spec.model.moe
    if moe is None or moe.capacity_factor is not None or spec.mesh.ep == 1:
        return None

    def at(skew: float) -> Budget:
        if skew == moe.routing_skew:
            return budget
        model = spec.model.model_copy(update={"moe": moe.model_copy(update={"routing_skew": skew})})
        other = spec.model_copy(update={"model": model})
        return build_budget(other, inventory if len(moe.skews) == 1 else build_inventory(other), layout)

    if moe.largest_skew > BALANCED:
        return RoutingRange(at(BALANCED), budget, moe.largest_skew, "moe.routing_skew")
    most = largest_skew(spec.mesh.ep, moe.num_experts, moe.top_k)
    return RoutingRange(budget, at(most), most, "largest possible")


def largest_skew(ep: int, num_experts: int, top_k: int) -> float:
    """Most rows of one expert rank relative to its even share: every token goes to as many of its experts as allowed, to each once."""
    return min(float(ep), num_experts / top_k)
